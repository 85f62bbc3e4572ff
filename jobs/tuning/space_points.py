"""`tune.space`: the keys of a job to search, their values, and the trials, each a complete job. All are checked before
anything starts.

A key takes a list (`[16, 32]`), or one of `loguniform(low, high)`, `uniform(low, high)`, `randint(low, high)` (both
ends included) and `choice(a, b, ...)`. If all keys have lists, the trials are the grid of all combinations; otherwise
each trial draws one value per key. A draw depends only on the job's seed and the trial's number, so that a resumed
search draws the same values again. With `tune.searcher` a searcher of Ray Tune chooses the values of each trial by the
results so far; the draws then only show what trials need, and each point is checked when it is chosen.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from cluster.devices.inventory import Inventory
from cluster.wording import counted, plain_number
from jobs.driver.planning import plan_job
from jobs.job.spec import JobSpec, LoadedSpec, load_spec, refuse_later
from raytrain.config.decode import apply_overrides, decode, encode, plain_scalar
from raytrain.config.messages import describe, render
from raytrain.errors import InputError
from raytrain.plan.expert_hosts import separate_hosts
from raytrain.plan.room import Need
from raytrain.report.records import dotted_leaves

DRAWS = 16
"""Default of `tune.max_trials` for a space that contains a distribution, and with a searcher."""
LOOKS = 10
"""The least number of evaluations of a trial when a scheduler compares trials and the job leaves the interval open."""
GRAMMAR = "a list, or a string such as loguniform(1e-4, 1e-2), uniform(0, 1), randint(1, 8) or choice(a, b)"
_CALL = re.compile(r"(loguniform|uniform|randint|choice)\(([^()]*)\)\Z")
_KEPT = ("name", "seed", "save", "tune", "infer", "retry", "telemetry", "cluster")
"""Sections and keys that cannot differ between trials."""


# -- the keys -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The values of a key: a list of them (`choice`), or two numbers, both included, and how to draw between them."""

    kind: str  # choice, loguniform, uniform or randint
    given: tuple[Any, ...]  # the list, or (low, high)

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values to check on their own: those of a list; else the two ends and, of real numbers, one in between."""
        if self.kind in ("choice", "randint"):
            return self.given
        low, high = self.given
        return (low, high, 0.5 * (low + high) + 1e-9 * (high - low))

    def draw(self, rng: random.Random) -> Any:
        if self.kind == "choice":
            return rng.choice(self.given)
        low, high = self.given
        if self.kind == "loguniform":
            return min(high, max(low, math.exp(rng.uniform(math.log(low), math.log(high)))))
        return rng.randint(low, high) if self.kind == "randint" else rng.uniform(low, high)


@dataclass(frozen=True)
class Space:
    """Dotted key -> the values to try, in the order of the file."""

    keys: Mapping[str, Values]

    @property
    def is_grid(self) -> bool:
        return all(one.kind == "choice" for one in self.keys.values())

    def examples(self) -> Iterator[tuple[str, Any]]:
        """Yield each key with each value that is checked on its own."""
        return ((key, value) for key, tried in self.keys.items() for value in tried.examples)

    def points(self, *, seed: int, most: int | None, drawn: bool = False) -> Iterator[dict[str, Any]]:
        """Key -> value of each trial: every combination of lists, else (`drawn`: always) `most` (16) draws without
        repeats."""
        if self.is_grid and not drawn:
            lists = [one.examples for one in self.keys.values()]
            for values in itertools.islice(itertools.product(*lists), most):
                yield dict(zip(self.keys, values, strict=True))
            return
        seen: list[dict[str, Any]] = []
        wanted = most or DRAWS
        for number in range(20 * wanted):
            rng = random.Random(f"{seed} {number}")  # from a string: the same draws on every machine and Python
            point = {key: one.draw(rng) for key, one in self.keys.items()}
            if point not in seen and len(seen) < wanted:
                seen.append(point)
                yield point


def parse_space(space: Mapping[str, Any]) -> Space:
    """Parse `tune.space`, whose keys may be dotted or nested. Raises InputError: the space is empty, a key cannot
    differ between trials, or a value is no list and no distribution."""
    flat = {key: value for key, value in dotted_leaves(space) if not isinstance(value, Mapping)}
    if not flat:
        raise InputError(
            "tune.space",
            got="an empty mapping",
            expected="keys with the values to try, such as {optim.lr: [1e-3, 1e-2]}",
            remedy="leave it out to search batch size and precision",
        )
    for key in flat:
        if key.split(".")[0] in _KEPT:
            raise InputError(
                f"tune.space.{key}",
                got="a key that cannot differ between trials",
                expected="a key that changes the training, such as optim.lr or loop.global_batch_size",
            )
    return Space({key: _parsed(f"tune.space.{key}", value) for key, value in flat.items()})


def _parsed(name: str, value: Any) -> Values:
    call = _CALL.match(value.strip()) if isinstance(value, str) else None
    arguments = [plain_scalar(part.strip()) for part in call[2].split(",")] if call else []
    if isinstance(value, list | tuple) or (call is not None and call[1] == "choice"):
        values = arguments if call is not None else list(value)
        if not values or values == [None]:
            raise InputError(name, got="an empty list", expected=GRAMMAR)
        for place, one in enumerate(values):
            if any(type(one) is type(other) and one == other for other in values[:place]):
                raise InputError(name, got=f"{describe(one)} twice", expected="each value once")
        return Values("choice", tuple(values))
    if call is None:
        broken = isinstance(value, str) and "(" in value and ")" not in value
        remedy = "put it in quotes: inside {...} a comma ends the value" if broken else ""
        raise InputError(name, got=describe(value), expected=GRAMMAR, remedy=remedy)
    kind, numbers = call[1], [one for one in arguments if type(one) in (int, float) and math.isfinite(one)]
    if len(arguments) != 2 or len(numbers) != 2:
        raise InputError(name, got=value, expected=f"{kind}(low, high) with two numbers")
    low, high = numbers
    if kind == "randint" and not (isinstance(low, int) and isinstance(high, int)):
        raise InputError(name, got=value, expected="randint(low, high) with two integers")
    if low >= high or (kind == "loguniform" and low <= 0):
        wanted = "0 < low < high" if kind == "loguniform" else "low < high"
        raise InputError(name, got=value, expected=f"{kind}(low, high) with {wanted}")
    return Values(kind, (low, high))


# -- the trials -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    number: int  # from 1, in the order of the space
    values: dict[str, Any]  # dotted key -> value of this trial
    overrides: tuple[str, ...]  # `section.key=value` for everything that it changes in the job
    gpus: int  # of all its processes
    cores: int
    max_steps: int | None  # length of its run; None if it depends on the data
    need: Need | None = None  # what its processes need of a cluster


@dataclass(frozen=True)
class Points:
    trials: tuple[Point, ...]  # in the order of the space; with a searcher, as many examples as it may choose
    left_out: tuple[tuple[dict[str, Any], str], ...]  # the infeasible combinations with their reasons
    space: Space  # the values of each key
    check: Callable[[int, dict[str, Any]], Point]  # of a number and values; raises InputError if it cannot run

    def at_a_time(self, *, gpus: int, cpus: int, alone: bool) -> int:
        """Number of concurrent trials; `alone`: on CPUs one at a time, since their speed is measured."""
        most_gpus, most_cores = max(one.gpus for one in self.trials), max(one.cores for one in self.trials)
        if most_gpus:
            return max(1, gpus // most_gpus)
        return 1 if alone else max(1, cpus // most_cores)


def find_points(loaded: LoadedSpec, inventory: Inventory, *, shapes: Mapping[str, Any] | None = None) -> Points:
    """Every trial of the job's `tune.space` that these machines can run, and whose model can be built. Raises
    InputError: unknown key, value that is wrong for its key, or space without a feasible point."""
    tune, space = loaded.spec.tune, checked_space(loaded)
    trials: list[Point] = []
    left_out: list[tuple[dict[str, Any], str]] = []
    check = partial(_point, loaded=loaded, inventory=inventory, builds=Builds(loaded.spec, shapes))
    searched = tune.searcher != "random"
    for values in space.points(seed=loaded.spec.seed, most=tune.max_trials, drawn=searched):
        try:
            trials.append(check(len(trials) + 1, values))
        except InputError as error:
            left_out.append((values, str(error)))
    if not trials:
        values, why = left_out[0]
        raise InputError(
            "tune.space",
            got=f"a space where none of {counted(len(left_out), 'combination')} can run",
            expected="at least one",
            remedy=f"{values_text(values)}: {why}",
        )
    if space.is_grid and not searched:  # a listed value that no trial can run would shrink the grid silently
        for key, value in space.examples():
            why = next((reason for values, reason in left_out if values[key] == value), None)
            if why is not None and not any(one.values[key] == value for one in trials):
                raise InputError(f"tune.space.{key}", got=render(value), expected="values that can run", remedy=why)
    return Points(tuple(trials), () if searched else tuple(left_out), space, check)


def checked_space(loaded: LoadedSpec) -> Space:
    """The job's `tune.space`; raises InputError for what is wrong with it on any machine."""
    space = parse_space(loaded.spec.tune.space or {})
    for key, value in space.examples():
        changed, _ = apply_overrides(loaded.mapping, [f"{key}={render(value)}"])
        try:
            decode(JobSpec, changed)
        except InputError as error:
            if not f"{key}.".startswith(f"{error.key}."):
                raise
            name = f"tune.space.{key}"
            raise InputError(name, got=error.got, expected=error.expected, remedy=error.remedy) from error
    _check_metric(loaded.spec)
    return space


