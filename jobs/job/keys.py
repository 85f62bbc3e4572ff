"""The keys of a job with their meanings: for `raytrain keys`, `raytrain VERB --help`, and editors as a JSON schema."""

from __future__ import annotations

import textwrap
from typing import Any

from jobs.job.extended import EXTENDS
from jobs.job.spec import JobSpec
from raytrain.config.messages import KeyRow, key_rows, near_names, suggestion
from raytrain.errors import InputError

#: The keys that a first job needs, by verb, in the order of its help.
IMPORTANT = {
    "train": (
        "model.builder", "model.init_from", "data.source", "data.eval_fraction", "optim.name", "optim.lr",
        "loop.max_steps", "loop.epochs", "loop.global_batch_size", "loop.eval_every", "precision.dtype",
        "experts.num_experts", "experts.hosts", "scale.workers", "save.dir", "cluster.address",
    ),
    "tune": (
        "tune.space", "tune.metric", "tune.max_trials", "model.builder", "data.source", "precision.dtype",
        "scale.workers", "cluster.address",
    ),
    "infer": (
        "infer.input", "infer.output", "infer.batch_size", "infer.max_samples", "infer.max_new_tokens",
        "infer.prompt_field", "infer.template", "infer.label", "infer.stages", "precision.dtype", "scale.workers",
        "cluster.address",
    ),
    "check": ("save.dir", "scale.accelerator", "cluster.address", "cluster.interface"),
}  # fmt: skip
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def important_entries(verb: str) -> list[tuple[str, str]]:
    """(`section.key = default`, meaning and accepted values) of the important keys of a verb."""
    rows = {row.key: row for row in key_rows(JobSpec)}
    return [_entry(rows[key]) for key in IMPORTANT[verb]]


def key_lines(name: str | None, *, width: int) -> list[str]:
    """What `raytrain keys` prints: all keys, those of a section, or one key in full.

    Raises:
        InputError: there is no such key or section.
    """
    rows = key_rows(JobSpec)
    sections = list(dict.fromkeys(row.key.split(".")[0] for row in rows))
    wanted = [row for row in rows if name in (None, row.key) or row.key.startswith(f"{name}.")]
    if not wanted:
        known = [*sections, *(row.key for row in rows)]
        last = [row.key for row in rows if row.key.rpartition(".")[2] == name]
        near = f"did you mean {last[0]}?" if last else suggestion(name or "", known)
        raise InputError(
            "keys", got=name or "", expected=f"a section ({', '.join(sections)}) or a key",
            remedy=near or near_names(name or "", known, otherwise=sections),
        )  # fmt: skip
    if len(wanted) == 1 and wanted[0].key == name:
        (row,) = wanted
        default = "it must be given" if row.default == "required" else row.default
        return [row.key, *(f"  {label:<9}{text}" for label, text in (
            ("meaning", row.meaning), ("accepts", row.expected), ("default", default), ("example", row.example),
        ) if text)]  # fmt: skip
    lines: list[str] = []
    for row in wanted:
        head, text = _entry(row)
        wrapped = textwrap.wrap(text, max(30, width - 6))
        lines += [head, *(f"    {line}" for line in wrapped)]
    notes = [_OPEN[name]] if name in _OPEN else []
    return [*lines, *notes]


_OPEN = {
    "model": "All other keys of `model` are arguments of the builder.",
    "data": "All other keys of `data` are arguments of the source.",
}


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file: editors complete and check keys with it."""
    schema = JobSpec.model_json_schema()
    own = {"type": ["string", "null"], "description": "a job file, relative to this one, or a recipe to start from"}
    schema["properties"] = {EXTENDS: own, **schema["properties"]}
    schema.pop("required", None)  # a base may give them
    return {"$schema": SCHEMA, "$id": "raytrain-job", **schema, "title": "A raytrain job"}


def _entry(row: KeyRow) -> tuple[str, str]:
    return f"{row.key} = {row.default}", f"{row.meaning} ({row.expected})".lstrip()
