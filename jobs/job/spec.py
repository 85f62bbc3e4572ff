"""The job: a JOB.yaml or a recipe, `extends`, all sections, the source of each value, and checks across sections.

`load_spec` is the first call of every verb that takes a job; every later module receives the `JobSpec`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cluster.config import ClusterConfig, Section, TelemetryConfig
from experts.config import ExpertsConfig
from experts.sizes import check_section, check_used
from raytrain.config.decode import apply_overrides, decode, dump_yaml, encode, load_yaml, parse_override
from raytrain.config.messages import describe, suggestion
from raytrain.config.sections import (
    PLACEHOLDER,
    DataConfig,
    InferConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RetryConfig,
    SaveConfig,
    ScaleConfig,
    TuneConfig,
)
from raytrain.data.sources.sections import is_path_key
from raytrain.errors import InputError
from raytrain.models.huggingface import KEYS as FOLDER_KEYS
from raytrain.plan.batch import one_worker_for_whole
from raytrain.runs.storage import typed_path

# ---------------------------------------------------------------- job file
# Reads the text of a JOB.yaml file or of a packaged recipe.


RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the packaged recipes, as the command line accepts them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_named(job: Path) -> Path | None:
    """The file of the packaged recipe that `job` names; None if it names none, or if a file of that name exists."""
    bare = len(job.parts) == 1 and job.name in recipe_names()
    return RECIPES / f"{job.name}.yaml" if bare and not job.is_file() else None


def recipe_lines() -> list[str]:
    """One line for each recipe: its name and its first comment."""
    width = max(map(len, recipe_names()))
    firsts = {name: read_recipe(name).splitlines()[0] for name in recipe_names()}
    return [f"{name.ljust(width)}  {first.removeprefix('# ').rstrip(':')}" for name, first in firsts.items()]


def read_recipe(name: str) -> str:
    if name not in recipe_names():
        known = recipe_names()
        raise InputError("recipe", got=name, expected=f"one of {', '.join(known)}", remedy=suggestion(name, known))
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def read_job(path: Path) -> str:
    """Return the text of a JOB.yaml or of a packaged recipe."""
    key = str(path)
    path = recipe_named(path) or path
    if path.is_dir():
        resume = f"to resume a run, use {shlex.join(['--resume', key])}" if (path / "job.yaml").exists() else ""
        raise InputError(key, got="a folder", expected="a YAML file or a recipe", remedy=resume)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        expected = f"a YAML file or a recipe: {', '.join(recipe_names())}"
        raise InputError(
            key, got="no such file", expected=expected, remedy=suggestion(path.stem, recipe_names())
        ) from error
    except UnicodeDecodeError as error:
        seen = f"a byte that is not valid UTF-8, at position {error.start}"
        raise InputError(key, got=seen, expected="a text file in UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(key, got=str(error), expected="a YAML file that can be read") from error


# ---------------------------------------------------------------- extended
# Jobs that change another one: `extends: base.yaml`, or the name of a recipe.


EXTENDS = "extends"
"""The key of a job that names another one, whose values it changes."""
#: A key of a job -> the sections that a base must not add to: their other keys are arguments of the one they replace.
REPLACES = {("model", "builder"): ("model", "experts"), ("model", "module"): ("model", "experts"), ("data", "source"):
            ("data",), ("data", "train"): ("data",)}  # fmt: skip


def extended(mapping: Mapping[Any, Any], *, file: Path | None) -> tuple[dict[Any, Any], dict[str, tuple[Any, str]]]:
    """A job merged into those that it extends: its values replace theirs key by key, and null takes one back. A base is
    relative to the `file` of the job, else to the current folder.

    Returns:
        All values, without `extends`, and what it extends, nearest first: file or recipe -> (its mapping, "file" or
        "recipe").
    """
    bases: dict[str, tuple[Any, str]] = {}
    seen = [] if file is None else [str(file.resolve())]
    merged, current = {key: value for key, value in mapping.items() if key != EXTENDS}, mapping
    while current.get(EXTENDS) is not None:
        base, is_recipe = _located(current[EXTENDS], folder=Path() if file is None else file.parent)
        where = str(base.resolve())
        if where in seen:
            circle = " -> ".join([*seen, where])
            raise InputError(EXTENDS, got=f"a circle: {circle}", expected="jobs of which one extends none")
        seen.append(where)
        current, file = load_yaml(read_job(base), origin=str(base)), base
        own = {key: value for key, value in current.items() if key != EXTENDS}
        bases[base.stem if is_recipe else str(base)] = own, "recipe" if is_recipe else "file"
        merged = _merged(own, merged)
    return merged, bases


def _located(given: Any, *, folder: Path) -> tuple[Path, bool]:
    """The file of a base, and whether it is a recipe."""
    if not isinstance(given, str) or not given:
        raise InputError(EXTENDS, got=describe(given), expected="a job file, relative to this one, or a recipe")
    given = typed_path(given, key=EXTENDS)
    beside = folder / given
    recipe = None if beside.is_file() else recipe_named(Path(given))
    if recipe is None and not beside.exists():
        names = recipe_names()
        raise InputError(
            EXTENDS, got=f"{given}: there is no {beside.absolute()}", remedy=suggestion(given, names),
            expected=f"a job file, relative to this one, or a recipe: {', '.join(names)}",
        )  # fmt: skip
    return (recipe, True) if recipe is not None else (beside, False)


def _merged(base: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """`base` with the values of `over`: sections are merged key by key, everything else is replaced."""
    replaced = {
        section
        for (owner, key), sections in REPLACES.items()
        if _given_keys(over, owner, key) not in (None, _given_keys(base, owner, key))
        for section in sections
    }
    found = {key: value for key, value in base.items() if key not in replaced}
    for key, value in over.items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[key] = {**before, **value} if both else value  # type: ignore[dict-item]
    return found


def _given_keys(mapping: Mapping[Any, Any], section: str, key: str) -> Any:
    held = mapping.get(section)
    return held.get(key) if isinstance(held, Mapping) else None


# ---------------------------------------------------------------- spec
# The job: all sections, the source of each value, and the checks that involve two sections.


DEFAULT_RECIPE = RECIPES / "default.yaml"

RESUME_MAY_CHANGE = (
    "loop.max_steps", "loop.epochs", "loop.micro_batch_size",
    "experts.hosts", "experts.placement", "experts.inflight",
    "scale", "save", "telemetry", "retry", "cluster",
)  # fmt: skip
"""Keys and entire sections that a job given with ``--resume`` may change, except ``save.dir``."""

PATHS = ("model.init_from", "save.dir", "infer.input", "infer.output")  # besides those of a source and of a builder
Name = Annotated[
    str,
    Field(
        pattern=r"^\.*[A-Za-z0-9_-][A-Za-z0-9._-]*$",  # `..` is another folder
        max_length=64,
        json_schema_extra={"expected": "1 to 64 ASCII letters, digits, dots, dashes or underscores, not dots alone"},
    ),
]

Seed = Annotated[int, Field(ge=0, lt=2**63, json_schema_extra={"expected": "an integer from 0 to 2**63 - 1"})]


class JobSpec(Section):
    """A validated job; frozen. `model` and `data` have no default."""

    name: Name = Field(default="run", description="first part of the run folder's name")
    seed: Seed = Field(default=42, description="seed of weights, data order and sampling")
    model: ModelConfig = Field(description="a model, such as `model: {builder: raytrain.models.mlp:mlp}`")
    data: DataConfig = Field(description="data, such as `data: {source: text, path: input.txt}`")
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    loop: LoopConfig = LoopConfig()
    save: SaveConfig = SaveConfig()
    scale: ScaleConfig = ScaleConfig()
    retry: RetryConfig = RetryConfig()
    experts: ExpertsConfig = ExpertsConfig()
    tune: TuneConfig = TuneConfig()
    infer: InferConfig = InferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    cluster: ClusterConfig = ClusterConfig()


@dataclass(frozen=True, eq=False)
class LoadedSpec:
    spec: JobSpec
    sources: dict[str, str]  # dotted key -> ``default``, ``recipe``, ``file``, ``python`` or ``command line``
    mapping: dict[str, Any]  # the given job with the overrides merged in; Python objects are kept
    text: str  # the job as given: the file's text, or YAML of the mapping
    merged_text: str  # YAML of the mapping including the overrides; `--resume` reads it


def load_spec(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, mapping: Mapping[str, Any] | None = None,
    runs_here: bool = True,
) -> LoadedSpec:  # fmt: skip
    """Load a job: defaults, overridden by the file or mapping, overridden by the command line.

    Without a file and a mapping, the recipe `default` is used. If the command line sets `model.builder`, the recipe's
    model, experts and optim sections are dropped; if it sets `data.source`, the recipe's data section is dropped.

    Args:
        path: a JOB.yaml, or the name of a packaged recipe. A job inherits only from what its `extends` names.
        overrides: ``section.key=value``; of duplicate keys, the last wins.
        mapping: a job from Python, which may contain objects in `model.module`, `data.train` and `data.eval`.
        runs_here: replace `~` and variables in paths by what they are here; False for a job of another machine.
    """
    if path is not None and mapping is not None:
        raise InputError("mapping", got="a file and a mapping", expected="only one of them")
    text, origin = None, "python"
    given_path = path = None if path is None else Path(typed_path(str(path), key=str(path)))
    if mapping is None:
        path = DEFAULT_RECIPE if given_path is None else recipe_named(given_path) or given_path
        origin = "file" if path is given_path else "recipe"
        text = read_job(path)
        mapping = load_yaml(text, origin=str(path))
    if origin == "recipe" and path == DEFAULT_RECIPE:  # its optimizer is none for any model
        given_keys = {parse_override(text)[0] for text in overrides}
        replaced = [("model", "model.builder"), ("experts", "model.builder"), ("optim", "model.builder")]
        dropped = {name for name, key in [*replaced, ("data", "data.source")] if key in given_keys}
        mapping = {name: {} if name in dropped else section for name, section in mapping.items()}
    own = mapping
    mapping, bases = extended(own, file=path)
    merged, touched = apply_overrides(mapping, overrides)
    merged = _typed_paths(merged) if runs_here else merged
    spec = decode(JobSpec, merged)
    _check_across(spec)
    given, switched = spec, set[str]()
    if spec.loop.reference:
        spec, switched = as_reference(spec)
    if origin != "python":
        check_objects(spec)
    merged_text = dump_yaml(_given(given, merged))
    if bases:  # the record of a run must not depend on other files
        text = f"# merged with what it extends: {', '.join(bases)}\n{dump_yaml(_given(given, mapping))}"
    return LoadedSpec(
        spec=spec,
        sources=_sources(spec, [(own, origin), *bases.values()], touched) | dict.fromkeys(switched, "loop.reference"),
        mapping=merged,
        text=merged_text if text is None else text,
        merged_text=merged_text,
    )


def _typed_paths(job: Mapping[Any, Any]) -> dict[Any, Any]:
    """The job with `~` and variables replaced in its paths. The record of a run holds them as they were then."""
    found = dict(job)
    for section, held in job.items():
        for key in held if isinstance(held, Mapping) else ():
            in_data = section == "data" and is_path_key(held.get("source"), key)
            is_folder = section == "model" and key == "path" and held.get("builder") in FOLDER_KEYS
            if in_data or is_folder or f"{section}.{key}" in PATHS:
                found[section] = {**found[section], key: _typed(held[key], key=f"{section}.{key}")}
    return found


def _typed(value: Any, *, key: str) -> Any:
    if isinstance(value, list | tuple):
        return [_typed(item, key=key) for item in value]
    return typed_path(os.fspath(value), key=key) if isinstance(value, str | os.PathLike) and str(value) else value


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The path of every value that is not a mapping; an empty mapping counts as a value."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, str(key)))]


def _sources(spec: JobSpec, jobs: Sequence[tuple[Mapping[str, Any], str]], touched: set[str]) -> dict[str, str]:
    """The source of each value; `jobs` are the job before the overrides and what it extends, each with its source."""
    sources = {}
    for leaf in _leaves(encode(spec), ()):
        prefixes = {".".join(leaf[: depth + 1]) for depth in range(len(leaf))}
        held = next((origin for mapping, origin in jobs if _holds(mapping, leaf)), "default")
        sources[".".join(leaf)] = "command line" if prefixes & touched else held
    return sources


def _holds(mapping: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(mapping, Mapping) or key not in mapping:
            return False
        mapping = mapping[key]
    return True


def _given(spec: JobSpec, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Only the given keys, with encoded values; objects are replaced by placeholders."""
    encoded = encode(spec)
    return {
        name: {key: encoded[name][key] for key in value} if isinstance(value, Mapping) else encoded[name]
        for name, value in mapping.items()
    }


