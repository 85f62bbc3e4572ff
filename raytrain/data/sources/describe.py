"""Compute the sizes and shapes of the data for the plan from file sizes, headers and metadata, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raytrain.data.sources.idx import IMAGES, describe_idx, read_shape
from raytrain.data.sources.keys import TABLES, as_paths, idx_files, is_own, source_keys
from raytrain.data.sources.parquet import parquet_files, sizes_of
from raytrain.data.sources.stdlib import STDLIB, stdlib_files
from raytrain.data.sources.tables import choose_columns, class_names, convert, parquet_sizes, read_tables
from raytrain.data.sources.text import describe_bytes, describe_text
from raytrain.data.sources.tokenised import is_tokenised
from raytrain.errors import InputError
from raytrain.models.huggingface.tokenizer import check_tokenizer
from raytrain.plan.facts import DataFacts
from raytrain.runs.storage import file_size

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig

FLOAT_BYTES = 4


def describe_source(data: DataConfig, *, context: int | None) -> DataFacts | None:
    """Return the sizes of the data from file sizes, headers and metadata; torch is not imported.

    Args:
        data: the `data` section.
        context: `model.context`, for text.
    Returns:
        None for the user's own source and for text that is tokenized: their sizes are known only in a run.
    Raises:
        InputError: the section or its files are invalid.
    """
    keys = source_keys(data)
    fraction = data.eval_fraction
    if data.train is not None:
        return _describe_memory(data, keys, context)
    if is_own(data.source or ""):
        return None
    if is_tokenised(data):
        check_tokenizer(keys["tokenizer"])
        for name in ("path", "eval_path"):
            for path in as_paths(keys[name]):
                file_size(path, key=f"data.{name}")
        return None
    if data.source == "text":
        return describe_text(
            as_paths(keys["path"]),
            as_paths(keys["eval_path"]),
            context=context,
            fraction=fraction,
            vocabulary=keys["vocabulary"],
        )
    if data.source == "stdlib":
        size = min(keys["max_bytes"], stdlib_files(keys["max_bytes"])[1])
        return describe_bytes(size, context=context, fraction=fraction, origin=STDLIB, key="data.max_bytes")
    if data.source == "idx":
        return describe_idx(*idx_files(keys), fraction=fraction)
    return _describe_table(data.source or "", keys, fraction=fraction)


def _describe_table(kind: str, keys: Mapping[str, Any], *, fraction: float) -> DataFacts:
    rows, row_bytes, by_groups = _table_size(kind, keys, key="path")
    evaluation = None if keys["eval_path"] is None else _table_size(kind, keys, key="eval_path")[0]
    return DataFacts.of_rows(
        rows, evaluation, fraction=fraction, row_bytes=row_bytes, kind="groups" if by_groups else "memory",
        reason=lambda train, held: f"{kind}: {train:,} rows to train on, {held:,} for evaluation",
    )  # fmt: skip


def _table_size(kind: str, keys: Mapping[str, Any], *, key: str) -> tuple[int, int, bool]:
    """(rows, stored bytes per row, whether it is read by row groups); Parquet is sized from its metadata alone."""
    paths, name = as_paths(keys[key]), f"data.{key}"
    if kind == "parquet":
        sizes = sizes_of(parquet_files(paths, key=name), keys, key=name)
        return sizes.rows, sizes.row_bytes, sizes.by_groups
    table = read_tables(paths, kind=kind, key=name)
    choice = choose_columns(table.schema, features=keys["features"], label=keys["label"], key=name)
    columns = convert(table, choice, classes=class_names([table], keys["label"]), key=name)
    arrays = [*columns.dense.values(), *(values for values, _ in columns.ragged.values())]
    return table.num_rows, -(-sum(array.nbytes for array in arrays) // table.num_rows), False


def describe_shapes(data: DataConfig) -> dict[str, Any]:
    """Return the facts that a model builder can take from the source without opening it and without torch.

    Returns:
        Those of vocab_size, image_shape (C, H, W) and num_features that are known.
    """
    keys = source_keys(data)
    if data.train is not None or is_own(data.source or "") or is_tokenised(data):
        return {}
    if data.source == "stdlib" or keys.get("vocabulary") == "bytes":
        return {"vocab_size": 256}
    if data.source == "idx":
        shape = read_shape(as_paths(keys["images"])[0], key="data.images", **IMAGES)[1:]
        image = (1, *shape) if len(shape) == 2 else shape
        return {"image_shape": image, "num_features": image[0] * image[1] * image[2]}
    if data.source == "parquet":
        schema = parquet_sizes(parquet_files(keys["path"], key="data.path"), key="data.path")[0]
    elif data.source in TABLES:
        schema = read_tables(as_paths(keys["path"]), kind=data.source, key="data.path").schema
    else:
        return {}
    stacked = choose_columns(schema, features=keys["features"], label=keys["label"], key="data.path").stacked
    return {"num_features": len(stacked)} if stacked else {}


def _describe_memory(data: DataConfig, keys: Mapping[str, Any], context: int | None) -> DataFacts:
    if isinstance(data.train, bytes):
        size = 0 if data.eval is None else len(data.eval)
        return describe_bytes(
            len(data.train),
            size,
            context=context,
            fraction=data.eval_fraction,
            vocabulary=keys["vocabulary"],
            origin="text in memory",
            key="data.train",
        )
    rows, stored = _object_size(data.train, key="data.train")
    evaluation = None if data.eval is None else _object_size(data.eval, key="data.eval")[0]
    kind = type(data.train).__name__
    return DataFacts.of_rows(
        rows, evaluation, fraction=data.eval_fraction, row_bytes=stored,
        reason=lambda train, held: f"{kind} in memory: {train:,} rows, {held:,} more for evaluation",
    )  # fmt: skip


def _object_size(value: Any, *, key: str) -> tuple[int, int]:
    """(rows, bytes per row) of an object in memory, from its length and `nbytes`."""
    try:
        if isinstance(value, Mapping):
            columns = list(value.values())
            rows, stored = len(columns[0]), sum(_bytes_of(column) for column in columns)
        else:
            rows = len(value)
            stored = _bytes_of(value) or (rows * _bytes_of(value[0]) if rows else 0)
    except (TypeError, IndexError, KeyError):
        rows, stored = 0, 0
    if not rows:
        raise InputError(key, got=f"a {type(value).__name__} without rows", expected="at least one row")
    return rows, -(-stored // rows)


def _bytes_of(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes_of(part) if not isinstance(part, (int, float)) else FLOAT_BYTES for part in parts)
