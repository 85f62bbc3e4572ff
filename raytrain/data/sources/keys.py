"""The keys of each built-in source, and their checks before any file is read. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.config.messages import describe, meant, suggestion
from raytrain.errors import InputError
from raytrain.runs.storage import matching

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig

STDLIB_MAX_BYTES = 4_000_000


@dataclass(frozen=True)
class Key:
    """One key: a check of its value, a description of valid values, and its default."""

    accepts: Callable[[Any], bool]
    expected: str
    default: Any = None
    required: bool = False
    is_path: bool = False


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _are_paths(value: Any) -> bool:
    return _is_path(value) or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_path, value)))


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(name, str) and name for name in value)


def _are_classes(value: Any) -> bool:
    return value == "auto" or (_are_names(value) and len({*value}) == len(value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_length(value: Any) -> bool:
    return _is_count(value) and value >= 2


PATHS = "a path or a list of paths"
REQUIRED_PATHS = Key(_are_paths, PATHS, required=True, is_path=True)
OPTIONAL_PATHS = Key(lambda value: value is None or _are_paths(value), PATHS, is_path=True)
REQUIRED_PATH = Key(_is_path, "a path", required=True, is_path=True)
OPTIONAL_PATH = Key(lambda value: value is None or _is_path(value), "a path", is_path=True)
FEATURES = Key(lambda value: value is None or _are_names(value), "a list of column names, or null for all")
LABEL = Key(lambda value: value is None or _is_name(value), "a column name or null")
VOCABULARY = Key(lambda value: value in ("bytes", "chars"), "bytes or chars", default="bytes")

ORDER = Key(lambda value: value in ("auto", "rows", "groups"), "auto, rows or groups", default="auto")
NAME = Key(lambda value: value is None or _is_name(value), "the name of a field, or null")
TOKENIZER = Key(lambda value: value is None or _is_path(value), "the folder of a tokenizer, auto or null", is_path=True)
LABELS = Key(lambda value: value in ("auto", "next", "same"), "auto, next or same", default="auto")

TABLE_KEYS = {"path": REQUIRED_PATHS, "eval_path": OPTIONAL_PATHS, "features": FEATURES, "label": LABEL}
TEXT_ROW_KEYS = {
    "text_field": NAME,
    "prompt_field": NAME,
    "completion_field": NAME,
    "label_field": NAME,
    "class_names": Key(_are_classes, "the classes in the order of their numbers, or auto", default="auto"),
    "tokenizer": TOKENIZER,
    "max_length": Key(lambda value: value == "auto" or _is_length(value), "at least 2 tokens, or auto", default="auto"),
    "packing": Key(lambda value: value in ("padded", "packed"), "padded or packed", default="padded"),
    "labels": LABELS,
}
SOURCES: dict[str, dict[str, Key]] = {
    "text": {
        "path": REQUIRED_PATHS,
        "vocabulary": VOCABULARY,
        "eval_path": OPTIONAL_PATHS,
        "tokenizer": TOKENIZER,
        "labels": LABELS,
    },
    "stdlib": {"max_bytes": Key(_is_count, "a number of bytes, at least 1", default=STDLIB_MAX_BYTES)},
    "idx": {
        "images": REQUIRED_PATH,
        "labels": REQUIRED_PATH,
        "eval_images": OPTIONAL_PATH,
        "eval_labels": OPTIONAL_PATH,
    },
    "parquet": {**TABLE_KEYS, "order": ORDER},
    "csv": TABLE_KEYS,
    "jsonl": {**TABLE_KEYS, **TEXT_ROW_KEYS},
}
"""The built-in sources by name, and the keys each takes in addition to those of the section."""

TABLES = ("parquet", "csv", "jsonl")


def memory_keys(train: Any) -> dict[str, Key]:
    """Keys allowed with `data.train`: column names for a table, the vocabulary for a text, otherwise none."""
    if isinstance(train, bytes):
        return {"vocabulary": VOCABULARY}
    return {"features": FEATURES, "label": LABEL} if is_table(train) else {}


def is_table(data: Any) -> bool:
    """Whether `data` is a pyarrow Table or a pandas DataFrame, without importing either."""
    return (type(data).__module__.split(".")[0], type(data).__name__) in {
        ("pyarrow", "Table"),
        ("pandas", "DataFrame"),
    }


def refuse_class(data: Any, *, key: str) -> None:
    """Raise InputError for a class in place of a dataset: parentheses were forgotten."""
    if isinstance(data, type):
        name = data.__name__
        raise InputError(key, got=f"the class {name}", expected="an instance of it", remedy=f"write {name}(...)")


def is_own(source: str) -> bool:
    return ":" in source


def check_keys(keys: Mapping[str, Any], known: Mapping[str, Key], *, owner: str) -> dict[str, Any]:
    """Return the values of all keys of a source, defaults included.

    Args:
        keys: the keys given in the job.
        known: the keys that the source takes.
        owner: the name of the source in messages.
    Raises:
        InputError: an unknown key, a missing one, or a value of the wrong kind.
    """
    for name in keys:
        if name not in known:
            raise InputError(
                f"data.{name}",
                got=f"an unknown key of the source {owner}",
                expected=f"one of {', '.join(known)}" if known else "no keys for it",
                remedy=suggestion(name, known) or (f"did you mean {key}?" if (key := meant(name)) else ""),
            )
    values = {name: keys.get(name, key.default) for name, key in known.items()}
    for name, key in known.items():
        if key.required and name not in keys:
            seen = "no value"
        elif name in keys and not key.accepts(keys[name]):
            seen = describe(keys[name])
        else:
            continue
        raise InputError(
            f"data.{name}", got=seen, expected=key.expected, remedy=f"keys of the source {owner}: {', '.join(known)}"
        )
    return values


OWN_PATHS = ("path", "paths", "file", "files", "dir", "folder", "root")
"""Last parts of the keys that are treated as paths in a user's own source."""


