"""Which trials a sweep makes: what died is measured once more, each kind of device has trials of its own."""

from __future__ import annotations

from dataclasses import replace
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
from jobs.tuning.batch import Kind, answer_of, find_kinds
from jobs.tuning.batch_trials import BatchTrials
from jobs.tuning.space_points import Point
from jobs.tuning.space_trials import SpaceTrials, config_of
from raytrain.autotune.batch_space import BatchSpace, SearchResults
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.errors import InputError
from raytrain.plan.room import Need
from raytrain.runs.folder import SweepFolder

DEATH = ray.exceptions.ActorDiedError()
SPACE = BatchSpace(("fp32",), (1, 2, 4), 4, None, gate_steps=0)


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """What a trial reports: every pass takes a second."""
    points = [Candidate(**one) for one in (config["candidate"], *config["against"])]
    first, *others = [Measurement(one, "ok", (1.0, 1.0, 1.0), (0.01,) * 3).to_json() for one in points]
    told = {"contest": [first, *others]} if others else {"measurement": first}
    return {**told, "signature": {"hash": "a", "facts": {}}}


def command_of(sweep: SweepFolder, *, most: int | None = None) -> Any:
    """A command whose lines nobody reads."""
    wanted = SimpleNamespace(tune=SimpleNamespace(max_trials=most, metric="eval_loss"))
    activity = Activity(Console(quiet=True))
    return SimpleNamespace(the_sweep=sweep, activity=activity, print_line=lambda _: None, spec=wanted)


def results_of(sweep: SweepFolder, kind: str = "") -> SearchResults:
    """What a sweep has measured on a kind of device."""
    return SearchResults.of_rows(row for row in sweep.standing() if row.get("kind", "") == kind)


def batch_trials(
    sweep: SweepFolder, kind: str = "", *, space: BatchSpace = SPACE, most: int | None = None
) -> tuple[BatchTrials, SearchResults]:
    """The trials of a sweep that begins or goes on, and what is known of its device."""
    known, need = results_of(sweep, kind), Need("scale.threads", "trial", 1, {"CPU": 1})
    return BatchTrials(command_of(sweep, most=most), space, known, kind=kind, need=need), known


def run(made_trials: tuple[BatchTrials, Any], *, deadly: int | None = None) -> list[tuple[int, int]]:
    """(number, size) of all trials; those of `deadly` rows die."""
    trials, made = made_trials[0], []
    while isinstance(config := trials.propose(), dict):
        trials.started(config)
        size = config["candidate"]["micro_batch_size"]
        made.append((config["number"], size))
        died = size == deadly
        trials.ended(config, {} if died else measured(config), DEATH if died else None)
    return made


