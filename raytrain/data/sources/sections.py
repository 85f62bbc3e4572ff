"""The keys of each built-in source as a section of its own, and their checks before any file is read.

Free of torch and numpy: a job is read with them. `raytrain keys`, `raytrain schema` and completion know them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from cluster.config import Count, Section, Text
from raytrain.config.decode import decode
from raytrain.config.messages import expected_text, suggestion
from raytrain.config.sections import Texts
from raytrain.errors import InputError
from raytrain.runs.storage import matching

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig

STDLIB_MAX_BYTES = 4_000_000


def _path(value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("no path")
    return value


def _paths(value: Any) -> Any:
    for one in value if isinstance(value, (list, tuple)) and value else [value]:
        _path(one)
    return value


def _different(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or len({*value}) < len(value):
        raise ValueError("none, or one twice")
    return value


def _kind(text: str, *types: str) -> WithJsonSchema:
    return WithJsonSchema({"type": list(types), "expected": text})


Path = Annotated[Any, AfterValidator(_path), _kind("a path", "string")]
Paths = Annotated[Any, AfterValidator(_paths), _kind("a path or a list of paths", "string", "array")]
Tokenizer = Annotated[Any, AfterValidator(_path), _kind("the folder of a tokenizer, auto", "string")]
Names = Annotated[Texts, AfterValidator(_different), _kind("a list of column names", "array")]
ClassNames = Annotated[Texts, AfterValidator(_different), _kind("a list of names", "array")]
Length = Annotated[int, Field(ge=2)]
Labels = Annotated[Literal["auto", "next", "same"], Field(description="whether labels are the next tokens or the same")]


class SourceKeys(Section):
    """The keys of a source; `paths` are those that hold paths."""

    paths: ClassVar[tuple[str, ...]] = ()


class InMemory(SourceKeys):
    """A dataset from Python: it has no keys."""


class TextInMemory(SourceKeys):
    """A text from Python."""

    vocabulary: Literal["bytes", "chars"] = Field(default="bytes", description="what the tokens of a text are")


class Columns(SourceKeys):
    """A table from Python, and the columns of one from files."""

    features: Names | None = Field(
        default=None, examples=[["x0", "x1"]], description="columns to learn from; null: all"
    )
    label: Text | None = Field(default=None, examples=["label"], description="the column to predict")


class TextSource(TextInMemory):
    """Text files."""

    paths: ClassVar = ("path", "eval_path", "tokenizer")
    path: Paths = Field(examples=["input.txt"], description="files to train on")
    eval_path: Paths | None = Field(default=None, examples=["held_out.txt"], description="files to evaluate on")
    tokenizer: Tokenizer | None = Field(default=None, examples=["auto"], description="null: bytes or characters")
    labels: Labels = "auto"


class StdlibSource(SourceKeys):
    """The source text of Python's standard library."""

    max_bytes: Count = Field(default=STDLIB_MAX_BYTES, description="bytes of it, at most")


class IdxSource(SourceKeys):
    """Images in the format of MNIST."""

    paths: ClassVar = ("images", "labels", "eval_images", "eval_labels")
    images: Path = Field(examples=["train-images-idx3-ubyte.gz"], description="images to train on")
    labels: Path = Field(examples=["train-labels-idx1-ubyte.gz"], description="their classes")
    eval_images: Path | None = Field(default=None, description="images to evaluate on")
    eval_labels: Path | None = Field(default=None, description="their classes")


class CsvSource(Columns):
    """CSV files."""

    paths: ClassVar = ("path", "eval_path")
    path: Paths = Field(examples=["rows.csv"], description="files to train on")
    eval_path: Paths | None = Field(default=None, examples=["held_out.csv"], description="files to evaluate on")


class ParquetSource(CsvSource):
    """Parquet files and folders of them."""

    order: Literal["auto", "rows", "groups"] = Field(
        default="auto", description="shuffle rows, or row groups where the files are large"
    )


class JsonlSource(CsvSource):
    """JSON lines: a table, or texts for a tokenizer."""

    paths: ClassVar = ("path", "eval_path", "tokenizer")
    text_field: Text | None = Field(default=None, examples=["text"], description="the field of the texts")
    prompt_field: Text | None = Field(default=None, examples=["prompt"], description="the field of prompts")
    completion_field: Text | None = Field(
        default=None, examples=["completion"], description="the field of their completions"
    )
    label_field: Text | None = Field(default=None, examples=["label"], description="the field of the texts' classes")
    class_names: ClassNames | Literal["auto"] = Field(
        default="auto", description="the classes in the order of their numbers"
    )
    tokenizer: Tokenizer | None = Field(default=None, examples=["auto"], description="auto: that of the model's folder")
    max_length: Length | Literal["auto"] = Field(default="auto", description="most tokens of a row")
    packing: Literal["padded", "packed"] = Field(default="padded", description="several texts in a row: packed")
    labels: Labels = "auto"


