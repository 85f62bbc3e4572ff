"""The longest row of a split: the length that a micro-batch is padded to at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from raytrain.data.rows.collate import leaves, tensor_bytes
from raytrain.data.rows.contract import Split, SplitView
from raytrain.data.rows.map_style import DatasetSplit, generators_kept, spread_rows
from raytrain.data.rows.ragged import RaggedSplit

#: Items of a user's dataset that are read to find the longest, spread evenly.
SAMPLED_ITEMS = 256


class LongestRow(NamedTuple):
    """Index and size of a row: elements of its ragged columns, or bytes of an item of a dataset."""

    row: int
    size: int


def longest_row(split: Split) -> LongestRow | None:
    """The longest row; None if all have the same length. The random generators are restored after reading items."""
    while isinstance(split, SplitView):
        split = split.split
    if isinstance(split, RaggedSplit):
        lengths = np.stack([np.diff(column.offsets) for column in split.ragged.values()]).sum(0)
        index = int(lengths.argmax())
        return LongestRow(index, int(lengths[index]))
    if isinstance(split, DatasetSplit):
        indices = spread_rows(len(split), SAMPLED_ITEMS)
        with generators_kept():
            sizes = [_size(leaves(row)) for row in split.read(indices)]
        at = int(np.argmax(sizes))
        return LongestRow(int(indices[at]), sizes[at]) if min(sizes) < max(sizes) else None
    return None


def _size(row: Any) -> int:
    """Bytes of a row's tensors, and characters of its strings, of which a `collate` function may make tokens."""
    if isinstance(row, (str, bytes)):
        return len(row)
    if isinstance(row, (Mapping, list, tuple)):
        return sum(map(_size, row.values() if isinstance(row, Mapping) else row))
    return tensor_bytes(row)
