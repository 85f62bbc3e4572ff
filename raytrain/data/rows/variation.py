"""What reading some items of a map-style dataset shows: how long it takes, and whether a second reading differs, as
with random transforms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raytrain.data.rows.collate import leaves
from raytrain.data.rows.contract import Split
from raytrain.data.rows.map_style import DatasetSplit, generators_kept, spread_rows
from raytrain.data.transfer import tensors_of
from raytrain.plan.facts import DataFacts

#: So many items are read, each so many times. A transform that changes one reading of ten goes unnoticed in one dataset
#: of 800.
SAMPLED_ITEMS, READINGS = 8, 8
#: After this long no further item is read, once one was read twice.
LIMIT_S = 0.5


def observed_facts(facts: DataFacts, train: Split) -> DataFacts:
    """The facts with `varies` and `item_s` of a map-style dataset; those of other data are unchanged.

    The random generators of this process are restored. An error of the dataset is left to those who read all items.
    """
    if facts.kind != "items" or not isinstance(train, DatasetSplit) or not len(train):
        return facts
    began, reads, varies = time.perf_counter(), 0, False
    with generators_kept():
        try:
            for first, again in _pairs(train):
                reads += 1
                varies = not _same(first, again)
                if varies or (reads > 1 and time.perf_counter() - began > LIMIT_S):
                    break
        except Exception:  # whatever the code of the user raises
            return facts
    return replace(facts, varies=varies, item_s=(time.perf_counter() - began) / reads)


def _pairs(split: DatasetSplit) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """For every reading of an item: its first reading, and this one."""
    for index in spread_rows(len(split), SAMPLED_ITEMS):
        first = _tensors(split, index)
        yield first, first
        for _ in range(READINGS - 1):
            yield first, _tensors(split, index)


def _tensors(split: DatasetSplit, index: np.int64) -> list[Tensor]:
    return [tensor.clone() for _, tensor in tensors_of(leaves(split.read(np.array([index]))[0]), "")]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in zip(left, right, strict=True)
    )
