"""Mappings to sections and back: `load_yaml`, `parse_override`, `apply_overrides`, `decode`, `encode`.

Types are strict, unknown keys are errors, and each mistake is one sentence that names its key: what was found, what was
expected (`raytrain.config.messages`) and how to fix it. `raytrain.config.yaml12` reads YAML's scalars.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raytrain.config.messages import describe, join, render, section_of, unknown_key, whole_number, wrong_value
from raytrain.config.sections import PLACEHOLDER, OpenSection
from raytrain.config.yaml12 import dump_yaml as dump_yaml
from raytrain.config.yaml12 import load_value, plain_scalar
from raytrain.config.yaml12 import load_yaml as load_yaml
from raytrain.errors import InputError

ModelT = TypeVar("ModelT", bound=BaseModel)

_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*\Z")


def parse_override(text: str) -> tuple[str, Any]:
    """``section.key=value`` of a command line: the dotted key and its value.

    A value that begins with a bracket or a quote is read as YAML; any other is one scalar, so that a path
    such as ``*.txt`` needs no quotes.

    Raises:
        InputError: no ``=``, no key before it, a value that is not YAML, or no value, as a shell makes it of a variable
            that is not set.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InputError(text, got="no =", expected="section.key=value, such as loop.max_steps=100")
    if not _OVERRIDE_KEY.match(key):
        raise InputError(text, got=f"{render(key)} before the =", expected="section.key=value")
    if not value:
        raise InputError(key, got="nothing after the =", expected=f"{key}=VALUE, or {key}=null for none")
    if value[:1] in ("[", "{", '"', "'"):
        return key, load_value(value, origin="the command line", path=key)
    try:
        return key, plain_scalar(value)
    except ValueError as error:
        raise InputError(key, got=str(error), expected="a shorter number") from error


def apply_overrides(mapping: Mapping[Any, Any], overrides: Iterable[str]) -> tuple[dict[Any, Any], set[str]]:
    """A copy of `mapping` with the overrides of a command line applied; of equal keys the last wins.

    Returns:
        The new mapping, which shares its unchanged values with the old one, and the dotted keys that were set.
        A mapping given for a whole section (``loop={max_steps: 3}``) sets its keys one by one.
    """
    result, touched = dict(mapping), set[str]()
    for text in overrides:
        key, value = parse_override(text)
        is_section = "." not in key and isinstance(value, dict) and value
        pairs = {f"{key}.{name}": item for name, item in value.items()} if is_section else {key: value}
        for dotted, item in pairs.items():
            _set(result, dotted.split("."), item)
            touched.add(dotted)
    return result, touched


def _set(mapping: dict[Any, Any], path: list[str], value: Any) -> None:
    """Sets one value, copying the mappings along the path: the caller's mappings are never changed."""
    for depth, name in enumerate(path[:-1]):
        inner = mapping.get(name)
        if inner is not None and not isinstance(inner, Mapping) and depth == 0:
            raise InputError(name, got=describe(inner), expected="a mapping of keys")
        mapping[name] = dict(inner) if isinstance(inner, Mapping) else {}
        mapping = mapping[name]
    mapping[path[-1]] = value


def accepts(root: type[BaseModel], text: str) -> bool:
    """Whether the key of ``section.key=value``, which must exist, takes this value.

    Raises:
        InputError: see `parse_override`.
    """
    dotted, value = parse_override(text)
    *sections, name = dotted.split(".")
    cls = root
    for section in sections:
        cls = section_of(cls.model_fields[section]) or cls
    return name not in _validated(cls, {name: whole_number(cls, name, value)})[1]


def decode(cls: type[ModelT], mapping: Any, *, prefix: str = "") -> ModelT:
    """Builds a section from a mapping of YAML or Python; nested sections are decoded too.

    Raises:
        InputError: for the first mistake in the order of the file; it lists the others.
    """
    problems: list[InputError] = []
    instance = _decode(cls, mapping, prefix, cls, problems)
    if instance is not None and not problems:
        return instance
    first, others = problems[0], list(dict.fromkeys(problem.key for problem in problems[1:]))
    if not others:
        raise first
    more = f"also wrong: {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}"
    remedy = f"{first.remedy}; {more}" if first.remedy else more
    raise InputError(first.key, got=first.got, expected=first.expected, remedy=remedy)


def _decode(
    cls: type[ModelT], mapping: Any, prefix: str, root: type[BaseModel], problems: list[InputError]
) -> ModelT | None:
    """The instance, or None after adding its mistakes to `problems`."""
    if not isinstance(mapping, Mapping):
        keys = f"a mapping with the keys {', '.join(cls.model_fields)}"
        problems.append(InputError(prefix or "job", got=describe(mapping), expected=keys))
        return None
    values: dict[str, Any] = {}
    found: dict[Any, list[InputError]] = {key: [] for key in mapping}
    for key, value in mapping.items():
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        if not isinstance(key, str):
            found[key].append(InputError(join(prefix, key), got=describe(key), expected="a word as a key"))
        elif field is None and cls.model_config.get("extra") != "allow":
            found[key].append(unknown_key(cls, key, prefix=prefix, root=root, value=value))
        elif field is not None and (section := section_of(field)) is not None:
            values[key] = _decode(section, value, join(prefix, key), root, found[key])
        else:
            values[key] = value if field is None else whole_number(cls, key, value)
    instance, wrong = _validated(cls, values)
    for key in wrong:
        if key not in mapping:
            wanted = cls.model_fields[key].description or "a value"
            found[key] = [InputError(join(prefix, key), got="nothing", expected=wanted)]
        elif not found[key]:
            found[key].append(wrong_value(cls, key, values[key], prefix=prefix))
    mistakes = [problem for group in found.values() for problem in group]
    problems.extend(mistakes)
    return None if mistakes else instance


def _validated(cls: type[ModelT], values: dict[str, Any]) -> tuple[ModelT | None, list[str]]:
    """(instance, no wrong keys), or (None, each wrong key once: a union has one error per member)."""
    try:
        return cls.model_validate(values), []
    except ValidationError as error:
        return None, list(dict.fromkeys(str(item["loc"][0]) for item in error.errors(include_input=False)))


def encode(model: BaseModel) -> dict[str, Any]:
    """A section as plain values that YAML and JSON can hold; `decode` of them returns an equal section.

    A Python object becomes a placeholder such as ``<object MyNet>``.
    """
    objects = model.objects if isinstance(model, OpenSection) else ()
    values = {name: getattr(model, name) for name in type(model).model_fields} | (model.model_extra or {})
    return {name: _object(value) if name in objects else _encoded(value) for name, value in values.items()}


def _encoded(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return encode(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else _object(value)


def _object(value: Any) -> Any:
    is_plain = value is None or (isinstance(value, str) and value.startswith(PLACEHOLDER))
    return value if is_plain else f"{PLACEHOLDER}{type(value).__qualname__}>"