def _check_metric(spec: JobSpec) -> None:
    """Check that the searcher is installed, and that the job has what metric and scheduler compare trials by."""
    tune, loop = spec.tune, spec.loop
    evaluates = spec.data.eval is not None or spec.data.eval_fraction > 0
    if tune.metric == "eval_loss" and not evaluates:
        raise InputError(
            "tune.metric",
            got="eval_loss without an evaluation",
            expected="samples_per_s, or an evaluation",
            remedy="set data.eval_fraction above 0 to hold out data for evaluation",
        )
    if tune.searcher != "random" and find_spec(tune.searcher) is None:
        raise InputError(
            "tune.searcher", got=f"{tune.searcher}, which is not installed", expected="random, or its package",
            remedy=f"pip install {tune.searcher}, on every machine of the cluster that may run the command",
        )  # fmt: skip
    if tune.scheduler == "none":
        return
    if not evaluates:
        raise InputError("tune.scheduler", got=f"{tune.scheduler} without an evaluation", expected="none")
    if isinstance(loop.eval_every, int) and loop.max_steps is not None and loop.eval_every >= loop.max_steps:
        raise InputError(
            "tune.scheduler",
            got=f"{tune.scheduler} with a single evaluation at the end of each trial",
            expected=f"loop.eval_every below loop.max_steps, {loop.max_steps}",
        )


