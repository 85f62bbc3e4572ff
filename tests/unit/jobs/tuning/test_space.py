"""`tune.space`: its grammar, its values held against the job, and the trials that come out of it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.devices.inventory import Device, Inventory, Node
from jobs.driver.progress import Activity
from jobs.job.spec import load_spec
from jobs.tuning.space_points import Point, Values, find_points, parse_space, run_cells
from raytrain.errors import InputError
from raytrain.runs.folder import SweepFolder

JOB: dict[str, Any] = {
    "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 1, "width": 8, "context": 8},
    "data": {"source": "stdlib"},
    "loop": {"max_steps": 100},
    "precision": {"dtype": "fp32"},
}


def machine(*, cpus: int = 4, gpus: int = 0) -> Inventory:
    """One node with so many cores and GPUs."""
    devices = tuple(
        Device(kind="cuda", name="NVIDIA A100", memory_bytes=80 << 30, capability=(8, 0), uuid=None, index=index)
        for index in range(gpus)
    )
    node = Node(host="a", cpus=cpus, memory_bytes=64 << 30, devices=devices)
    return Inventory((node,), source="test", cpu_model="cpu", cpu_flags={})


def points(space: dict[str, Any], *, cpus: int = 4, gpus: int = 0, **tune: Any) -> Any:
    """The trials of a space."""
    return find_points(load_spec(mapping={**JOB, "tune": {"space": space, **tune}}), machine(cpus=cpus, gpus=gpus))


def test_lists_and_distributions_are_read() -> None:
    space = parse_space({
        "optim.lr": "loguniform(1e-4, 1e-2)", "optim.weight_decay": "uniform(0, 0.5)", "model.width": "randint(1, 8)",
        "loop": {"global_batch_size": [16, 32]}, "optim.name": "choice(adamw, sgd)",
    })  # fmt: skip
    assert space.keys == {
        "optim.lr": Values("loguniform", (1e-4, 1e-2)),
        "optim.weight_decay": Values("uniform", (0, 0.5)),
        "model.width": Values("randint", (1, 8)),
        "loop.global_batch_size": Values("choice", (16, 32)),
        "optim.name": Values("choice", ("adamw", "sgd")),
    }
    assert not space.is_grid


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "a list, or a string such as loguniform"),
        ("loguniform(1e-4", "a list, or a string such as loguniform"),
        ("normal(0, 1)", "a list, or a string such as loguniform"),
        ("uniform(0)", "uniform(low, high) with two numbers"),
        ("uniform(1, 0)", "uniform(low, high) with low < high"),
        ("loguniform(0, 1)", "loguniform(low, high) with 0 < low < high"),
        ("randint(1, 2.5)", "randint(low, high) with two integers"),
        ("uniform(0, .inf)", "uniform(low, high) with two numbers"),
        ([], "a list, or a string such as loguniform"),
        ([1e-3, 1e-3], "each value once"),
    ],
)
def test_a_value_that_is_neither_a_list_nor_a_distribution_is_refused(value: Any, expected: str) -> None:
    with pytest.raises(InputError) as error:
        parse_space({"optim.lr": value})
    assert error.value.key == "tune.space.optim.lr" and expected in error.value.expected


@pytest.mark.parametrize(
    ("space", "key", "said"),
    [
        ({"optim.learning_rate": [1e-3]}, "tune.space.optim.learning_rate", "did you mean optim.lr?"),
        ({"optim.lr": [1e-3, -1.0]}, "tune.space.optim.lr", "a number > 0"),
        ({"loop.global_batch_size": "uniform(4, 9)"}, "tune.space.loop.global_batch_size", "an integer >= 1"),
        ({"save.dir": ["a", "b"]}, "tune.space.save.dir", "a key that cannot differ between trials"),
        ({"lop.max_steps": [1]}, "tune.space.lop", "did you mean loop"),
        ({}, "tune.space", "leave it out to search batch size and precision"),
        ({"scale.workers": [1, 500]}, "tune.space.scale.workers", "at most 16, 4 per CPU core"),
        ({"scale.workers": [500]}, "tune.space", "none of 1 combination"),
        ({"loop.micro_batch_size": [5]}, "tune.space", "none of 1 combination"),
    ],
)
def test_a_space_that_cannot_be_tried_is_refused_before_anything_starts(
    space: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        points(space)
    assert error.value.key.startswith(key) and said in str(error.value)


def test_a_grid_is_every_combination_but_those_that_do_not_divide() -> None:
    found = points({"loop.global_batch_size": [16, 24], "loop.micro_batch_size": [8, 12]})
    assert [tuple(one.values.values()) for one in found.trials] == [(16, 8), (24, 8), (24, 12)]
    assert [one.number for one in found.trials] == [1, 2, 3]
    ((values, reason),) = found.left_out
    assert values == {"loop.global_batch_size": 16, "loop.micro_batch_size": 12} and "divides" in reason


def test_draws_are_the_same_each_time_and_differ_from_each_other() -> None:
    space = {"optim.lr": "loguniform(1e-4, 1e-2)", "loop.global_batch_size": [16, 32]}
    first, again = (points(space, max_trials=40).trials for _ in range(2))
    assert [one.values for one in first] == [one.values for one in again] and len(first) == 40
    rates = [one.values["optim.lr"] for one in first]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates) and len(set(rates)) == 40
    below = sum(math.log10(rate) < -3 for rate in rates)
    assert 8 <= below <= 32, "evenly over the powers of ten"
    assert {one.values["loop.global_batch_size"] for one in first} == {16, 32}
    assert points(space).trials[:16] == first[:16] and len(points(space).trials) == 16


def test_trials_that_fit_run_concurrently_and_timed_trials_on_cpus_run_alone() -> None:
    narrow = {"scale.workers": [1, 2], "scale.threads": [1]}
    found = points(narrow, cpus=6)
    assert [one.cores for one in found.trials] == [1, 2]
    assert found.at_a_time(gpus=0, cpus=6, alone=False) == 3
    assert found.at_a_time(gpus=0, cpus=6, alone=True) == 1
    on_gpus = points({"scale.workers": [1, 2]}, cpus=16, gpus=4)
    assert [one.gpus for one in on_gpus.trials] == [1, 2]
    assert on_gpus.at_a_time(gpus=4, cpus=16, alone=True) == 2


def test_a_trial_is_pinned_to_its_plan_and_polled_often_enough() -> None:
    (one,) = points({"optim.lr": [1e-3]}, scheduler="asha").trials
    trial = load_spec(mapping={**JOB, "tune": {"scheduler": "asha"}}, overrides=one.overrides).spec
    assert (trial.scale.workers, trial.scale.threads, trial.loop.eval_every) == (1, 4, 10)
    assert trial.tune.space is None and trial.tune.scheduler == "none"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data": {"source": "stdlib", "eval_fraction": 0.0}}, "tune.metric"),
        ({"data": {"source": "stdlib", "eval_fraction": 0.0}, "tune": {"metric": "samples_per_s", "scheduler": "asha"}},
         "tune.scheduler"),
        ({"loop": {"max_steps": 100, "eval_every": 100}, "tune": {"scheduler": "median"}}, "tune.scheduler"),
    ],
)  # fmt: skip
def test_there_must_be_something_to_compare_trials_by(changes: dict[str, Any], key: str) -> None:
    job = {**JOB, **changes, "tune": {"space": {"optim.lr": [1e-3]}, **changes.get("tune", {})}}
    with pytest.raises(InputError) as error:
        find_points(load_spec(mapping=job), machine())
    assert error.value.key == key


@pytest.mark.covers("TUNE-07")
@pytest.mark.parametrize("name", ["asha", "median"])
def test_a_scheduler_that_knows_the_finished_trials_stops_hopeless_ones(name: str) -> None:
    from ray.tune.schedulers import TrialScheduler

    from jobs.tuning.space_trials import EndedTrial, scheduler_of

    good = [(step, 2.0 / step) for step in range(10, 101, 10)]
    curves = {1: good, 2: [(step, 1.1 * loss) for step, loss in good]}
    found = points({"optim.lr": [1e-3, 1e-2]}, scheduler=name)
    stopped = 0
    for number in range(4):
        scheduler = scheduler_of(name, found, curves=curves)
        trial: Any = EndedTrial(f"new {number}")
        scheduler.on_trial_add(None, trial)
        results = [{"step": step, "eval_loss": 3.0 + 0.1 * number} for step, _ in good]
        stopped += any(scheduler.on_trial_result(None, trial, one) == TrialScheduler.STOP for one in results[:-1])
    assert stopped == 4
    assert scheduler_of("none", found, curves=curves) is None


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        ({"model.widht": [1, 2]}, "does not accept"),
        ({"data.rows": [1, 2]}, "does not accept"),
        ({"model.builder": ["no_such_module:build"]}, "module no_such_module does not exist"),
    ],
)
def test_a_key_that_a_users_function_does_not_accept_is_refused_before_a_trial_starts(
    space: dict[str, Any], seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "called_mod.py").write_text(
        "import torch\n"
        "def build(width=1): 1 / 0\n"
        "def data(n=1): return {'train': {'x': torch.zeros(8, 2), 'labels': torch.arange(8) % 2}}\n"
    )
    monkeypatch.chdir(tmp_path)
    job = {"model": {"builder": "called_mod:build"}, "data": {"source": "called_mod:data"}, "tune": {"space": space}}
    with pytest.raises(InputError, match=seen):
        find_points(load_spec(mapping=job), machine())


def test_every_model_of_a_space_is_built_once_before_a_trial_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "built_mod.py").write_text(
        "from raytrain.models.gpt import gpt\n"
        "def build(width, context, vocab_size=9):\n"
        "    with open('built', 'a') as note: note.write(f'{width} ')\n"
        "    if width == 3: raise ValueError('three is too few')\n"
        "    return gpt(width=width, context=context, vocab_size=vocab_size, layers=1, heads=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    job = {**JOB, "model": {"builder": "built_mod:build", "width": 4, "context": 8}}
    built = []
    for rates in ([0.1], [0.1, 0.2]):
        space = {"model.width": [4, 3], "optim.lr": rates}
        with pytest.raises(InputError, match=r"tune\.space\.model\.width: got 3(.|\n)*three is too few"):
            find_points(load_spec(mapping={**job, "tune": {"space": space}}), machine())
        built.append((tmp_path / "built").read_text().split())
        (tmp_path / "built").unlink()
    assert built[0] == built[1], "no model is built again for another learning rate"


def test_both_ends_of_a_range_of_integers_belong_to_it() -> None:
    import random

    from jobs.tuning.space_trials import ray_domain

    both = Values("randint", (1, 2))
    assert {both.draw(random.Random(seed)) for seed in range(20)} == {1, 2}
    assert set(ray_domain(both).sample(size=50)) == {1, 2}


def test_a_switch_is_shown_as_one() -> None:
    assert run_cells({"values": {"loop.compile": True}, "outcome": "ok"}, ["loop.compile"])[0] == "True"


@pytest.mark.skipif(find_spec("optuna") is not None, reason="optuna is installed")
def test_a_searcher_that_is_not_installed_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(
        InputError, match=r"tune\.searcher: got optuna, which is not installed(.|\n)*pip install optuna"
    ):
        points({"optim.lr": [1e-3]}, searcher="optuna")


@pytest.mark.parametrize("name", ["random", "optuna"])
def test_a_searcher_of_ray_tune_proposes_points_that_can_run_and_continues_those_without_a_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A searcher of our own takes the place of Optuna where that is not installed."""
    from ray.tune.search import Searcher

    from jobs.tuning import space_trials

    made: list[Any] = []

    class Recorded(Searcher):
        """Proposes sizes in turn, of which 5 divides no batch of 16, and notes what it is told."""

        def __init__(self, **_: Any) -> None:
            super().__init__(metric=None, mode=None)
            self.told: list[tuple[str, Any]] = []
            self._sizes = iter([5, 8, 4, 16, 2])
            made.append(self)

        def set_search_properties(self, metric: Any, mode: Any, config: dict[str, Any], **spec: Any) -> bool:
            self.told.append((mode, sorted(config)))
            return True

        def suggest(self, trial_id: str) -> Any:
            return {"loop.micro_batch_size": next(self._sizes)}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            self.told.append(("failed" if error else "completed", result and result["eval_loss"]))

        def add_evaluated_point(self, parameters: dict[str, Any], value: float, *_: Any, **__: Any) -> None:
            self.told.append(("evaluated", (parameters["loop.micro_batch_size"], value)))

    if name == "optuna":
        pytest.importorskip("optuna")
    else:
        monkeypatch.setattr("jobs.tuning.space_points.find_spec", lambda _: object())
        monkeypatch.setattr(space_trials, "create_searcher", lambda _, **keys: Recorded(**keys))
    tuned = {"space": {"loop.micro_batch_size": "randint(1, 16)"}, "searcher": "optuna", "max_trials": 3}
    job = {**JOB, "loop": {"max_steps": 10, "global_batch_size": 16}, "tune": tuned}
    loaded = load_spec(mapping=job)
    found = find_points(loaded, machine())
    sweep = SweepFolder(str(tmp_path))
    command: Any = SimpleNamespace(the_sweep=sweep, spec=loaded.spec)

    def searcher() -> space_trials.PointSearcher:
        return space_trials.PointSearcher(command, found)

    limit = len(found.trials)
    first = searcher()
    configs = [first.suggest(f"id {number}")["trial"] for number in range(limit)]
    assert [one["number"] for one in configs] == list(range(1, limit + 1))
    assert all(16 % one["values"]["loop.micro_batch_size"] == 0 for one in configs)
    assert first.suggest("too many") == Searcher.FINISHED
    first.on_trial_complete("id 0", {"eval_loss": 0.5, "training_iteration": 1})
    sweep.record({"trial": 1, "values": configs[0]["values"], "outcome": "ok", "eval_loss": 0.5})
    again = searcher()
    assert [again.suggest("new")["trial"] for _ in configs[1:]] == configs[1:], "with their numbers and values"
    assert again.suggest("new") == Searcher.FINISHED
    if name == "random":
        assert made[0].told == [("min", ["loop.micro_batch_size"]), ("failed", None), ("completed", 0.5)]
        assert made[1].told[1:] == [("evaluated", (configs[0]["values"]["loop.micro_batch_size"], 0.5))]


