"""The trials of `tune.space`, checked one by one before anything starts: each is a whole job that could be trained."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.devices.inventory import Inventory
from jobs.driver.build import build, opened
from jobs.job.spec import JobSpec, LoadedSpec, load_spec, refuse_later
from jobs.plan import plan_job
from jobs.tuning.space.keys import Space, parse_space
from jobs.tuning.table import values_text
from raytrain.config.decode import apply_overrides, decode, encode
from raytrain.config.messages import render
from raytrain.config.user_code import resolve
from raytrain.data.sources.keys import is_own
from raytrain.errors import InputError
from raytrain.models.registry import check_keys, takes
from raytrain.plan.plan import Plan
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
        overrides: `section.key=value` of all that it changes in the job.
        gpus, cores: what its processes take.
        max_steps: of its run; None where only the data can tell.
    """

    number: int
    values: dict[str, Any]
    overrides: tuple[str, ...]
    gpus: int
    cores: int
    max_steps: int | None


@dataclass(frozen=True)
class Points:
    """All trials of a sweep; `left_out` says why a combination is none."""

    trials: tuple[Point, ...]
    left_out: tuple[tuple[dict[str, Any], str], ...]

    def at_a_time(self, *, gpus: int, cpus: int, alone: bool) -> int:
        """Trials that fit beside each other; `alone`: those on CPUs measure time, so one at a time."""
        most_gpus, most_cores = max(one.gpus for one in self.trials), max(one.cores for one in self.trials)
        if most_gpus:
            return max(1, gpus // most_gpus)
        return 1 if alone else max(1, cpus // most_cores)


def find_points(loaded: LoadedSpec, inventory: Inventory, *, shapes: Mapping[str, Any] | None = None) -> Points:
    """Every trial of the job's `tune.space` that these machines can run, and whose model can be built.

    Args:
        shapes: what the job's data tells a builder, where it has been opened already.

    Raises:
        InputError: a key that no job has, a value that is wrong for its key, a space without a feasible point.
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
            seen=f"no feasible point among {len(left_out)}",
            expected="at least one",
            remedy=f"{values_text(values)}: {why}",
        )
    if space.is_grid:
        _check_each_is_tried(space, trials, left_out)
    return Points(tuple(trials), tuple(left_out))


def _check_each_is_tried(space: Space, trials: list[Point], left_out: list[tuple[dict[str, Any], str]]) -> None:
    """A listed value that no trial can have is a mistake, and not a smaller grid."""
    for key, tried in space.keys.items():
        for value in tried.examples:
            why = next((reason for values, reason in left_out if values[key] == value), None)
            if why is not None and not any(one.values[key] == value for one in trials):
                raise InputError(f"tune.space.{key}", seen=render(value), expected="values that can be had", remedy=why)


def check_values(space: Space, mapping: Mapping[str, Any]) -> None:
    """That each value alone is right for its key.

    Raises:
        InputError: the first that is not, with the nearest key where there is none of that name.
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
                    f"tune.space.{key}", seen=error.seen, expected=error.expected, remedy=error.remedy
                ) from error


def _check_metric(spec: JobSpec) -> None:
    """That there is something to judge trials by, and to end them early by."""
    tune, loop = spec.tune, spec.loop
    evaluates = spec.data.eval is not None or spec.data.eval_fraction > 0
    if tune.metric == "eval_loss" and not evaluates:
        raise InputError(
            "tune.metric",
            seen="eval_loss where nothing is evaluated",
            expected="samples_per_s",
            remedy="data.eval_fraction above 0 keeps data for evaluation",
        )
    if tune.scheduler == "none":
        return
    if not evaluates:
        raise InputError("tune.scheduler", seen=f"{tune.scheduler} where nothing is evaluated", expected="none")
    if isinstance(loop.eval_every, int) and loop.max_steps is not None and loop.eval_every >= loop.max_steps:
        raise InputError(
            "tune.scheduler",
            seen=f"{tune.scheduler} with one evaluation, at the end of a trial",
            expected=f"loop.eval_every below loop.max_steps, {loop.max_steps}",
        )


def _point(number: int, values: dict[str, Any], loaded: LoadedSpec, inventory: Inventory, builds: Builds) -> Point:
    """Raises InputError where the job with these values cannot be had on these machines."""
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
    return Point(
        number=number,
        values=values,
        overrides=(*own, *(f"{key}={render(value)}" for key, value in pinned.items())),
        gpus=processes if on_gpu else 0,
        cores=processes if on_gpu else processes * threads,
        max_steps=None if most is None else int(most),
    )


def _check_called(spec: JobSpec) -> None:
    """That the trial's builder and dataset function are there and take its keys; neither is called.

    Raises:
        InputError: one cannot be imported, or does not take a key.
    """
    sections = [name for name in JobSpec.model_fields if name not in ("model", "data")]
    if spec.model.builder is not None:
        check_keys(resolve(spec.model.builder, "model.builder"), spec.model.keys, sections=sections)
    if spec.data.source is not None and is_own(spec.data.source):
        function = resolve(spec.data.source, "data.source")
        check_keys(function, spec.data.keys, sections=["seed"], key="data")


def _value(plan: Plan, name: str) -> Any:
    return plan.value(name, None)


def whole_mapping(loaded: LoadedSpec, spec: JobSpec) -> dict[str, Any]:
    """The job as given, with the paths of its model and data as `spec` has them: absolute, for whoever runs it
    elsewhere."""
    sections, model = encode(spec), loaded.mapping["model"]
    paths = {key: sections["model"][key] for key in ("init_from", "path") if key in model}
    data = {key: sections["data"][key] for key in loaded.mapping.get("data") or {}}
    return {**loaded.mapping, "model": {**model, **paths}, "data": data}


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