SOURCES: dict[str, type[SourceKeys]] = {
    "text": TextSource, "stdlib": StdlibSource, "idx": IdxSource, "parquet": ParquetSource, "csv": CsvSource,
    "jsonl": JsonlSource,
}  # fmt: skip
"""The built-in sources by name, and the keys each takes in addition to those of the section `data`."""

TABLES = ("parquet", "csv", "jsonl")


def is_table(data: Any) -> bool:
    """Whether `data` is a pyarrow Table or a pandas DataFrame, without importing either."""
    return (type(data).__module__.split(".")[0], type(data).__name__) in {("pyarrow", "Table"), ("pandas", "DataFrame")}


def refuse_class(data: Any, *, key: str) -> None:
    """Raise InputError for a class in place of a dataset: parentheses were forgotten."""
    if isinstance(data, type):
        name = data.__name__
        raise InputError(key, got=f"the class {name}", expected="an instance of it", remedy=f"write {name}(...)")


def is_own(source: str) -> bool:
    return ":" in source


def values_of(keys: Mapping[str, Any], section: type[SourceKeys], *, owner: str) -> dict[str, Any]:
    """Return the values of all keys of a source, defaults included; messages call it `owner`. Raises InputError: an
    unknown key, a missing one, or a value of the wrong kind."""
    known = ", ".join(section.model_fields)
    for name, key in section.model_fields.items():
        if key.is_required() and name not in keys and not set(keys) - set(section.model_fields):
            raise InputError(
                f"data.{name}", got="no value", expected=expected_text(section, name),
                remedy=f"keys of the source {owner}: {known}",
            )  # fmt: skip
    try:
        made = decode(section, keys, prefix="data")
    except InputError as error:
        if error.key.partition(".")[2] in section.model_fields:
            raise InputError(
                error.key, got=error.got, expected=error.expected,
                remedy="; ".join(filter(None, [error.remedy, f"keys of the source {owner}: {known}"])),
            ) from error  # fmt: skip
        expected = f"one of {known}" if known else "no keys for it"
        seen = f"an unknown key of the source {owner}"
        raise InputError(error.key, got=seen, expected=expected, remedy=error.remedy) from error
    return {name: getattr(made, name) for name in section.model_fields}


OWN_PATHS = ("path", "paths", "file", "files", "dir", "folder", "root")
"""Last parts of the keys that are treated as paths in a user's own source."""


def is_path_key(source: Any, key: Any) -> bool:
    """Whether a key of a source holds paths: a built-in one declares them, a user's own names them so."""
    section = SOURCES.get(source) if isinstance(source, str) else None
    if section is not None:
        return key in section.paths
    return ":" in str(source) and str(key).rsplit("_", 1)[-1] in OWN_PATHS


def as_paths(value: Any, *, key: str = "data.path") -> list[str]:
    """Return a path, a list of paths or None as a list of strings, with the files that a pattern stands for."""
    given = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return [file for path in given for file in matching(os.fspath(path), key=key)]


def source_keys(data: DataConfig) -> dict[str, Any]:
    """Return the source's own keys with defaults filled in. Raises InputError: no source, an unknown source, or a
    key that is unknown, missing or of the wrong kind."""
    if data.train is not None:
        if data.source is not None:
            raise InputError("data.source", got=f"{data.source} together with data.train", expected="only one of them")
        if isinstance(data.train, bytes) and not isinstance(data.eval, (bytes, type(None))):
            raise InputError("data.eval", got=f"a {type(data.eval).__name__}", expected="bytes, like data.train")
        kind = TextInMemory if isinstance(data.train, bytes) else Columns if is_table(data.train) else InMemory
        return values_of(data.keys, kind, owner=f"a {type(data.train).__name__} in memory")
    if data.eval is not None:
        raise InputError(
            "data.eval", got="an object without data.train", expected="data.train with it, or data.source instead"
        )
    source, names = data.source, ", ".join(SOURCES)
    if source is None:
        raise InputError("data.source", got="no value", expected=f"one of {names}, module:function, or data.train")
    if is_own(source):
        return data.keys
    if source not in SOURCES:
        expected = f"one of {names}, or module:function"
        raise InputError("data.source", got=source, expected=expected, remedy=suggestion(source, SOURCES))
    return values_of(data.keys, SOURCES[source], owner=source)


def idx_files(keys: Mapping[str, Any]) -> tuple[str, str, str | None, str | None]:
    """Return the four files of an IDX source. Raises InputError if only one of the two eval files is given."""
    given = {name: keys[name] is not None for name in ("eval_images", "eval_labels")}
    if any(given.values()) and not all(given.values()):
        missing = next(name for name, present in given.items() if not present)
        raise InputError(
            f"data.{missing}", got="no value", expected="a path, since eval_images and eval_labels belong together"
        )
    images, labels, eval_images, eval_labels = (as_paths(keys[name])[:1] for name in IdxSource.model_fields)
    return images[0], labels[0], next(iter(eval_images), None), next(iter(eval_labels), None)