def check_objects(spec: JobSpec) -> None:
    """Refuse a file with the placeholder of an object: it is the record of a run that was started from Python."""
    data = spec.data
    objects = {"model.module": spec.model.module, "data.train": data.train, "data.eval": data.eval}
    for key, value in (objects | {"data.collate": data.collate}).items():
        if isinstance(value, str) and value.startswith(PLACEHOLDER):
            remedy = "this job was started from Python: call jobs.train.train with the same object"
            raise InputError(key, got=value, expected="a Python object", remedy=remedy)


def _check_across(spec: JobSpec) -> None:
    """Check what involves more than one section."""
    model, data, loop, experts = spec.model, spec.data, spec.loop, spec.experts
    _check_one_of("model.builder", model.builder, "model.module", model.module)
    _check_one_of("data.source", data.source, "data.train", data.train)
    if data.eval is not None and data.train is None:
        raise InputError("data.eval", got="a dataset together with data.source", expected="null, or data.train with it")
    total, micro = loop.global_batch_size, loop.micro_batch_size
    if isinstance(total, int) and isinstance(micro, int) and total % micro:
        expected = f"a number that divides loop.global_batch_size, {total}"
        raise InputError("loop.micro_batch_size", got=describe(micro), expected=expected)
    one_worker_for_whole(spec.scale, loop)
    if micro == "whole" and data.tokens_per_batch is not None:
        got, expected = f"{data.tokens_per_batch} with loop.micro_batch_size whole", "only one of them"
        raise InputError("data.tokens_per_batch", got=got, expected=f"{expected}, since a budget splits global batches")
    if loop.patience is not None and data.eval is None and data.eval_fraction == 0:
        remedy = "set data.eval_fraction above 0 to hold out data for evaluation"
        expected = "null without an evaluation"
        raise InputError("loop.patience", got=describe(loop.patience), expected=expected, remedy=remedy)
    if data.tokens_per_batch is not None and spec.scale.shares == "auto":
        got, expected = f"{data.tokens_per_batch} with scale.shares auto", "only one of them"
        raise InputError("data.tokens_per_batch", got=got, expected=f"{expected}, since scale.shares counts rows")
    check_section(experts)
    check_used(experts, model.builder)
    if experts.lifecycle.enabled and spec.scale.strategy == "fsdp":
        raise InputError(
            "experts.lifecycle.max_experts", got=f"{experts.lifecycle.max_experts} with scale.strategy fsdp",
            expected="null, as each worker holds a part of every expert",
            remedy="scale.strategy auto shares the experts out whole",
        )  # fmt: skip