def _point(number: int, values: dict[str, Any], loaded: LoadedSpec, inventory: Inventory, builds: Builds) -> Point:
    """Raises InputError if the job with these values cannot run on these machines."""
    own = [f"{key}={render(value)}" for key, value in values.items()]
    trial = load_spec(mapping=loaded.mapping, overrides=own)
    spec = trial.spec
    refuse_later(spec, "train")
    plan = plan_job(trial, inventory=inventory)
    builds.check(spec)
    workers, threads = int(plan.value("workers", 1)), int(plan.value("threads", 1) or 1)
    most, hosts = plan.value("max_steps", None), plan.value("hosts", None)
    pinned = {"scale.workers": workers, "scale.threads": threads, "tune.space": None, "tune.scheduler": "none",
              "tune.searcher": "random"}  # fmt: skip
    if spec.experts.hosts == "auto" and hosts not in (None, "none"):
        pinned["experts.hosts"] = hosts
    if loaded.spec.tune.scheduler != "none" and spec.loop.eval_every == "auto" and most is not None:
        pinned["loop.eval_every"] = max(1, int(most) // LOOKS)
    processes, on_gpu = workers + separate_hosts(plan.hosts), plan.value("device", None) == "cuda"
    each = {"CPU": 1, "GPU": plan.gpu_share} if on_gpu else {"CPU": threads}
    return Point(
        number=number,
        values=values,
        overrides=(*own, *(f"{key}={render(value)}" for key, value in pinned.items())),
        gpus=processes if on_gpu else 0,
        cores=processes if on_gpu else processes * threads,
        max_steps=None if most is None else int(most),
        need=Need("scale.workers", "process of a trial", processes, each),
    )


class Builds:
    """Builds the model of each point, each distinct one once, on the meta device where it can be. `shapes`: facts about
    the data of the job `base` (`raytrain.train.job.source_facts`); None: it is opened on the first check."""

    def __init__(self, base: JobSpec, shapes: Mapping[str, Any] | None = None) -> None:
        self._shapes = {} if shapes is None else {_key(base, "data"): shapes}
        self._found: dict[str, InputError | None] = {}

    def check(self, spec: JobSpec) -> None:
        """Build the model of this job. Raises InputError if it cannot be built, or its data cannot be opened."""
        from jobs.driver.build import build, opened  # torch, which `raytrain plan` does without
        from raytrain.train.job import source_facts

        data, model = _key(spec, "data"), _key(spec, "data", "model", "experts")
        if model not in self._found:
            self._found[model] = None
            try:
                if data not in self._shapes:
                    self._shapes[data] = source_facts(opened(spec))
                build(spec, self._shapes[data])
            except InputError as error:
                self._found[model] = error
        if error := self._found[model]:
            raise error


def _key(spec: JobSpec, *sections: str) -> str:
    """These sections as text, with what else the data depends on."""
    own = [encode(spec)[name] for name in sections]
    return json.dumps([own, spec.model.keys.get("context"), spec.seed], sort_keys=True, default=repr)


def values_text(values: Mapping[str, Any]) -> str:
    """Each `key value` pair, on one line."""
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in values.items())  # fmt: skip


def run_cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """A trial in the table: values, figures, and a note about how it ended."""

    def number(value: Any) -> str:
        usable = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        return plain_number(value) if usable else ""

    values = [number(row["values"].get(key)) or str(row["values"].get(key)) for key in keys]
    figures = [number(row.get(name)) for name in ("steps", "eval_loss", "samples_per_s")]
    notes = {"ok": "", "stopped": "ended early", "died": row.get("reason", "")}
    return [*values, *figures, notes.get(row["outcome"], f"{row['outcome']}: {row.get('reason', '')}")]
