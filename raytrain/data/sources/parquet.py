"""The source `parquet`: find its files, read their metadata, and decide whether to shuffle rows or row groups."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain.data.rows.contract import IGNORED_LABEL, Source, facts_of
from raytrain.data.sources.sections import as_paths
from raytrain.data.sources.tables import (
    ColumnChoice,
    check_present,
    choose_columns,
    class_names,
    column_kind,
    is_fraction,
    is_text,
    no_label,
    open_parquet,
    parquet_sizes,
)
from raytrain.errors import InputError
from raytrain.runs.storage import join, locate

#: `order: auto` shuffles by row groups above this size; it depends on the files alone, so all machines agree.
GROUPS_FROM_BYTES = 1 << 30
FLOAT_BYTES = 4
LABEL_BYTES = 8


def parquet_files(value: Any, *, key: str) -> list[str]:
    """Return the files of a path, a folder (its `*.parquet`, sorted by name) or a list of either."""
    return [file for path in as_paths(value, key=key) for file in _files_of(path, key=key)]


def _files_of(path: str, *, key: str) -> list[str]:
    folder = path
    if "://" not in path:
        folder = os.path.expanduser(path)
        names = os.listdir(folder) if os.path.isdir(folder) else None
    else:
        from pyarrow import fs

        filesystem, inner = locate(path, key=key)
        is_folder = filesystem.get_file_info(inner).type == fs.FileType.Directory
        entries = filesystem.get_file_info(fs.FileSelector(inner)) if is_folder else []
        names = [entry.base_name for entry in entries] if is_folder else None
    if names is None:
        return [path]
    files = [join(folder, name) for name in sorted(names) if re.fullmatch(r"[^_.].*\.parquet", name)]
    if not files:
        raise InputError(key, got=f"no *.parquet in {path}", expected="a folder with Parquet files")
    return files


@dataclass(frozen=True)
class ParquetSizes:
    """Sizes of Parquet files; `row_bytes` is the size of a row in memory."""

    rows: int
    row_bytes: int
    by_groups: bool
    choice: ColumnChoice
    schema: Any


def sizes_of(files: Sequence[str], keys: Mapping[str, Any], *, key: str) -> ParquetSizes:
    """Compute the sizes from metadata alone; they and the key `order` decide whether row groups are shuffled."""
    schema, rows, sizes = parquet_sizes(files, key=key)
    choice = choose_columns(schema, features=keys["features"], label=keys["label"], key=key)
    stored = FLOAT_BYTES * len(choice.stacked) + (LABEL_BYTES if choice.label else 0)
    row_bytes = int(stored + sum(sizes.get(name, LABEL_BYTES) for name in choice.named))
    order = keys.get("order") or "auto"
    by_groups = order == "groups" or (order == "auto" and rows * row_bytes > GROUPS_FROM_BYTES)
    return ParquetSizes(rows, row_bytes, by_groups, choice, schema)


def open_groups(files: Sequence[str], eval_files: Sequence[str], keys: Mapping[str, Any], *, fraction: float) -> Source:
    """Open a source whose rows are read by row groups (`raytrain.data.sources.row_groups`)."""
    from raytrain.data.sources.row_groups import GroupSplit, held_out

    sizes = sizes_of(files, keys, key="data.path")
    label = sizes.choice.label
    every = [*files, *eval_files]
    kind = None if label is None else sizes.schema.field(label).type
    names: tuple[str, ...] | None = None
    if label is not None and column_kind(kind) != "number":
        if not is_text(kind):
            raise no_label(label, kind)
        found = {name for path in every for name in class_names([read_column(path, label)], label) or ()}
        names = tuple(sorted(found)) or None
    low, high = (0, 0) if names or label is None else _bounds(every, label, sizes.schema)
    known = {
        "classes": names, "row_bytes": sizes.row_bytes,
        "weighs_rows": "labels" not in sizes.choice.named and low >= 0,
    }  # fmt: skip
    pieces = pieces_of(files)
    train, held = (pieces, pieces_of(eval_files)) if eval_files else held_out(pieces, fraction)
    splits = [GroupSplit(part, sizes.choice, **known) for part in (train, held) if part]
    evaluation = splits[1] if len(splits) > 1 else None
    count = 0 if evaluation is None else len(evaluation)
    reason = f"parquet: {len(splits[0]):,} rows to train on, {count:,} for evaluation, by {len(train)} row groups"
    whole_numbers = label is not None and not is_fraction(kind)
    classes = len(names) if names else high + 1 if whole_numbers and high >= 0 else None
    return Source(
        train=splits[0],
        eval=evaluation,
        facts=replace(facts_of(splits[0], evaluation, reason=reason), kind="groups"),
        describe=reason,
        classes=classes,
        class_names=names,
        reads=sizes.choice.reads(),
    )


def pieces_of(files: Sequence[str]) -> list[Any]:
    """Return every non-empty row group of these files, in order."""
    from raytrain.data.sources.row_groups import Piece

    found = []
    for path in files:
        meta = open_parquet(path, key="data.path").metadata
        counts = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
        found += [Piece(path, group, 0, rows) for group, rows in enumerate(counts) if rows]
    return found


def read_column(path: str, name: str) -> Any:
    """Read one column of a file as a pyarrow Table; a Table without columns if the file has none of that name."""
    file = open_parquet(path, key="data.path")
    return file.read(columns=[name] if name in file.schema_arrow.names else [])


def _bounds(files: Sequence[str], label: str, schema: Any) -> tuple[int, int]:
    """Return the smallest and largest integer label, from the files' statistics where available.
    Raises InputError if a label is missing."""
    if is_fraction(schema.field(label).type):
        return 0, -1
    low, high = 0, IGNORED_LABEL
    for path in files:
        file = open_parquet(path, key="data.path")
        at = [file.metadata.schema.column(n).path for n in range(file.metadata.num_columns)].index(label)
        for group in range(file.metadata.num_row_groups):
            stats = file.metadata.row_group(group).column(at).statistics
            if stats is None or not stats.has_min_max or stats.null_count:
                column = file.read_row_group(group, columns=[label])[label]
                check_present(column, label, key=f"data.path, row group {group} of {path}")
                values = column.to_numpy()
                smallest, largest = int(values.min()), int(values.max())
            else:
                smallest, largest = int(stats.min), int(stats.max)
            low, high = min(low, smallest), max(high, largest)
    return low, high
