"""Which trials a sweep makes, and on which devices: what died is measured once more."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from ray.tune.search import Searcher
from rich.console import Console

from cluster.devices.inventory import Device, Inventory, Node
from jobs.driver.progress import Activity
from jobs.job.spec import load_spec
from jobs.tuning.batch import TrialDevices, find_devices
from jobs.tuning.batch_trials import BatchTrials
from jobs.tuning.space_points import Point
from jobs.tuning.space_trials import SpaceTrials, config_of
from raytrain.autotune.batch_search import SearchResults
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.size_curve import BatchSpace
from raytrain.errors import InputError
from raytrain.plan.room import Need
from raytrain.runs.folder import SweepFolder

DEATH = ray.exceptions.ActorDiedError()
SPACE = BatchSpace(("fp32",), (1, 2, 4), 4, None)


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """What a trial reports: every pass takes a second."""
    points = [Candidate(**one) for one in (config["candidate"], *config["against"])]
    return {"measured": [asdict(Measurement(one, "ok", (1.0, 1.0, 1.0), (0.01,) * 3)) for one in points]}


def command_of(sweep: SweepFolder, *, most: int | None = None) -> Any:
    """A command whose lines nobody reads."""
    wanted = SimpleNamespace(tune=SimpleNamespace(max_trials=most, metric="eval_loss"))
    activity = Activity(Console(quiet=True))
    return SimpleNamespace(the_sweep=sweep, activity=activity, print_line=lambda _: None, spec=wanted)


def batch_trials(
    sweep: SweepFolder, *, space: BatchSpace = SPACE, most: int | None = None
) -> tuple[BatchTrials, SearchResults]:
    """The trials of a sweep that begins or goes on, and what is known."""
    known, need = SearchResults.of_rows(sweep.standing()), Need("scale.threads", "trial", 1, {"CPU": 1})
    return BatchTrials(command_of(sweep, most=most), space, known, need=need), known


def run(made_trials: tuple[BatchTrials, Any], *, deadly: int | None = None) -> list[tuple[int, int]]:
    """(number, size) of all trials; those of `deadly` rows die."""
    trials, made = made_trials[0], []
    while isinstance(config := trials.propose(), dict):
        trials.runs(config, started=True)
        size = config["candidate"]["micro_batch_size"]
        made.append((config["number"], size))
        died = size == deadly
        trials.ended(config, {} if died else measured(config), DEATH if died else None)
    return made


def test_a_measurement_whose_process_died_is_repeated_by_each_resumed_search_under_its_number(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    first = run(batch_trials(sweep), deadly=4)
    (dead,) = [number for number, size in first if size == 4]
    for _ in range(2):
        assert [(row["trial"], row["outcome"]) for row in sweep.again()] == [(dead, "died")]
        assert run(batch_trials(sweep), deadly=4) == [(dead, 4)], "nothing else is measured again"
    assert sweep.ended()[-1]["measured"][0]["reason"] == "its process died"
    assert run(batch_trials(sweep))[0] == (dead, 4), "it lives, and what follows from it is measured"
    assert sweep.again() == [] and run(batch_trials(sweep)) == []


def test_a_measurement_that_lives_the_second_time_counts_even_at_the_most_trials(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    run(batch_trials(sweep, most=2), deadly=4)
    assert {row["micro_batch_size"] for row in sweep.again()} == {4}
    again = batch_trials(sweep, most=2)
    assert len(run(again)) == 1
    assert {one.candidate.micro_batch_size: one.outcome for one in again[1].measurements} == {1: "ok", 4: "ok"}
    assert not sweep.again()


def test_out_of_memory_and_other_errors_keep_their_types(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    trials, _ = batch_trials(sweep)
    for error in (RuntimeError("a bug"), ray.exceptions.OutOfMemoryError("memory")):
        config = trials.propose()
        assert isinstance(config, dict)
        trials.ended(config, {}, error)
    assert [row["outcome"] for row in sweep.ended()] == ["error", "out_of_memory"] and sweep.again() == []


def test_a_run_whose_process_died_is_repeated(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    first, second = (config_of(Point(number, {"seed": number}, (), 0, 1, 10)) for number in (1, 2))

    def trials() -> SpaceTrials:
        return SpaceTrials(command_of(sweep), private=False)

    beginning = trials()
    beginning.ended(first, {}, DEATH)
    beginning.ended(second, {"final": True, "eval_loss": 1.0}, None)
    assert [(row["trial"], row["outcome"]) for row in sweep.again()] == [(1, "died")]
    assert [row["trial"] for row in sweep.standing()] == [2], "the other one is left to repeat"
    trials().ended(first, {"final": True, "eval_loss": 1.0}, None)
    assert sweep.again() == [] and {row["trial"] for row in sweep.standing()} == {1, 2}


def test_a_run_that_was_asked_to_stop_is_no_result(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    config = config_of(Point(1, {"seed": 1}, (), 0, 1, 10))
    trials = SpaceTrials(command_of(sweep), private=False)
    trials.ended(config, {"final": True, "status": "interrupted", "eval_loss": 1.0}, None)
    trials.stopping = True
    trials.ended(config, {"step": 3}, None)
    assert sweep.ended() == []


def test_trials_have_one_series_of_numbers_and_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    made = [number for number, _ in run(batch_trials(sweep))]
    assert made == list(range(1, len(made) + 1))
    again, known = batch_trials(sweep)
    assert {one.candidate.micro_batch_size for one in known.measurements} == {1, 4}
    assert len(known.measurements) == 2 and len(known.comparisons) == 1
    assert run((again, known)) == []


def test_measurements_that_may_run_at_the_same_time_do(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    trials, known = batch_trials(sweep, space=replace(SPACE, devices=3))
    beside: list[Any] = [trials.propose(), trials.propose()]
    assert [one["number"] for one in beside] == [1, 2] and trials.propose() is None
    for config in beside:
        trials.runs(config, started=True)
        trials.ended(config, measured(config), None)
    assert len(known.measurements) == 2
    trials.stopping = True
    assert trials.propose() == Searcher.FINISHED, "asked to stop"
    trials.stopping = False
    assert isinstance(trials.propose(), dict), "there was more to measure"


def node(host: str, accelerator: str, *, gib: int, gpus: int) -> Node:
    """A node of a Ray cluster."""
    devices = tuple(
        Device(kind="cuda", name=accelerator, memory_bytes=gib << 30, capability=(8, 0), uuid=None, index=index)
        for index in range(gpus)
    )
    return Node(host=host, cpus=8, memory_bytes=1 << 38, devices=devices, accelerator=accelerator)


def devices_of(*nodes: Node, **scale: Any) -> TrialDevices:
    """Where a search for a job of 8 workers measures on these nodes."""
    job = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"source": "stdlib"}, "scale": scale}
    inventory = Inventory(nodes, source="test", cpu_model="cpu", cpu_flags={})
    return find_devices(load_spec(mapping=job).spec, inventory, workers=scale.get("workers", 8), on_gpu=True)


def where(*nodes: Node, **scale: Any) -> tuple[str, int, int | None]:
    """(accelerator type that Ray is asked for, devices, budget in GiB)."""
    found = devices_of(*nodes, **scale)
    return found.required, found.number, found.budget_bytes and round(found.budget_bytes / 2**30 / 0.9)


def test_trials_measure_on_the_type_of_device_with_the_least_memory() -> None:
    big, small = node("a", "H100", gib=80, gpus=4), node("b", "T4", gib=16, gpus=2)
    assert where(big, small) == where(small, big) == where(big, small, accelerator="T4") == ("T4", 2, 16)
    asked = devices_of(big, small).resources(local=False)
    assert asked == {"CPU": 1, "GPU": 1, "accelerator_type:T4": 0.001}, "a trial must not run on an H100"
    assert devices_of(big, small, accelerator="t4").resources(local=False) == asked
    assert where(big, small, workers=4) == ("H100", 4, 80), "the run does without the others"
    assert where(big, node("c", "H100", gib=80, gpus=1)) == ("", 5, 80)
    assert where(big, node("c", "", gib=16, gpus=1)) == ("", 5, 16), "a trial cannot be kept on what has no name"


def test_different_gpus_of_one_machine_are_not_searched_as_one_type() -> None:
    large, small = (node("a", name, gib=gib, gpus=2) for name, gib in (("NVIDIA A100", 80), ("NVIDIA T4", 16)))
    devices = (*large.devices, *(replace(one, index=2 + one.index) for one in small.devices))
    mixed = replace(large, devices=devices, accelerator="A100")
    with pytest.raises(InputError, match=r"scale.accelerator: got NVIDIA A100 and NVIDIA T4 on the machine a"):
        where(mixed)
    with pytest.raises(InputError, match="NVIDIA T4 on the machine a"):
        where(mixed, node("b", "H100", gib=80, gpus=1))
    assert where(mixed, accelerator="T4")[1:] == (2, 16) and where(mixed, accelerator="A100")[1:] == (2, 80)
