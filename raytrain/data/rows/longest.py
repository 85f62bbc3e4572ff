"""The longest row of a split: what a micro-batch is padded to at worst."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raytrain.data.rows.collate import tensor_bytes
from raytrain.data.rows.contract import Split
from raytrain.data.rows.map_style import DatasetSplit, PartialDataset, generators_kept
from raytrain.data.rows.ragged import RaggedSplit
from raytrain.data.rows.residency import ReorderedSplit, StreamSplit

#: Items of a user's dataset are asked for one by one: so many of them, spread evenly, are looked at.
LOOKED_AT = 256


class LongestRow(NamedTuple):
    """Its index, and its size: elements of its ragged columns, or bytes of an item of a dataset."""

    index: int
    size: int


def longest_row(split: Split) -> LongestRow | None:
    """The longest row, None where all are alike. Items of a user's dataset may be drawn: generators are put back."""
    if isinstance(split, (StreamSplit, PartialDataset, ReorderedSplit)):
        split = split.split
    if isinstance(split, RaggedSplit):
        lengths = np.stack([np.diff(column.offsets) for column in split.ragged.values()]).sum(0)
        index = int(lengths.argmax())
        return LongestRow(index, int(lengths[index]))
    if isinstance(split, DatasetSplit):
        indices = np.unique(np.linspace(0, len(split) - 1, LOOKED_AT).astype(np.int64))
        with generators_kept():
            sizes = [tensor_bytes(row) for row in split.read(indices)]
        at = int(np.argmax(sizes))
        return LongestRow(int(indices[at]), sizes[at]) if min(sizes) < max(sizes) else None
    return None
