"""Which trials a sweep makes: what died is measured once more, each kind of device has trials of its own."""

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
from jobs.driver.planning import plan_job
from jobs.driver.progress import Activity
from jobs.job.spec import load_spec
from jobs.tuning.batch import answer_of, chosen_loaders
from jobs.tuning.batch_search import Kind, LoaderSearch, find_kinds, find_loaders
from jobs.tuning.batch_trials import BatchTrials
from jobs.tuning.cache import of_kind
from jobs.tuning.space_points import Point
from jobs.tuning.space_trials import SpaceTrials, config_of
from raytrain.autotune.batch_space import BatchSpace, SearchResults
from raytrain.autotune.measurement import Candidate, LoaderRate, LoaderRates, Measurement
from raytrain.errors import InputError
from raytrain.plan.choice import Deferred
from raytrain.plan.facts import DataFacts
from raytrain.plan.room import Need
from raytrain.runs.folder import SweepFolder

DEATH = ray.exceptions.ActorDiedError()
SPACE = BatchSpace(("fp32",), (1, 2, 4), 4, None, gate_steps=0)
NO_LOADERS = LoaderSearch(None)


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """What a trial reports: every pass takes a second."""
    points = [Candidate(**one) for one in (config["candidate"], *config["against"])]
    first, *others = [Measurement(one, "ok", (1.0, 1.0, 1.0), (0.01,) * 3).to_json() for one in points]
    told = {"contest": [first, *others]} if others else {"measurement": first}
    return {**told, "signature": {"hash": "a", "facts": {}}}


def quiet() -> dict[str, Any]:
    """Lines that nobody reads."""
    return {"activity": Activity(Console(quiet=True)), "print_line": lambda _: None}


def kind_of(name: str, *, devices: int = 1) -> Kind:
    """A kind of devices."""
    return Kind(name, devices, workers=1, cores=1, budget_bytes=None, device="cpu", device_bytes=0)


def batch_trials(
    sweep: SweepFolder, *kinds: str, space: BatchSpace = SPACE, loaders: LoaderSearch = NO_LOADERS,
    most: int | None = None,
) -> tuple[BatchTrials, dict[str, SearchResults]]:  # fmt: skip
    """The trials of a sweep that begins or goes on, and what is known of each kind of device."""
    search: Any = SimpleNamespace(
        kinds=tuple(map(kind_of, kinds or ("",))),
        space=space,
        space_of=lambda _: replace(space, loaders=loaders.most),
        loaders=loaders,
    )
    known = {kind.name: SearchResults.of_rows(of_kind(sweep.standing(), kind.name)) for kind in search.kinds}
    needs = {kind.name: Need("scale.threads", "trial", 1, {"CPU": 1}) for kind in search.kinds}
    return BatchTrials(search, known=known, needs=needs, sweep=sweep, most=most, **quiet()), known


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
    assert {one.candidate.micro_batch_size: one.outcome for one in again[1][""].measurements} == {1: "ok", 4: "ok"}
    assert not sweep.again()


def test_loader_processes_are_measured_once_and_last_with_the_chosen_batch(tmp_path: Path) -> None:
    sweep, loaders = SweepFolder(str(tmp_path)), LoaderSearch(2)
    (trials, known), configs = batch_trials(sweep, loaders=loaders), []
    rates = tuple(LoaderRate(count, 10, 1.0 / (1 + count)) for count in (0, 1, 2))
    while isinstance(config := trials.propose(), dict):
        configs.append(config)
        assert trials.propose() is None, "one device"
        chosen = Candidate(**config["candidate"])
        told = {"loaders": asdict(LoaderRates(chosen, 2, rates))}
        trials.ended(config, measured(config) if config["loaders"] is None else told, None)
    *others, last = configs
    assert all(one["loaders"] is None for one in others) and last["loaders"] == 2
    size = last["candidate"]["micro_batch_size"]
    assert size == 4 and last["passes"] == 1, "the fastest, which is a whole step of four rows"
    assert sweep.ended()[-1]["what"] == "loaders"
    search: Any = SimpleNamespace(loaders=loaders)
    assert chosen_loaders(search, {**known, "other": SearchResults()}).value == 2  # type: ignore[union-attr]
    again, _ = batch_trials(sweep, loaders=loaders)
    assert again.propose() == Searcher.FINISHED, "what a sweep has measured is not measured again"
    more = batch_trials(sweep, loaders=LoaderSearch(4))[0].propose()
    assert isinstance(more, dict) and more["loaders"] == 4, "on a machine with more cores it is"


