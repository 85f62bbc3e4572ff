"""The door to the sources: `describe` their sizes for the plan without torch, and open the rows that `data` names.

Called by the plan (facts), by the driver's checks, and by each worker, which opens its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raytrain.config.messages import abbreviated
from raytrain.data.rows.contract import Source
from raytrain.data.sources.idx import IMAGES, count_idx_classes, describe_idx, open_idx, read_shape
from raytrain.data.sources.parquet import open_groups, parquet_files, read_column, sizes_of
from raytrain.data.sources.sections import TABLES, as_paths, idx_files, is_own, is_table, refuse_class, source_keys
from raytrain.data.sources.tables import (
    NAMED_AT_MOST,
    choose_columns,
    class_names,
    convert,
    count_classes,
    is_fraction,
    parquet_sizes,
    read_pair,
    read_tables,
)
from raytrain.data.sources.text import (
    STDLIB,
    check_context,
    describe_bytes,
    files_text,
    open_text,
    read_stdlib,
    stdlib_files,
    text_source,
)
from raytrain.data.sources.tokenised import Tokenised, is_tokenised, tokenise, tokenised_source
from raytrain.errors import InputError
from raytrain.models.huggingface import check_tokenizer
from raytrain.models.sizes import CLASSES_UNREAD, ROW_BUILDERS
from raytrain.plan.facts import DataFacts
from raytrain.runs.storage import file_size

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig
    from raytrain.data.rows.collate import UsersCollate
    from raytrain.data.rows.contract import Split


# ---------------------------------------------------------------- describe
# Compute the sizes and shapes of the data for the plan from file sizes, headers and metadata, without torch.


FLOAT_BYTES = 4


def describe_source(data: DataConfig, *, context: int | None) -> DataFacts | None:
    """Return the sizes of the data from file sizes, headers and metadata; torch is not imported. `data`: the `data`
    section. `context`: `model.context`, for text. Returns None for the user's own source and for text that is
    tokenized: their sizes are known only in a run. Raises InputError: the section or its files are invalid."""
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
        check_context(context)
        paths = {name: as_paths(keys[name]) for name in ("path", "eval_path")}
        sizes = [sum(file_size(path, key=f"data.{name}") for path in paths[name]) for name in paths]
        origin = files_text(paths["path"])
        return describe_bytes(*sizes, context=context, fraction=fraction, vocabulary=keys["vocabulary"], origin=origin)
    if data.source == "stdlib":
        size = min(keys["max_bytes"], stdlib_files(keys["max_bytes"])[1])
        return describe_bytes(size, context=context, fraction=fraction, origin=STDLIB, key="data.max_bytes")
    if data.source == "idx":
        return describe_idx(*idx_files(keys), fraction=fraction)
    kind = data.source or ""
    (rows, row_bytes, by_groups), *held = _table_sizes(kind, keys)
    evaluation = held[0][0] if held else None
    return DataFacts.of_rows(
        rows, evaluation, fraction=fraction, row_bytes=row_bytes, kind="groups" if by_groups else "memory",
        reason=lambda train, held: f"{kind}: {train:,} rows to train on, {held:,} for evaluation",
    )  # fmt: skip


def _table_sizes(kind: str, keys: Mapping[str, Any]) -> list[tuple[int, int, bool]]:
    """(rows, stored bytes per row, whether it is read by row groups) of `path`, and of `eval_path` if it is given;
    Parquet is sized from its metadata alone."""
    names = [name for name in ("path", "eval_path") if keys[name] is not None]
    if kind == "parquet":
        found = [sizes_of(parquet_files(keys[name], key=f"data.{name}"), keys, key=f"data.{name}") for name in names]
        return [(sizes.rows, sizes.row_bytes, sizes.by_groups) for sizes in found]
    made = []
    for name, table in zip(names, read_pair(keys, kind=kind), strict=True):
        key = f"data.{name}"
        choice = choose_columns(table.schema, features=keys["features"], label=keys["label"], key=key, table=table)
        columns = convert(table, choice, classes=class_names([table], choice.label), key=key)
        arrays = [*columns.dense.values(), *(values for values, _ in columns.ragged.values())]
        made.append((table.num_rows, -(-sum(array.nbytes for array in arrays) // table.num_rows), False))
    return made


def describe_shapes(data: DataConfig) -> dict[str, Any]:
    """Return the facts that a model builder can take from the source without opening it and without torch. Returns
    those of vocab_size, image_shape (C, H, W), num_features and num_classes that are known; `CLASSES_UNREAD` where
    counting the classes would take reading much of the data."""
    keys = source_keys(data)
    if data.train is not None or is_own(data.source or "") or is_tokenised(data):
        return {}
    if data.source == "stdlib" or keys.get("vocabulary") == "bytes":
        return {"vocab_size": 256}
    if data.source == "idx":
        shape = read_shape(as_paths(keys["images"])[0], key="data.images", **IMAGES)[1:]
        image = (1, *shape) if len(shape) == 2 else shape
        _, labels, _, eval_labels = idx_files(keys)
        features, number = image[0] * image[1] * image[2], count_idx_classes(labels, eval_labels)
        return {"image_shape": image, "num_features": features, "num_classes": number}
    if data.source == "parquet":
        sizes = sizes_of(parquet_files(keys["path"], key="data.path"), keys, key="data.path")
        stacked, label = sizes.choice.stacked, sizes.choice.label
        classes: dict[str, Any] = {}
        if label is not None and not is_fraction(sizes.schema.field(label).type):
            if sizes.by_groups:  # so large that the run reads it by row groups: the labels are not read here
                classes = {CLASSES_UNREAD: True}
            else:
                both = ((name, as_paths(keys[name])) for name in ("path", "eval_path"))
                files = [file for name, paths in both for file in parquet_files(paths, key=f"data.{name}")]
                classes = {"num_classes": count_classes([read_column(file, label) for file in files], label)}
    elif data.source in TABLES:
        tables = read_pair(keys, kind=data.source)
        found = choose_columns(tables[0].schema, features=keys["features"], label=keys["label"], key="data.path")
        stacked, classes = found.stacked, {"num_classes": count_classes(tables, found.label)}
    else:
        return {}
    known = {"num_features": len(stacked) or None, **classes}
    return {name: value for name, value in known.items() if value is not None}


def check_label(data: DataConfig, *, builder: str | None) -> None:
    """Raise InputError (data.label) where a table without a label is given to a built-in model of rows: without
    data.features its columns keep their names, and none of them becomes x. `builder`: `model.builder`."""
    if builder not in ROW_BUILDERS or not (is_table(data.train) if data.train is not None else data.source in TABLES):
        return
    keys = source_keys(data)
    if keys["label"] is not None or (data.train is None and is_tokenised(data)):
        return
    if data.train is not None:
        names = [str(name) for name in getattr(data.train, "column_names", data.train.columns)]
    elif data.source == "parquet":
        names = parquet_sizes(parquet_files(keys["path"], key="data.path"), key="data.path")[0].names
    else:
        names = read_tables(as_paths(keys["path"]), kind=data.source or "", key="data.path").column_names
    if "labels" in (keys["features"] or names):
        return
    raise InputError(
        "data.label",
        got="null",
        expected=f"the column to predict, one of {abbreviated(names, NAMED_AT_MOST)}",
        remedy=f"{builder} learns from the columns x and labels, which data.label makes",
    )


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
    refuse_class(value, key=key)
    try:
        if isinstance(value, Mapping):
            columns = list(value.values())
            rows, stored = len(columns[0]), sum(_bytes_of(column) for column in columns)
        elif hasattr(value, "memory_usage"):  # a DataFrame, whose items are columns
            rows, stored = len(value), int(value.memory_usage().sum())
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


# ---------------------------------------------------------------- open
# Open the rows that the `data` section names (`open_source`).


def open_source(data: DataConfig, *, context: int | None, on_driver: bool = True) -> Source:
    """Open the data in host memory.

    Args:
        data: the `data` section; relative paths are resolved against the working directory.
        context: `model.context`, for text.
        on_driver: whether a user's function may return Ray Datasets. They are written on the driver, which sends the
            files to the workers: a worker that opens the data itself has none.
    Raises:
        InputError: the section, its files or their contents are invalid.

    Example:
        >>> from raytrain.config.sections import DataConfig
        >>> from raytrain.data.sources.open import open_source
        >>> source = open_source(DataConfig(source="csv", path="rows.csv", label="y"), context=None)
        >>> len(source.train), len(source.eval), source.classes
        (54, 6, 3)

        Rows of a program, as in `train`, or those of a function named in `data.source`:

        >>> import torch
        >>> rows = {"x": torch.randn(20, 4), "labels": torch.zeros(20)}
        >>> len(open_source(DataConfig(train=rows), context=None).train)
        18
    """
    collate = users_collate(data)
    return _collated(_open(data, context=context, on_driver=on_driver, collate=collate), collate)


def _open(data: DataConfig, *, context: int | None, on_driver: bool, collate: UsersCollate | None) -> Source:
    keys = source_keys(data)
    if data.train is not None:
        return _open_memory(data, keys, context, collate)
    name = data.source or ""
    if is_own(name):
        return _open_own(data, collate, on_driver=on_driver)
    if is_tokenised(data):
        return tokenised_source(tokenise(data), context=context)
    if name == "text":
        return open_text(
            as_paths(keys["path"]),
            as_paths(keys["eval_path"]),
            context=context,
            fraction=data.eval_fraction,
            vocabulary=keys["vocabulary"],
            same_labels=keys["labels"] == "same",
        )
    if name == "stdlib":
        return _open_stdlib(read_stdlib(keys["max_bytes"]), data, context)
    if name == "idx":
        return open_idx(*idx_files(keys), fraction=data.eval_fraction)
    from raytrain.data.sources.in_memory import table_pair

    if name == "parquet":
        paths, eval_paths = (parquet_files(keys[part], key=f"data.{part}") for part in ("path", "eval_path"))
        keys = {**keys, "path": paths, "eval_path": eval_paths or None}
        if sizes_of(paths, keys, key="data.path").by_groups:
            return open_groups(paths, eval_paths, keys, fraction=data.eval_fraction)
    train, *evaluation = read_pair(keys, kind=name)
    return table_pair(
        train,
        *(evaluation or [None]),
        features=keys["features"],
        label=keys["label"],
        fraction=data.eval_fraction,
        origin=name,
    )


def users_collate(data: DataConfig) -> UsersCollate | None:
    """The function of `data.collate`; None if raytrain collates. Raises InputError if it cannot be imported."""
    if data.collate is None:
        return None
    from raytrain.config.user_code import function_name, resolve
    from raytrain.data.rows.collate import UsersCollate

    function = resolve(data.collate, "data.collate") if isinstance(data.collate, str) else data.collate
    return UsersCollate(function, function_name(function))


def _collated(source: Source, collate: UsersCollate | None) -> Source:
    """The source with batches made by `collate`; a map-style dataset was opened with it."""
    if collate is None:
        return source
    from raytrain.data.rows.collate import CollatedSplit
    from raytrain.data.rows.map_style import DatasetSplit

    def own(split: Split | None) -> Split | None:
        if split is None or isinstance(split, DatasetSplit):
            return split
        return CollatedSplit(split, collate, key="data.source")

    return replace(source, train=own(source.train), eval=own(source.eval), first_labels_ignored=False)


def _open_stdlib(text: bytes, data: DataConfig, context: int | None) -> Source:
    return text_source(text, context=context, eval_fraction=data.eval_fraction, origin=STDLIB, key="data.max_bytes")


def _open_memory(
    data: DataConfig, keys: Mapping[str, Any], context: int | None, collate: UsersCollate | None
) -> Source:
    from raytrain.data.sources.in_memory import as_table, memory_source, table_pair

    if isinstance(data.train, bytes):
        return text_source(
            data.train,
            context=context,
            vocabulary=keys["vocabulary"],
            eval_fraction=data.eval_fraction,
            eval_text=data.eval,
            key="data.train",
        )
    if is_table(data.train) and (data.eval is None or is_table(data.eval)):
        return table_pair(
            as_table(data.train, key="data.train"),
            None if data.eval is None else as_table(data.eval, key="data.eval"),
            features=keys["features"],
            label=keys["label"],
            fraction=data.eval_fraction,
            keys=("data.train", "data.eval"),
            origin="a table in memory",
        )
    return memory_source(data.train, data.eval, fraction=data.eval_fraction, collate=collate)


def _open_own(data: DataConfig, collate: UsersCollate | None, *, on_driver: bool) -> Source:
    from raytrain.config.user_code import resolve
    from raytrain.data.sources.in_memory import KINDS, memory_source
    from raytrain.data.sources.ray_dataset import imports_ray, written_datasets
    from raytrain.models.registry import call_builder, check_keys

    name = data.source or ""
    function = resolve(name, key="data.source")
    check_keys(function, data.keys, sections=[], key="data", ours=data.given)
    written = written_datasets(name, function, data.keys) if on_driver and imports_ray(function) else None
    if written is not None:
        return replace(_open_written(written, data.eval_fraction), worker_data=written)
    result = call_builder(function, data.keys, sections={}, key="data")
    expected = f'{{"train": ..., "eval": ...}}, each {KINDS}'
    if not isinstance(result, Mapping):
        raise InputError("data.source", got=f"{name} returned a {type(result).__name__}", expected=expected)
    unknown = [str(part) for part in result if part not in ("train", "eval")]
    if unknown or result.get("train") is None:
        seen = f"the keys {', '.join(map(str, result)) or 'none'}"
        raise InputError("data.source", got=f"{name} returned a dict with {seen}", expected=expected)
    fraction = 0.0 if "eval" in result else data.eval_fraction
    return memory_source(
        result["train"],
        result.get("eval"),
        fraction=fraction,
        keys=(f"data.source, train of {name}", f"data.source, eval of {name}"),
        origin=name,
        collate=collate,
    )


def _open_written(written: Any, fraction: float) -> Source:
    """Open the Parquet files of a written Ray Dataset; columns keep their names, as for any table in memory."""
    train = parquet_files(written.train, key="data.source")
    held = [] if written.eval is None else parquet_files(written.eval, key="data.source")
    return open_groups(train, held, {"features": None, "label": None, "order": "groups"},
                       fraction=fraction if written.holds_out else 0.0)  # fmt: skip


def read_on_driver(data: DataConfig) -> bytes | Tokenised | None:
    """Read the data that the driver must read for all workers, otherwise return None: the standard library's text,
    which may differ between machines, and tokenized text, so that it is tokenized once. Raises InputError: as for
    `open_source`."""
    if data.train is None and data.source == "stdlib":
        return read_stdlib(source_keys(data)["max_bytes"])
    return tokenise(data) if is_tokenised(data) else None


def source_from_driver(sent: Any, data: DataConfig, *, context: int | None) -> Source | None:
    """Open on a worker what the driver sent: the result of `read_on_driver`, or `Source.worker_data`.

    Returns None if that is None; the worker then opens the data itself."""
    if sent is None:
        return None
    if isinstance(sent, Tokenised):
        source = tokenised_source(sent, context=context)
    elif isinstance(sent, bytes):
        source = _open_stdlib(sent, data, context)
    else:
        source = _open_written(sent, data.eval_fraction)
    return _collated(source, users_collate(data))
