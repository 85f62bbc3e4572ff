"""YAML to sections and back: a strict YAML 1.2 reader, `key=value` overrides, `decode` and `encode`.

The only place that reads YAML. `jobs.job.spec` builds a job with it; nothing in a file is executed.
"""

from __future__ import annotations

import json
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, Self, TypeVar, cast

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from raytrain.config.messages import describe, join, render, section_of, unknown_key, whole_number, wrong_value
from raytrain.config.sections import PLACEHOLDER, OpenSection
from raytrain.errors import InputError

MAX_VALUES = 100_000
"""More than any job has; nested aliases reach it quickly and are refused before they fill the memory."""

LONGEST_NUMBER = 300
"""Most digits of a number; Python itself refuses to print integers of several thousand digits."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2; used up to the node tree, its constructors never run."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML reads it from the class
        None: [(_TAG + kind, pattern) for kind, pattern in _SCALARS.items()]
    }


def load_yaml(text: str, *, origin: str) -> dict[Any, Any]:
    """Parse a YAML text that holds a mapping; `origin` is what messages call it, such as the file name. Raises
    InputError for a syntax error with its line, a duplicate key, a tag, a second document, no mapping."""
    value = load_value(text, origin=origin)
    if not isinstance(value, dict):
        seen = "an empty file" if value is None else describe(value)
        raise InputError(origin, got=seen, expected="a mapping such as `loop: {max_steps: 100}`")
    return value


def load_value(text: str, *, origin: str, path: str = "") -> Any:
    """Parse a YAML text of any type; `path` is the dotted key whose value it is."""
    loader = None
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        return None if node is None else _Reader(origin).value(node, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" on line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        tab = "indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(path or origin, got=f"a syntax error{where} ({what})", expected="YAML", remedy=tab) from error
    except yaml.YAMLError as error:
        raise InputError(path or origin, got=str(error).splitlines()[0], expected="YAML") from error
    except RecursionError as error:
        raise InputError(path or origin, got="too many levels of nesting", expected="YAML") from error
    finally:
        if loader is not None:
            loader.dispose()


class _CoreDumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type, such as "1e-3" or "on"."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML reads it from the class
        **yaml.SafeDumper.yaml_implicit_resolvers,
        **_CoreLoader.yaml_implicit_resolvers,
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Never writes aliases, which are hard to read: a value that occurs twice is written twice."""
        return True