def test_loader_processes_are_unchanged_if_their_measurement_fails(tmp_path: Path) -> None:
    sweep, loaders = SweepFolder(str(tmp_path)), LoaderSearch(2)
    trials, known = batch_trials(sweep, loaders=loaders)
    while isinstance(config := trials.propose(), dict):
        failed = config["loaders"] is not None
        trials.ended(config, {} if failed else measured(config), RuntimeError("a bad row") if failed else None)
    assert sweep.ended()[-1]["reason"].endswith("a bad row") and sweep.ended()[-1]["outcome"] == "error"
    search: Any = SimpleNamespace(loaders=loaders)
    told = chosen_loaders(search, known)
    assert isinstance(told, Deferred) and "not measured" in told.how


def test_loader_processes_are_searched_where_a_run_would_have_any() -> None:
    def found(*, cpus: int = 8, kind: str = "items", **data: Any) -> tuple[int | None, str]:
        job = {"model": {"builder": "raytrain.models.mlp:mlp", "num_classes": 4}, "scale": {"workers": 2},
               "data": {"source": "mine:rows", "storage": "stream", **data}, "loop": {"max_steps": 4}}  # fmt: skip
        facts = DataFacts(100, 10, 40, None, 4400, None, "a test", kind)
        inventory = Inventory((Node("a", cpus, 1 << 34),), source="test", cpu_model="cpu", cpu_flags={})
        loaded = load_spec(mapping=job)
        plan = plan_job(loaded, inventory=inventory, data_facts=facts)
        search = find_loaders(loaded.spec, plan, inventory, facts)
        return search.most, search.reason

    assert found() == (4, ""), "each of two workers has half of the cores"
    assert found(cpus=1) == (None, "not searched, since there are fewer cores than workers")
    assert found(kind="memory") == (None, "not searched, rows are in memory")
    assert found(kind="groups") == (None, "not searched, row groups are read by a thread")
    assert found(storage="resident")[1] == "not searched, every item is read once, before the first step"
    assert found(loader_workers=3) == (None, "3, set by the job")


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
        return SpaceTrials(sweep, metric="eval_loss", private=False, **quiet())

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
    trials = SpaceTrials(sweep, metric="eval_loss", private=False, **quiet())
    trials.ended(config, {"final": True, "status": "interrupted", "eval_loss": 1.0}, None)
    trials.stopping = True
    trials.ended(config, {"step": 3}, None)
    assert sweep.ended() == []


def test_each_kind_of_device_is_searched_separately(tmp_path: Path) -> None:
    sweep = SweepFolder(str(tmp_path))
    trials, known = batch_trials(sweep, "H100", "T4")
    beside: list[Any] = [trials.propose(), trials.propose()]
    assert {one["kind"] for one in beside} == {"H100", "T4"} and trials.propose() is None
    assert [one["number"] for one in beside] == [1, 2]
    while beside:
        config = beside.pop(0)
        trials.started(config)
        trials.ended(config, measured(config), None)
        beside += [one for one in [trials.propose()] if isinstance(one, dict)]
    assert trials.propose() == Searcher.FINISHED
    for kind, line in known.items():
        assert {row["micro_batch_size"] for row in of_kind(sweep.ended(), kind)} == {1, 4}
        assert len(line.measurements) == 2 and len(line.contests) == 1
    numbers_given = sorted(row["trial"] for row in sweep.ended())
    assert numbers_given == list(range(1, len(numbers_given) + 1)), "one series of numbers"


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
