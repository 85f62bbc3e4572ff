"""YAML 1.2's core schema on PyYAML's parser: `load_yaml`, `load_value`, `plain_scalar`, `dump_yaml`.

PyYAML's own loader reads `on` as a boolean, `1e-3` as a string, `010` as 8, and lets the second of two equal keys win.
This module uses only its parser, up to the node tree, and interprets the scalars itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from raytrain.config.messages import describe, join
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
    """Parse a YAML text that holds a mapping.

    Args:
        text: one YAML document.
        origin: what messages call it, such as the file name.

    Raises:
        InputError: a syntax error with its line, a duplicate key, a tag, a second document, no mapping.
    """
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
        self.origin, self.count, self.open = origin, 0, set[int]()

    def value(self, node: yaml.Node, path: str) -> Any:
        """The value of one node; `path` is its dotted key, for messages."""
        self.count += 1
        if self.count > MAX_VALUES:
            raise self._error(node, path, f"more than {MAX_VALUES} values", "a job")
        if id(node) in self.open:
            raise self._error(node, path, "an alias to itself", "a finite value")
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, kind)
        if kind not in ("seq", "map"):
            raise self._error(node, path, f"the tag {node.tag}", "a value without a tag")
        self.open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, path)
        else:
            value = [self.value(item, join(path, index)) for index, item in enumerate(node.value)]
        self.open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode, path: str, kind: str) -> Any:
        if kind != "str" and kind not in _SCALARS:
            raise self._error(node, path, f"the tag {node.tag}", "a value without a tag")
        try:
            return _scalar(kind, node.value)
        except ValueError as error:
            raise self._error(node, path, str(error), "a value that fits its tag") from error

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
    """The value of unquoted text: the first kind of scalar that it matches, otherwise a string.

    Raises:
        ValueError: a number of hundreds of digits.
    """
    kind = next((kind for kind, pattern in _SCALARS.items() if pattern.match(text)), "str")
    return _scalar(kind, text)


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """YAML text that `load_yaml` reads back as it was; keys keep their order."""
    return yaml.dump(dict(mapping), Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=110)
