"""The trials of `tune.space`, each of which is a complete job; all are validated before anything starts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.devices.inventory import Inventory
from jobs.driver.build import build, opened
from jobs.driver.plan import plan_job
from jobs.job.spec import JobSpec, LoadedSpec, load_spec, refuse_later
from jobs.tuning.space.keys import Space, parse_space
from jobs.tuning.table import counted, values_text
from raytrain.config.decode import apply_overrides, decode, encode
from raytrain.config.messages import render
from raytrain.config.user_code import resolve
from raytrain.data.sources.keys import is_own
from raytrain.errors import InputError
from raytrain.models.registry import check_keys, takes
from raytrain.plan.plan import Plan
from raytrain.plan.room import Need
from raytrain.plan.rules.hosts import separate_hosts
from raytrain.train.build import source_facts

LOOKS = 10
"""The least number of evaluations of a trial when a scheduler compares trials and the job leaves the interval open."""

MOST_S = 60.0
"""The time limit for building models on the driver; a model not checked by then fails in its own trial."""


@dataclass(frozen=True)
class Point:
    """One trial of a space.

    Attributes:
        number: from 1, in the order of the space.
        values: dotted key -> value of this trial.
        overrides: `section.key=value` for everything that it changes in the job.
        gpus, cores: resources of its processes.
        max_steps: length of its run; None if it depends on the data.
        need: what its processes need of a cluster.
    """

    number: int
    values: dict[str, Any]
    overrides: tuple[str, ...]
    gpus: int
    cores: int
    max_steps: int | None
    need: Need | None = None


@dataclass(frozen=True)
class Points:
    """All trials of a search; `left_out` has the infeasible combinations with their reasons."""

    trials: tuple[Point, ...]
    left_out: tuple[tuple[dict[str, Any], str], ...]

    def at_a_time(self, *, gpus: int, cpus: int, alone: bool) -> int:
        """Number of concurrent trials; `alone`: on CPUs one at a time, since their speed is measured."""
        most_gpus, most_cores = max(one.gpus for one in self.trials), max(one.cores for one in self.trials)
        if most_gpus:
            return max(1, gpus // most_gpus)
        return 1 if alone else max(1, cpus // most_cores)


def find_points(loaded: LoadedSpec, inventory: Inventory, *, shapes: Mapping[str, Any] | None = None) -> Points:
    """Every trial of the job's `tune.space` that these machines can run, and whose model can be built.

    Args:
        shapes: facts about the job's data for the builder, if the data was opened already.

    Raises:
        InputError: unknown key, value that is wrong for its key, or space without a feasible point.
    """
    tune = loaded.spec.tune
    space = parse_space(tune.space or {})
    check_values(space, loaded.mapping)
    _check_metric(loaded.spec)
    trials: list[Point] = []
    left_out: list[tuple[dict[str, Any], str]] = []
    builds = Builds(loaded.spec, shapes)
    for values in space.points(seed=loaded.spec.seed, most=tune.max_trials):
        try:
            trials.append(_point(len(trials) + 1, values, loaded, inventory, builds))
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
    if space.is_grid:
        _check_each_is_tried(space, trials, left_out)
    return Points(tuple(trials), tuple(left_out))


def _check_each_is_tried(space: Space, trials: list[Point], left_out: list[tuple[dict[str, Any], str]]) -> None:
    """Refuse a listed value that is infeasible in every trial, rather than silently shrinking the grid."""
    for key, tried in space.keys.items():
        for value in tried.examples:
            why = next((reason for values, reason in left_out if values[key] == value), None)
            if why is not None and not any(one.values[key] == value for one in trials):
                raise InputError(f"tune.space.{key}", got=render(value), expected="values that can run", remedy=why)


def check_values(space: Space, mapping: Mapping[str, Any]) -> None:
    """Check each value on its own against its key.

    Raises:
        InputError: the first wrong value or unknown key, with the nearest key.
    """
    for key, tried in space.keys.items():
        for value in tried.examples:
            changed, _ = apply_overrides(mapping, [f"{key}={render(value)}"])
            try:
                decode(JobSpec, changed)
            except InputError as error:
                if not f"{key}.".startswith(f"{error.key}."):
                    raise
                raise InputError(
                    f"tune.space.{key}", got=error.got, expected=error.expected, remedy=error.remedy
                ) from error


def _check_metric(spec: JobSpec) -> None:
    """Check that the job has what the metric and the scheduler compare trials by."""
    tune, loop = spec.tune, spec.loop
    evaluates = spec.data.eval is not None or spec.data.eval_fraction > 0
    if tune.metric == "eval_loss" and not evaluates:
        raise InputError(
            "tune.metric",
            got="eval_loss without an evaluation",
            expected="samples_per_s, or an evaluation",
            remedy="set data.eval_fraction above 0 to hold out data for evaluation",
        )
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
    refuse_later(trial.spec, "train")
    _check_called(trial.spec)
    plan = plan_job(trial, inventory=inventory)
    builds.check(trial.spec)
    workers, threads = int(_value(plan, "workers")), int(_value(plan, "threads") or 1)
    hosts = separate_hosts(plan.hosts)
    on_gpu = _value(plan, "device") == "cuda"
    most = _value(plan, "max_steps")
    pinned = {"scale.workers": workers, "scale.threads": threads, "tune.space": None, "tune.scheduler": "none",
              "tune.found": None}  # fmt: skip
    if trial.spec.experts.hosts == "auto" and _value(plan, "hosts") not in (None, "none"):
        pinned["experts.hosts"] = _value(plan, "hosts")
    if loaded.spec.tune.scheduler != "none" and trial.spec.loop.eval_every == "auto" and most is not None:
        pinned["loop.eval_every"] = max(1, int(most) // LOOKS)
    processes = workers + hosts
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


def _check_called(spec: JobSpec) -> None:
    """Check that the trial's builder and dataset function exist and accept its keys; neither is called.

    Raises:
        InputError: one cannot be imported, or does not accept a key.
    """
    if spec.model.builder is not None:
        function = resolve(spec.model.builder, "model.builder")
        check_keys(function, spec.model.keys, sections=["experts"], ours=spec.model.given)
    if spec.data.source is not None and is_own(spec.data.source):
        function = resolve(spec.data.source, "data.source")
        check_keys(function, spec.data.keys, sections=[], key="data", ours=spec.data.given)


def _value(plan: Plan, name: str) -> Any:
    return plan.value(name, None)


class Builds:
    """Builds each distinct model of a space once, on the meta device where it can be.

    Args:
        base: the job without the space's values.
        shapes: facts about its data for the builder (`raytrain.train.build.source_facts`); None: the data is opened on
            the first check.
    """

    def __init__(self, base: JobSpec, shapes: Mapping[str, Any] | None = None) -> None:
        self._ends = time.monotonic() + MOST_S
        self._shapes: dict[str, Mapping[str, Any]] = {} if shapes is None else {_data_key(base): shapes}
        self._found: dict[str, InputError | None] = {}

    def check(self, spec: JobSpec) -> None:
        """Build the model of this job, unless `MOST_S` seconds have passed.

        Raises:
            InputError: it cannot be built, or its data cannot be opened.
        """
        key = _model_key(spec)
        if key not in self._found and time.monotonic() < self._ends:
            try:
                build(spec, self._shapes_of(spec))
            except InputError as error:
                self._found[key] = error
            else:
                self._found[key] = None
        error = self._found.get(key)
        if error is not None:
            raise error

    def _shapes_of(self, spec: JobSpec) -> Mapping[str, Any]:
        key = _data_key(spec)
        if key not in self._shapes:
            self._shapes[key] = source_facts(opened(spec))
        return self._shapes[key]


def _data_key(spec: JobSpec) -> str:
    return json.dumps([encode(spec)["data"], spec.model.keys.get("context"), spec.seed], sort_keys=True, default=repr)


def _model_key(spec: JobSpec) -> str:
    """Everything that the builder receives."""
    sections, builder = encode(spec), spec.model.builder
    function = None if builder is None else resolve(builder, "model.builder")
    asked = [name for name in sections if name != "data" and function is not None and takes(function, name)]
    arguments = {name: sections[name] for name in ("model", "experts", *asked)} | {"data": _data_key(spec)}
    return json.dumps(arguments, sort_keys=True, default=repr)