class _Reader:
    """Turns a tree of nodes into values, and refuses mistakes that PyYAML accepts silently."""

    def __init__(self, origin: str) -> None:
        self.origin, self.count = origin, 0

    def value(self, node: yaml.Node, path: str) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self._error(node, path, f"more than {MAX_VALUES} values", "a job")
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            if kind != "str" and kind not in _SCALARS:
                raise self._error(node, path, f"the tag {node.tag}", "a value without a tag")
            try:
                return _scalar(kind, node.value)
            except ValueError as error:
                raise self._error(node, path, str(error), "a value that fits its tag") from error
        if kind not in ("seq", "map"):
            raise self._error(node, path, f"the tag {node.tag}", "a value without a tag")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self.value(item, join(path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a list or mapping as a key", "a word as a key")
            key = self.value(key_node, path)
            dotted, line = join(path, key), key_node.start_mark.line + 1
            if key == "<<":
                what = "keys of this job; `extends: BASE.yaml` takes those of another one"
                raise self._error(key_node, dotted, "a merge key, which YAML 1.2 does not have", what)
            if key in lines:
                seen = f"the key twice, on lines {lines[key]} and {line} of {self.origin}"
                raise InputError(dotted, got=seen, expected="each key once", remedy="remove one of them")
            lines[key] = line
            values[key] = self.value(value_node, dotted)
        return values

    def _error(self, node: yaml.Node, path: str, seen: str, expected: str) -> InputError:
        where = f"line {node.start_mark.line + 1} of {self.origin}"
        return InputError(path or self.origin, got=f"{seen} ({where})", expected=expected)


def _scalar(kind: str, text: str) -> Any:
    """The value of a scalar; ValueError if the text does not match `kind`, which an explicit tag can set."""
    if kind == "str":
        return text
    if not _SCALARS[kind].match(text):
        raise ValueError(f"{text!r} is not a valid {kind}")
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def plain_scalar(text: str) -> Any:
    """The value of unquoted text: the first kind of scalar that it matches, otherwise a string. Raises ValueError for a
    number of hundreds of digits."""
    kind = next((kind for kind, pattern in _SCALARS.items() if pattern.match(text)), "str")
    return _scalar(kind, text)


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """YAML text that `load_yaml` reads back as it was; keys keep their order."""
    return yaml.dump(dict(mapping), Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=110)


# ---------------------------------------------------------------- decode


ModelT = TypeVar("ModelT", bound=BaseModel)

_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*\Z")


def parse_override(text: str) -> tuple[str, Any]:
    """``section.key=value`` of a command line: the dotted key and its value.

    A value that begins with a bracket or a quote is read as YAML; any other is one scalar, so that a path
    such as ``*.txt`` needs no quotes. A template is the text as it stands: its braces name columns, and the tokens of
    a prompt depend on each space and line break.

    Raises:
        InputError: no ``=``, no key before it, a value that is not YAML, or no value, as a shell makes it of a variable
            that is not set.
    """
    key, equals, typed = text.partition("=")
    key, value = key.strip(), typed.strip()
    if not equals:
        raise InputError(text, got="no =", expected="section.key=value, such as loop.max_steps=100")
    if not _OVERRIDE_KEY.match(key):
        raise InputError(text, got=f"{render(key)} before the =", expected="section.key=value")
    if not value:
        raise InputError(key, got="nothing after the =", expected=f"{key}=VALUE, or {key}=null for none")
    if key == "infer.template" and value[0] not in ('"', "'") and value != "null":
        return key, typed
    if value[:1] in ("[", "{", '"', "'"):
        return key, load_value(value, origin="the command line", path=key)
    try:
        return key, plain_scalar(value)
    except ValueError as error:
        raise InputError(key, got=str(error), expected="a shorter number") from error


def apply_overrides(mapping: Mapping[Any, Any], overrides: Iterable[str]) -> tuple[dict[Any, Any], set[str]]:
    """A copy of `mapping` with the overrides of a command line applied; of equal keys the last wins.

    Returns the new mapping, which shares its unchanged values with the old one, and the dotted keys that were set. A
    mapping given for a whole section (``loop={max_steps: 3}``) sets its keys one by one.
    """
    result, touched = dict(mapping), set[str]()
    for text in overrides:
        key, value = parse_override(text)
        is_section = "." not in key and isinstance(value, dict) and value
        pairs = {f"{key}.{name}": item for name, item in value.items()} if is_section else {key: value}
        for dotted, item in pairs.items():
            *sections, last = dotted.split(".")
            inside = result
            for depth, name in enumerate(sections):  # copied, as the caller's mappings are never changed
                inner = inside.get(name)
                if inner is not None and not isinstance(inner, Mapping) and depth == 0:
                    raise InputError(name, got=describe(inner), expected="a mapping of keys")
                inside[name] = dict(inner) if isinstance(inner, Mapping) else {}
                inside = inside[name]
            inside[last] = item
            touched.add(dotted)
    return result, touched


def accepts(root: type[BaseModel], text: str) -> bool:
    """Whether the key of ``section.key=value``, which must exist, takes this value. Raises as `parse_override`."""
    dotted, value = parse_override(text)
    *sections, name = dotted.split(".")
    cls = root
    for section in sections:
        cls = section_of(cls.model_fields[section]) or cls
    return name not in _validated(cls, {name: whole_number(cls, name, value)})[1]


def decode(cls: type[ModelT], mapping: Any, *, prefix: str = "") -> ModelT:
    """Builds a section from a mapping of YAML or Python; nested sections are decoded too. Raises InputError for the
    first mistake in the order of the file; it lists the others."""
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


_adapter = cache(TypeAdapter)


class JsonRecord:
    """Base of the dataclasses that are written as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` restores an equal record, floats to the last bit."""
        return json.loads(json.dumps(asdict(cast("Any", self)), default=_encoded))

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`, also after JSON made lists of tuples. Further keys, which an older version may have
        written, are ignored."""
        return _adapter(cls).validate_python(row)


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
