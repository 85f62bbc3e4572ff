"""The keys of a job with their meanings, as text and JSON schema; other launchers' options as our keys.

For `raytrain keys`, `raytrain schema`, `--help`, and options such as `--num_processes 4`.
"""

from __future__ import annotations

import difflib
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from jobs.job.spec import EXTENDS, JobSpec
from raytrain.config.decode import accepts
from raytrain.config.messages import SPELLINGS, KeyRow, key_rows, meant, near_names, render, suggestion
from raytrain.data.sources.sections import SOURCES
from raytrain.errors import InputError
from raytrain.runs.folder import shell_command

# ---------------------------------------------------------------- keys
# The keys of a job with their meanings: for `raytrain keys`, `raytrain VERB --help`, and editors as a JSON schema.


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


def job_rows() -> list[KeyRow]:
    """Every key that a job can hold: those of its sections, and after those of `model` and `data` the arguments of the
    built-in builders and sources. Two of these may have a key of one name."""
    rows: list[KeyRow] = []
    for section, own in groupby(key_rows(JobSpec), lambda row: row.key.partition(".")[0]):
        rows += own
        if section == "model":
            rows += _joined(_builder_keys(), "an argument of")
        elif section == "data":
            keys = ((source, row) for source, one in SOURCES.items() for row in key_rows(one, prefix="data"))
            rows += _joined(keys, "for data.source")
    return rows


def _builder_keys() -> Iterator[tuple[str, KeyRow]]:
    from experts.sizes import EXPERT_BUILDERS
    from raytrain.models.huggingface import KEYS
    from raytrain.models.sizes import DENSE_BUILDERS

    for builder, known in {**DENSE_BUILDERS, **EXPERT_BUILDERS}.items():
        defaults = {name: render(value) for name, value in known.defaults.items()}
        for name in (*known.required, *defaults):
            yield builder, KeyRow(f"model.{name}", "", defaults.get(name, "required"), "", "")
    for builder, names in KEYS.items():
        for name in names:
            yield builder, KeyRow(f"model.{name}", "", "required" if name == "path" else "", "", "")


def _joined(keys: Iterable[tuple[str, KeyRow]], what: str) -> list[KeyRow]:
    """Equal keys as one row, whose meaning names their owners."""
    owners: dict[KeyRow, list[str]] = {}
    for owner, row in keys:
        owners.setdefault(row, []).append(owner)
    return [
        replace(row, meaning=f"{row.meaning}; {what} {', '.join(names)}".removeprefix("; "))
        for row, names in owners.items()
    ]


def important_entries(verb: str) -> list[tuple[str, str]]:
    """(`section.key = default`, meaning and accepted values) of the important keys of a verb."""
    rows = {row.key: row for row in key_rows(JobSpec)}
    return [_entry(rows[key]) for key in IMPORTANT[verb]]


