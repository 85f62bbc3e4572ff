"""Open the rows that the `data` section names (`open_source`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raytrain.data.rows.contract import Source
from raytrain.data.sources.idx import open_idx
from raytrain.data.sources.keys import as_paths, idx_files, is_own, source_keys
from raytrain.data.sources.stdlib import STDLIB, read_stdlib
from raytrain.data.sources.tables import read_pair
from raytrain.data.sources.text import open_text, text_source
from raytrain.data.sources.tokenised import Tokenised, is_tokenised, tokenise, tokenised_source
from raytrain.errors import InputError

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig
    from raytrain.data.rows.contract import Split
    from raytrain.data.rows.users_collate import UsersCollate


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
    from raytrain.data.sources.parquet import open_groups, parquet_files, sizes_of

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
    from raytrain.data.rows.users_collate import UsersCollate

    function = resolve(data.collate, "data.collate") if isinstance(data.collate, str) else data.collate
    return UsersCollate(function, function_name(function))


def _collated(source: Source, collate: UsersCollate | None) -> Source:
    """The source with batches made by `collate`; a map-style dataset was opened with it."""
    if collate is None:
        return source
    from raytrain.data.rows.map_style import DatasetSplit
    from raytrain.data.rows.users_collate import CollatedSplit

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
    from raytrain.data.sources.in_memory import as_table, is_table, memory_source, table_pair

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
    """Call the user's function and open what it returns."""
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
    from raytrain.data.sources.parquet import open_groups, parquet_files

    train = parquet_files(written.train, key="data.source")
    held = [] if written.eval is None else parquet_files(written.eval, key="data.source")
    return open_groups(train, held, {"features": None, "label": None, "order": "groups"},
                       fraction=fraction if written.holds_out else 0.0)  # fmt: skip


def read_on_driver(data: DataConfig) -> bytes | Tokenised | None:
    """Read the data that the driver must read for all workers, otherwise return None: the standard library's text,
    which may differ between machines, and tokenized text, so that it is tokenized once.

    Raises:
        InputError: as for `open_source`.
    """
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