def test_reservations_of_a_trial_that_died_go_once_the_trials_beside_it_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.exceptions

    from jobs.tuning import space_trials

    table = {f"{number:036x}": {"state": "CREATED", "bundles": {0: {"CPU": 1}}} for number in (1, 2)}
    removed: list[str] = []
    monkeypatch.setattr(space_trials, "placement_group_table", lambda: table)
    monkeypatch.setattr(space_trials, "remove_placement_group", lambda group: removed.append(group.id.hex()))
    for private in (True, False):
        command: Any = SimpleNamespace(
            the_sweep=SweepFolder(str(tmp_path)), activity=Activity(Console(quiet=True)), print_line=lambda _: None,
            spec=SimpleNamespace(tune=SimpleNamespace(metric="eval_loss")),
        )  # fmt: skip
        trials = space_trials.SpaceTrials(command, private=private)
        one, two, three = (
            space_trials.config_of(Point(number, {"seed": number}, (), 0, 1, 10)) for number in (1, 2, 3)
        )
        trials.runs(one, started=True)
        trials.runs(two, started=True)
        trials.ended(one, {}, ray.exceptions.ActorDiedError())
        assert removed == [], "what belongs to trial 2 cannot be told from it"
        trials.runs(three, started=True)
        table[f"{3:036x}"] = {"state": "CREATED", "bundles": {0: {"CPU": 1}}}
        table[f"{2:036x}"]["state"] = "REMOVED"
        trials.ended(two, {"final": True, "eval_loss": 1.0}, None)
        assert removed == ([f"{1:036x}"] if private else []), "not the third's, which runs"
        removed.clear()
        table[f"{2:036x}"]["state"] = "CREATED"
        del table[f"{3:036x}"]