def key_lines(name: str | None, *, width: int) -> list[str]:
    """What `raytrain keys` prints: all keys, those of a section, or one key in full."""
    rows = job_rows()
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
    lines: list[str] = []
    if all(row.key == name for row in wanted):
        for row in wanted:  # several sources may have a key of one name
            default = "it must be given" if row.default == "required" else row.default
            lines += [row.key, *(f"  {label:<9}{text}" for label, text in (
                ("meaning", row.meaning), ("accepts", row.expected), ("default", default), ("example", row.example),
            ) if text)]  # fmt: skip
        return lines
    for row in wanted:
        head, text = _entry(row)
        lines += [head, *(f"    {line}" for line in textwrap.wrap(text, max(30, width - 6)))]
    own = {"model": "builder", "data": "source"}.get(name or "")
    return [*lines, f"All other keys of `{name}` are arguments of your own {own}."] if own else lines


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file: editors complete and check keys with it."""
    schema = JobSpec.model_json_schema()
    own = {"type": ["string", "null"], "description": "a job file, relative to this one, or a recipe to start from"}
    schema["properties"] = {EXTENDS: own, **schema["properties"]}
    schema.pop("required", None)  # a base may give them
    schema["$defs"]["DataConfig"]["allOf"] = [
        {
            "if": {"properties": {"source": {"const": name}}, "required": ["source"]},
            "then": {"properties": section.model_json_schema()["properties"]},
        }
        for name, section in SOURCES.items()
    ]
    return {"$schema": SCHEMA, "$id": "raytrain-job", **schema, "title": "A raytrain job"}


def _entry(row: KeyRow) -> tuple[str, str]:
    accepted = f" ({row.expected})" if row.expected else ""
    head = f"{row.key} = {row.default}" if row.default else row.key
    return head, f"{row.meaning}{accepted}".lstrip()


# ---------------------------------------------------------------- launchers
# Options of other launchers, such as `--num_processes 4` of Accelerate, as the keys that mean the same here.


#: For every verb that takes a job.
LAUNCHER = {"num_processes": "scale.workers", "mixed_precision": "precision.dtype"}
#: For the other verbs that take a job.
TRAINING = {
    "experts": "experts.num_experts", "parallel_strategy": "experts.hosts", "compile": "loop.compile",
    "compile_mode": "loop.compile", "cudnn_benchmark": "loop.cudnn_benchmark",
}  # fmt: skip
#: For `infer`.
INFERENCE = {"data_source": "infer.input", "max_samples": "infer.max_samples", "strategy": "infer.template"}
FILES = ("c", "config", "config_file", "job", "file")
"""What other programs call the job file."""
MACHINES = "num_machines"
TORCHRUN = ("nnodes", "node_rank", "master_addr", "master_port")
"""Options of torchrun itself, which takes them before the verb."""
_VALUES = {
    ("precision.dtype", "no"): "fp32", ("infer.max_samples", "None"): "null", ("loop.compile", "true"): "default",
    ("loop.compile", "false"): "off", ("experts.hosts", "data_parallel"): "0",
    ("experts.hosts", "expert_parallel"): "colocated",
}  # fmt: skip


def as_keys(arguments: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The arguments with `section.key=value` in the place of each known option; all others stay as they are. `names`
    are those of options, without dashes and with underscores, with their keys."""
    found, waiting = [], list(arguments)
    while waiting:
        given = waiting.pop(0)
        name, mark, value = given[2:].partition("=")
        name = name.replace("-", "_")
        if not given.startswith("--") or name not in (*names, MACHINES):
            found.append(given)
            continue
        if not mark and name == "compile":  # a switch, or a word behind it
            value = waiting.pop(0) if waiting and waiting[0].lower() in ("true", "false") else "true"
        elif not mark:
            if not waiting:
                raise InputError(given, got="no value", expected=f"{given} VALUE")
            value = waiting.pop(0)
        if name == MACHINES:  # Ray knows the machines of its cluster: more than one need nothing but its address
            if value != "1" and not any(given.startswith("cluster.address=") for given in arguments):
                raise InputError(
                    f"--{MACHINES}", got=value, expected="1, or the address of a Ray cluster of these machines",
                    remedy="add cluster.address=HOST:PORT; workers are spread over its nodes. Without a cluster: "
                    "`raytrain plan job.yaml --print torchrun`",
                )  # fmt: skip
            continue
        key, plain = names[name], value.lower() if value in ("True", "False") else value
        found.append(f"{key}={_VALUES.get((key, plain), plain)}")
    return found


def unknown_option(option: str, given: Sequence[str], *, verb: str, known: Sequence[str]) -> InputError:
    """The error for an option (with its dashes; short ones hold a letter each) that is among the `given` arguments and
    not among the `known` options of a verb, with what to type instead."""
    name, value = option.lstrip("-").replace("-", "_"), None
    named = [place for place, text in enumerate(given) if text.partition("=")[0] == option]
    place = next(iter([*named, *(place for place, text in enumerate(given) if text.startswith(option))]), None)
    if place is not None:  # what follows the option, if it may belong to it
        _, mark, value = given[place].partition("=")
        after = given[place + 1] if place + 1 < len(given) else ""
        if not mark:
            value = after if after and not after.startswith("-") and "=" not in after else None
    if name in FILES:
        typed = shell_command(verb, value or "job.yaml")
        return InputError(option, got="an option", expected="the job file alone", remedy=f"did you mean `{typed}`?")
    if name in TORCHRUN:
        words = f"plan job.yaml --print torchrun --nproc_per_node N --nnodes N --{name}".split()
        typed = shell_command(*words, value or "VALUE")
        expected = "an option of torchrun, which starts this command on each node"
        return InputError(option, got="an option of the verb", expected=expected, remedy=f"`{typed}` prints how")
    examples = {row.key: row.example for row in key_rows(JobSpec)}
    last = [key for key in examples if key.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, [key.rpartition(".")[2] for key in examples], n=1, cutoff=0.75)
    near = [key for key in examples if close and key.rpartition(".")[2] == close[0]]
    of_verb = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    key = next(iter([*([meant(name)] if meant(name) else []), *last, *([] if of_verb else near)]), None)
    expected = "section.key=value" + (f", or one of {', '.join(known)}" if known else "")
    typed = key if key is None or "=" in key else _typed(key, name, value, example=examples[key])
    guess = typed or next(iter(of_verb), None)
    remedy = f"did you mean {guess}?" if guess else "`raytrain keys` lists the keys"
    return InputError(option, got="an unknown option", expected=expected, remedy=remedy)


def _typed(key: str, name: str, value: str | None, *, example: str) -> str:
    """`key=value` with the value that was given with an option `name`; with one that the key takes if it does not take
    that."""
    for one in (name if name in ("fp16", "bf16") else value, SPELLINGS.get((value or "").lower())):
        if one and accepts(JobSpec, f"{key}={one}"):
            return shlex.quote(f"{key}={one}")
    return example or f"{key}=VALUE"