def _check_one_of(first: str, one: Any, second: str, other: Any) -> None:
    if one is None and other is None:
        raise InputError(first, got="no value", expected=f"a value, or {second} from Python")
    if one is not None and other is not None:
        raise InputError(second, got=f"both {first} and {second}", expected="only one of them")


def refuse_later(spec: JobSpec, verb: str) -> None:
    """Refuse a value that is valid but does not exist in this version yet."""
    if verb == "tune" and spec.scale.strategy == "fsdp" and spec.tune.space is None:
        raise InputError(
            "scale.strategy",
            got="fsdp for a search without tune.space",
            expected="auto or data_parallel",
            remedy="each trial is one process, which cannot be sharded; the trials of a tune.space can, such as "
            "tune.space='{loop.micro_batch_size: [4, 8]}' tune.metric=samples_per_s",
        )
    if verb != "tune" and spec.loop.global_batch_size == "auto":  # which the search decides
        raise InputError(
            "loop.global_batch_size", got=describe("auto"), expected="an integer >= 1",
            remedy="`raytrain tune` searches for a batch size",
        )  # fmt: skip


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``section.key`` of every difference between two jobs with their defaults filled in.

    Python objects are compared by class, since a job on disk records only the class.
    """
    before, after = values_of(old), values_of(new)
    names = [*before, *(key for key in after if key not in before)]

    def text(values: Mapping[str, Any], key: str) -> str | None:
        """A value as text, since 1, 1.0 and true compare equal; None for a missing key."""
        return json.dumps(values[key], sort_keys=True, default=repr) if key in values else None

    return [key for key in names if text(before, key) != text(after, key)]


def values_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """{section.key: value} of a job with its defaults filled in; of a Python object, its class."""
    values: dict[str, Any] = {}
    for name, value in encode(load_spec(mapping=job).spec).items():
        values |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return values


def may_change_on_resume(key: str) -> bool:
    """Whether a job given with ``--resume`` may change this dotted key."""
    parts = key.split(".")
    owners = {".".join(parts[: depth + 1]) for depth in range(len(parts))}
    return key != "save.dir" and not owners.isdisjoint(RESUME_MAY_CHANGE)


#: The reference path (`loop.reference`) disables every optimization of speed or memory at once, to find out whether one
#: of them causes a problem. Each also has a key of its own; the values of this table override those of the job, but for
#: `precision.dtype: fp64`, which is more exact still.
REFERENCE: dict[str, Any] = {
    "loop.compile": "off", "loop.activation_checkpointing": False, "loop.cudnn_benchmark": False,
    "loop.mask_cache_mb": 0.0, "optim.fused": False, "data.storage": "stream", "experts.inflight": 1,
    "scale.overlap": False, "precision.dtype": "fp32", "precision.fp32_layers": [],
}  # fmt: skip


def as_reference(spec: JobSpec) -> tuple[JobSpec, set[str]]:
    """The job on the reference path, and the keys whose values changed."""
    changed: set[str] = set()
    has_experts = (spec.model.builder or "").startswith("experts.") or spec.experts.num_experts is not None
    for key, reference in REFERENCE.items():
        section, name = key.split(".")
        if section == "experts" and not has_experts:
            continue
        current = getattr(spec, section)
        if getattr(current, name) not in (reference, "fp64"):
            changed.add(key)
            spec = spec.model_copy(update={section: current.model_copy(update={name: reference})})
    return spec, changed
