"""The messages of configuration errors: which key, what it expects, what it got, and what was perhaps meant.

Every section, source and builder reports through these functions. A key that other programs call by another name is
recognised.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raytrain.errors import InputError

_KINDS = {
    "integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false", "null": "null",
    "object": "a mapping", "array": "a list",
}  # fmt: skip
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
SPELLINGS = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "single": "fp32",
    "float64": "fp64", "double": "fp64", "gpu": "single_gpu", "cuda": "single_gpu", "gpus": "multi_gpu",
}  # fmt: skip
"""What other programs call a value."""
OTHER_NAMES = {
    "loop.global_batch_size": ("batch_size", "bs", "train_batch_size"),
    "loop.micro_batch_size": ("per_device_train_batch_size", "per_device_batch_size"),
    "loop.max_steps": ("steps", "iterations", "num_steps"),
    "loop.epochs": ("num_train_epochs", "num_epochs"),
    "optim.lr": ("lr", "learning_rate"),
    "optim.name": ("optimizer", "optim"),
    "optim.weight_decay": ("wd",),
    "scale.workers": ("gpus", "num_gpus", "num_workers", "devices", "nproc_per_node"),
    "scale.mode": ("device",),
    "precision.dtype": ("fp16", "bf16", "amp", "precision"),
    "save.dir": ("output_dir", "output", "out", "save_dir"),
    "model.builder": ("model",),
    "model.init_from": ("checkpoint", "init"),
    "data.source": ("dataset", "data"),
    "infer.input": ("input",),
    "data.storage": ("pin_memory",),
    "telemetry.every": ("monitor_gpu", "monitor_interval"),
    "telemetry.log_memory": ("log_gpu_memory",),
    "cluster.address": ("ray_address",),
}
"""Key -> its names in other programs."""
LARGEST_EXACT = 2**53
"""Up to here every integer is a floating-point number."""
_LONGEST = 80
_NEAREST = 3
_NUMBER_OR_BOOLEAN = re.compile(r"[-+]?[0-9._]+(?:e[-+]?[0-9]+)?|true|false", re.IGNORECASE)


@dataclass(frozen=True)
class KeyRow:
    """One key as `--help` lists it."""

    key: str
    expected: str
    default: str
    meaning: str
    example: str


def key_rows(cls: type[BaseModel], *, prefix: str = "") -> list[KeyRow]:
    """Every key of a section, sections inside it included, in the order of their declaration."""
    rows = []
    for name, field in cls.model_fields.items():
        dotted = join(prefix, name)
        section = section_of(field)
        if section is not None:
            rows += key_rows(section, prefix=dotted)
            continue
        default = "required" if field.is_required() else render(field.get_default(call_default_factory=True))
        example = example_text(cls, name, prefix=prefix).removesuffix(", the default")
        rows.append(KeyRow(dotted, expected_text(cls, name), default, field.description or "", example))
    return rows


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section class that a field holds, or None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def join(prefix: str, key: object) -> str:
    """The dotted key of something inside `prefix`, which is empty at the root."""
    return f"{prefix}.{key}" if prefix else str(key)


def expected_text(cls: type[BaseModel], name: str) -> str:
    """What a key accepts as text, such as ``an integer >= 1 or null``; from the section's JSON schema."""
    words = _words(_properties(cls)[name])
    words = [word for word in words if word != "null"] + [word for word in words if word == "null"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@cache
def _properties(cls: type[BaseModel]) -> dict[str, Any]:
    return cls.model_json_schema()["properties"]


def _words(schema: Mapping[str, Any]) -> list[str]:
    """One phrase for each alternative of a schema."""
    if "expected" in schema:
        return [schema["expected"]]
    if "anyOf" in schema:
        return [word for member in schema["anyOf"] for word in _words(member)]
    if "const" in schema or "enum" in schema:
        return [str(word) for word in _choices(schema)]
    kind = schema.get("type", "")
    if kind == "array" and "prefixItems" in schema:
        members = schema["prefixItems"]
        return [f"a list of {len(members)}, each {' or '.join(_words(members[0]))}"]
    if kind == "array":
        return [f"a list, each {' or '.join(_words(schema.get('items', {})))}"]
    if kind == "string" and schema.get("minLength"):
        return ["a non-empty string"]
    bounds = " and ".join(f"{sign} {schema[name]:.10g}" for name, sign in _BOUNDS.items() if name in schema)
    return [f"{_KINDS.get(kind, 'a Python object, given from Python')} {bounds}".rstrip()]


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    members = [word for member in schema.get("anyOf", []) for word in _choices(member)]
    return [*schema.get("enum", []), *([schema["const"]] if "const" in schema else []), *members]


def render(value: Any) -> str:
    """A value as one line of YAML; objects by the name of their class."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(render(item) for item in value) + "]"
    return repr(value) if isinstance(value, (int, float)) else f"<{type(value).__qualname__}>"


def describe(value: Any) -> str:
    """A value and its type, such as ``"7" (a string)``."""
    names = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", tuple: "a list",
        dict: "a mapping",
    }  # fmt: skip
    text = render(value)
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return text if value is None else f"{text} ({names.get(type(value), 'a Python object')})"


def advice(*options: tuple[str, bool]) -> str:
    """One sentence of the options (what to do, whether the run did it) that are not in force already."""
    left = [text for text, in_force in options if not in_force]
    if not left:
        return ""
    text = left[0] if len(left) == 1 else f"{', '.join(left[:-1])} or {left[-1]}"
    return f"{text[0].upper()}{text[1:]}."


def abbreviated(texts: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """The first `most` of the texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def suggestion(name: str, known: Iterable[str], *, form: str = "did you mean {}?") -> str:
    """`form` with the known name that is most like `name`; "" if none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return form.format(close[0]) if close else ""


def near_names(name: str, known: Sequence[str], *, otherwise: Sequence[str]) -> str:
    """The known names that are most like `name`, as a remedy; the first of `otherwise` if none is like it."""
    near = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=0.3) or otherwise[:_NEAREST]
    return f"the nearest names: {', '.join(near)}"


def whole_number(cls: type[BaseModel], name: str, value: Any) -> Any:
    """`1e3` and `1000.0`, which YAML reads as floating point, as the integer that the key takes; others unchanged."""
    if not isinstance(value, float) or not value.is_integer() or abs(value) > LARGEST_EXACT:
        return value
    kinds = _kinds(_properties(cls)[name])
    return int(value) if "integer" in kinds and "number" not in kinds else value


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    return {str(schema.get("type", ""))}.union(*(_kinds(member) for member in schema.get("anyOf", [])))


def wrong_value(cls: type[BaseModel], name: str, value: Any, *, prefix: str) -> InputError:
    """The error for a value of the wrong type or out of range: one sentence, also for a union."""
    expected, remedy = expected_text(cls, name), _remedy(cls, name, value, prefix=prefix)
    return InputError(join(prefix, name), got=describe(value), expected=expected, remedy=remedy)


def _remedy(cls: type[BaseModel], name: str, value: Any, *, prefix: str) -> str:
    schema = _properties(cls)[name]
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be finite"
    if isinstance(value, str):
        if (meant := SPELLINGS.get(value.lower())) in _choices(schema):
            return f"did you mean {meant}?"
        if value.endswith(".py") and "module:function" in expected_text(cls, name):
            return f"did you mean {value.removesuffix('.py').replace('/', '.')}:FUNCTION?"
        if guess := suggestion(value.lower(), map(str, _choices(schema))):
            return guess
        if _NUMBER_OR_BOOLEAN.fullmatch(value.strip()):
            return "write it without underscores" if "_" in value else "write it without quotes"
    if isinstance(value, (bool, int, float)) and _takes_text(schema):
        typed = shlex.quote(f'{join(prefix, name)}="{render(value)}"')
        return f"write it in quotes; on the command line, where the shell takes quotes away: {typed}"
    example = example_text(cls, name, prefix=prefix)
    return f"for example {example}" if example else ""


def example_text(cls: type[BaseModel], name: str, *, prefix: str) -> str:
    """What to type for a key, such as ``loop.max_steps=500``: an example of the section, or the default; "" for a key
    without either, which takes objects from Python only."""
    field = cls.model_fields[name]
    default = PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)
    if field.examples:
        return _typed(join(prefix, name), field.examples[0])
    if default is None or default is PydanticUndefined:
        return ""
    return f"{_typed(join(prefix, name), default)}, the default"


def _typed(key: str, value: Any) -> str:
    return shlex.quote(f"{key}={value if isinstance(value, str) else render(value)}")


def _takes_text(schema: Mapping[str, Any]) -> bool:
    is_text = schema.get("type") == "string" and not _choices(schema)
    return is_text or any(_takes_text(member) for member in schema.get("anyOf", []))


def unknown_key(cls: type[BaseModel], key: str, *, prefix: str, root: type[BaseModel], value: Any = None) -> InputError:
    """The error for a key that a section does not have: names the nearest key, and all keys."""
    known = list(cls.model_fields)
    near = _nearest(key, known)
    elsewhere = _places(root, key)
    below = [place for place in elsewhere if prefix and place.startswith(f"{prefix}.")]
    guess = near and join(prefix, near)
    if below or (elsewhere and (near is None or not prefix)):
        guess = (below or elsewhere)[0]
    foreign = guess is None or not (prefix or isinstance(value, Mapping))  # a mapping was meant as a section
    guess = (meant(key) if foreign else None) or guess
    guess = guess if prefix else _nested(cls, key, value) or guess
    return InputError(
        join(prefix, key),
        got=f"an unknown key of the section {prefix}" if prefix else "an unknown key",
        expected=f"one of {', '.join(known)}",
        remedy=f"did you mean {guess}?" if guess else "",
    )


def _places(cls: type[BaseModel], key: str, prefix: str = "") -> list[str]:
    """The keys and sections of this name, at any depth below a section."""
    inside = {join(prefix, name): section_of(field) for name, field in cls.model_fields.items()}
    found = [join(place, key) for place, section in inside.items() if section and key in section.model_fields]
    return found + [one for place, section in inside.items() if section for one in _places(section, key, place)]


def meant(name: str) -> str | None:
    """The key that `name` stands for in other programs; None if it stands for none."""
    return next((key for key, names in OTHER_NAMES.items() if name in names), None)


def _nested(cls: type[BaseModel], key: str, value: Any) -> str | None:
    """What was meant by a dotted key at the top of a file, as YAML, or by a key of a section that does not exist."""
    head, dot, name = key.partition(".")
    if not dot and isinstance(value, Mapping) and len(value) == 1:
        name = str(next(iter(value)))
    near = _nearest(head, list(cls.model_fields))
    section = section_of(cls.model_fields[near]) if near else None
    if section is None or not name or "." in name:
        return None
    known = name in section.model_fields or section.model_config.get("extra") == "allow"
    right = name if known else _nearest(name, list(section.model_fields))
    return right and (f"{near}: {{{right}: {render(value)}}}" if dot else f"{near}.{right}")


def _nearest(key: str, known: list[str]) -> str | None:
    """The key that was probably meant; `learning_rate` matches `lr` by its initials."""
    text = key.lower().replace("-", "_")
    initials = "".join(word[:1] for word in text.split("_"))
    if initials in known:
        return initials
    close = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return close[0] if close else None