def is_path_key(source: Any, key: Any) -> bool:
    """Whether a key of a source holds paths: a built-in one declares them, a user's own names them so."""
    known = SOURCES.get(source, {}).get(key) if isinstance(source, str) else None
    return known.is_path if known is not None else ":" in str(source) and str(key).rsplit("_", 1)[-1] in OWN_PATHS


def as_paths(value: Any, *, key: str = "data.path") -> list[str]:
    """Return a path, a list of paths or None as a list of strings, with the files that a pattern stands for."""
    given = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return [file for path in given for file in matching(os.fspath(path), key=key)]


def source_keys(data: DataConfig) -> dict[str, Any]:
    """Return the source's own keys with defaults filled in.

    Raises:
        InputError: no source, an unknown source, or a key that is unknown, missing or of the wrong kind.
    """
    if data.train is not None:
        if data.source is not None:
            raise InputError("data.source", got=f"{data.source} together with data.train", expected="only one of them")
        if isinstance(data.train, bytes) and not isinstance(data.eval, (bytes, type(None))):
            raise InputError("data.eval", got=f"a {type(data.eval).__name__}", expected="bytes, like data.train")
        return check_keys(data.keys, memory_keys(data.train), owner=f"a {type(data.train).__name__} in memory")
    if data.eval is not None:
        raise InputError(
            "data.eval", got="an object without data.train", expected="data.train with it, or data.source instead"
        )
    if data.source is None:
        raise InputError(
            "data.source",
            got="no value",
            expected=f"one of {', '.join(SOURCES)}, module:function, or data.train",
        )
    if not is_own(data.source) and data.source not in SOURCES:
        raise InputError(
            "data.source",
            got=data.source,
            expected=f"one of {', '.join(SOURCES)}, or module:function",
            remedy=suggestion(data.source, SOURCES),
        )
    return data.keys if is_own(data.source) else check_keys(data.keys, SOURCES[data.source], owner=data.source)


def idx_files(keys: Mapping[str, Any]) -> tuple[str, str, str | None, str | None]:
    """Return the four files of an IDX source. Raises InputError if only one of the two eval files is given."""
    given = {name: keys[name] is not None for name in ("eval_images", "eval_labels")}
    if any(given.values()) and not all(given.values()):
        missing = next(name for name, present in given.items() if not present)
        raise InputError(
            f"data.{missing}", got="no value", expected="a path, since eval_images and eval_labels belong together"
        )
    images, labels, eval_images, eval_labels = (as_paths(keys[name])[:1] for name in SOURCES["idx"])
    return images[0], labels[0], next(iter(eval_images), None), next(iter(eval_labels), None)