def test_a_measurement_whose_process_died_is_repeated_once_under_its_number(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    first = run(batch_trials(sweep), deadly=4)
    (dead,) = [number for number, size in first if size == 4]
    assert [(row["trial"], row["outcome"], row["deaths"]) for row in sweep.again()] == [(dead, "died", 1)]
    again = run(batch_trials(sweep), deadly=4)
    assert again == [(dead, 4)], "nothing else is measured again"
    assert sweep.again() == [] and run(batch_trials(sweep)) == []
    last = sweep.ended()[-1]
    assert (last["outcome"], last["deaths"]) == ("died", 2) and "once before" in last["measurement"]["reason"]


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


def test_a_run_whose_process_died_is_repeated_once(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    first, second = (config_of(Point(number, {"seed": number}, (), 0, 1, 10)) for number in (1, 2))

    def trials() -> SpaceTrials:
        return SpaceTrials(command_of(sweep), private=False)

    beginning = trials()
    beginning.ended(first, {}, DEATH)
    beginning.ended(second, {"final": True, "eval_loss": 1.0}, None)
    assert [(row["trial"], row["outcome"], row["deaths"]) for row in sweep.again()] == [(1, "died", 1)]
    assert [row["trial"] for row in sweep.standing()] == [2], "the other one is left to repeat"
    trials().ended(first, {}, DEATH)
    last = sweep.ended()[-1]
    assert last["deaths"] == 2 and "once before" in last["reason"]
    assert sweep.again() == [] and {row["trial"] for row in sweep.standing()} == {1, 2}


def test_a_run_that_was_asked_to_stop_is_no_result(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    config = config_of(Point(1, {"seed": 1}, (), 0, 1, 10))
    trials = SpaceTrials(command_of(sweep), private=False)
    trials.ended(config, {"final": True, "status": "interrupted", "eval_loss": 1.0}, None)
    trials.stopping = True
    trials.ended(config, {"step": 3}, None)
    assert sweep.ended() == []


def test_each_kind_of_device_is_searched_by_itself_with_one_series_of_numbers(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    made = [number for kind in ("H100", "T4") for number, _ in run(batch_trials(sweep, kind))]
    assert made == list(range(1, len(made) + 1))
    for kind in ("H100", "T4"):
        known = results_of(sweep, kind)
        assert {one.candidate.micro_batch_size for one in known.measurements} == {1, 4}
        assert len(known.measurements) == 2 and len(known.contests) == 1
    assert run(batch_trials(sweep, "T4")) == [], "what a sweep has measured is not measured again"


def test_measurements_that_may_run_at_the_same_time_do(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    trials, known = batch_trials(sweep, space=replace(SPACE, devices=3))
    beside: list[Any] = [trials.propose(), trials.propose()]
    assert [one["number"] for one in beside] == [1, 2] and trials.propose() is None
    for config in beside:
        trials.started(config)
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


def found_kinds(*nodes: Node, **scale: Any) -> tuple[Kind, ...]:
    """The kinds of these nodes for a job of 8 workers."""
    job = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"source": "stdlib"}, "scale": scale}
    inventory = Inventory(nodes, source="test", cpu_model="cpu", cpu_flags={})
    return find_kinds(load_spec(mapping=job).spec, inventory, workers=scale.get("workers", 8), on_gpu=True)


def kinds_of(*nodes: Node, **scale: Any) -> list[tuple[str, int, int | None]]:
    """(name, devices, budget in GiB) of each kind."""
    found = found_kinds(*nodes, **scale)
    return [(one.name, one.devices, one.budget_bytes and round(one.budget_bytes / 2**30 / 0.9)) for one in found]


def test_kinds_of_devices_are_those_that_ray_distinguishes() -> None:
    big, small = node("a", "H100", gib=80, gpus=4), node("b", "T4", gib=16, gpus=2)
    assert kinds_of(big, small) == [("H100", 4, 80), ("T4", 2, 16)]
    assert kinds_of(big, small, accelerator="T4") == [("", 2, 16)]
    (small_only,) = found_kinds(big, small, accelerator="t4")
    asked = small_only.resources(on_gpu=True, local=False)
    assert asked == {"CPU": 1, "GPU": 1, "accelerator_type:T4": 0.001}, "a trial must not run on an H100"
    assert kinds_of(big, small, workers=4) == [("H100", 4, 80)], "the run does without the others"
    assert kinds_of(big, node("c", "H100", gib=80, gpus=1)) == [("", 5, 80)]
    assert kinds_of(big, node("c", "", gib=16, gpus=1)) == [("", 5, 16)], "a trial cannot be kept on what has no name"


def test_a_kind_weighs_as_much_as_it_has_workers_of_the_run() -> None:
    kinds = found_kinds(node("a", "H100", gib=80, gpus=4), node("b", "T4", gib=16, gpus=2), workers=5)
    assert {one.name: (one.devices, one.workers) for one in kinds} == {"H100": (4, 4), "T4": (2, 1)}
    search: Any = SimpleNamespace(
        kinds=kinds, space=SPACE, space_of=lambda kind: replace(SPACE, budget_bytes=kind.budget_bytes)
    )
    answer = answer_of(search, {one.name: SearchResults.of_rows(done()) for one in kinds})
    each = answer.decisions["T4"].rows_per_s
    assert answer.rows_per_s == pytest.approx(5 * each) and "all 5 workers" in answer.precision.reason


def done() -> list[dict[str, Any]]:
    """Rows of a search over `SPACE`."""
    sizes = [Measurement(Candidate("fp32", size), "ok", (1.0,) * 3, (0.01,) * 3, 1, 1) for size in SPACE.sizes]
    return [{"measurement": one.to_json()} for one in sizes]


def test_different_gpus_of_one_machine_are_not_searched_as_one_kind() -> None:
    large, small = (node("a", name, gib=gib, gpus=2) for name, gib in (("NVIDIA A100", 80), ("NVIDIA T4", 16)))
    devices = (*large.devices, *(replace(one, index=2 + one.index) for one in small.devices))
    mixed = replace(large, devices=devices, accelerator="A100")
    with pytest.raises(InputError, match=r"scale.accelerator: got NVIDIA A100 and NVIDIA T4 on the machine a"):
        kinds_of(mixed)
    with pytest.raises(InputError, match="NVIDIA T4 on the machine a"):
        kinds_of(mixed, node("b", "H100", gib=80, gpus=1))
    assert kinds_of(mixed, accelerator="T4") == [("", 2, 16)] and kinds_of(mixed, accelerator="A100") == [("", 2, 80)]
