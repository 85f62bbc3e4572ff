"""Rows of different lengths, stored concatenated, and padded and masked in the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raytrain.data.rows.contract import IGNORED_LABEL, Batch, RowSplit
from raytrain.data.rows.residency import Column, PartialTensor, full_tensor, placed_column, take
from raytrain.data.rows.splits import TensorSplit, is_integer

MASK = "attention_mask"


@dataclass(frozen=True)
class Ragged:
    """One column: `values` (sum of lengths, ...) and `offsets` (rows + 1, int64, always on the host)."""

    values: Column
    offsets: np.ndarray

    def select(self, rows: np.ndarray) -> Ragged:
        """Copy these rows into a new column."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(take(self.values, index), offsets)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Ragged:
        """Move all values to `device`, or those of the first `rows` rows; returns self if they are already there."""
        border = None if rows is None else int(self.offsets[min(rows, len(self.offsets) - 1)])
        values = placed_column(self.values, device, rows=border)
        return self if values is self.values else Ragged(values, self.offsets)


def fill_value(name: str, values: Column) -> int | float:
    """Return the padding value of a column: -100, which losses ignore, for integer `labels`, otherwise 0."""
    return IGNORED_LABEL if name == "labels" and is_integer(values) else 0


def mask_column(names: list[str]) -> str:
    """Return the column that the mask describes: `input_ids`, else the first column other than labels."""
    if "input_ids" in names:
        return "input_ids"
    return next((name for name in names if name != "labels"), names[0])


def columns_split(
    dense: Mapping[str, torch.Tensor], ragged: Mapping[str, Ragged], *, tokens_per_row: int | None = None,
    fills: Mapping[str, int] | None = None,
) -> TensorSplit | RaggedSplit:  # fmt: skip
    """The split of these columns, of which there is at least one; see `TensorSplit` and `RaggedSplit`."""
    split = TensorSplit(dense, tokens_per_row=tokens_per_row) if dense else None
    if ragged:
        return RaggedSplit(ragged, dense=split, fills=fills)
    assert split is not None, "there is at least one column"
    return split


class RaggedSplit(RowSplit):
    """Columns with rows of different lengths, together with columns of fixed shape.

    A batch pads each ragged column to its longest row in that batch (see `fill_value`) and holds
    `attention_mask` (B, L) int64, 1 for tokens and 0 for padding, unless a column already has that name (`adds_mask`).

    Args:
        ragged: the columns of different lengths.
        dense: the other columns, if any.
        mask: the columns that the mask may describe; None = all ragged ones. If there is none, only batches that
            contain padding have a mask, of a padded column.
        counts: labels other than -100 per row, if already known (`counted`); otherwise counted here.
        fills: padding values by column, instead of `fill_value`.
    """

    def __init__(
        self,
        ragged: Mapping[str, Ragged],
        *,
        dense: TensorSplit | None = None,
        mask: Collection[str] | None = None,
        counts: np.ndarray | None = None,
        counted: bool = False,
        fills: Mapping[str, int] | None = None,
    ) -> None:
        self.fills = dict(fills or {})
        self.ragged = dict(ragged)
        self.dense = dense
        self.mask = tuple(self.ragged if mask is None else mask)
        first = next(iter(self.ragged.values()))
        self.device = first.values.device
        self._rows = len(first.offsets) - 1
        self.counts = counts if counted else self._count()
        self.adds_mask = MASK not in self.ragged and (dense is None or MASK not in dense.columns)

    def _count(self) -> np.ndarray | None:
        labels = self.ragged.get("labels")
        if labels is None or not is_integer(labels.values):
            return None if self.dense is None else self.dense.counts
        values = full_tensor(labels.values)
        kept = (values != IGNORED_LABEL).reshape(values.shape[0], -1).sum(1).numpy()
        before = np.concatenate([[0], np.cumsum(kept)])
        return before[labels.offsets[1:]] - before[labels.offsets[:-1]]

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all columns as stored, without the offsets, which stay on the host."""
        own = sum(column.values.numel() * column.values.element_size() for column in self.ragged.values())
        return own + (0 if self.dense is None else self.dense.nbytes)

    def gather(self, indices: np.ndarray) -> Batch:
        batch = {} if self.dense is None else self.dense.gather(indices)
        padded, masks = [], {}
        for name, column in self.ragged.items():
            starts = column.offsets[indices]
            lengths = column.offsets[indices + 1] - starts
            batch[name], masks[name] = pad_rows(
                column.values, starts, lengths, fill=self.fills.get(name, fill_value(name, column.values))
            )
            if len(lengths) and lengths.min() < lengths.max():
                padded.append(name)
        shown = [name for name in self.ragged if name in self.mask] or padded
        if self.adds_mask and shown:
            batch[MASK] = masks[mask_column(shown)].to(torch.int64)
        labels = batch.get("labels")
        if labels is not None and is_integer(labels):
            batch["labels"] = labels.to(torch.int64)
        return batch

    def weights(self, indices: np.ndarray) -> int:
        return len(indices) if self.counts is None else int(self.counts[indices].sum())

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of each row, in the column that the mask describes."""
        offsets = self.ragged[mask_column(list(self.ragged))].offsets
        return offsets[indices + 1] - offsets[indices]

    def select(self, rows: np.ndarray) -> RaggedSplit:
        return RaggedSplit(
            {name: column.select(rows) for name, column in self.ragged.items()},
            dense=None if self.dense is None else self.dense.select(rows),
            mask=self.mask,
            counts=None if self.counts is None else self.counts[rows],
            counted=True,
            fills=self.fills,
        )

    def to(self, device: torch.device | str, *, rows: int | None = None) -> RaggedSplit:
        """Returns self if all values are there already."""
        moved = {name: column.to(device, rows=rows) for name, column in self.ragged.items()}
        dense = None if self.dense is None else self.dense.to(device, rows=rows)
        if dense is self.dense and all(moved[name] is column for name, column in self.ragged.items()):
            return self
        return RaggedSplit(moved, dense=dense, mask=self.mask, counts=self.counts, counted=True, fills=self.fills)


def pad_rows(values: Column, starts: np.ndarray, lengths: np.ndarray, *, fill: int | float) -> tuple[Tensor, Tensor]:
    """Return rows of `values` (N, ...) as (B, L, ...), padded with `fill`, and the mask of real values, (B, L) bool.

    L is computed on the host, so nothing is read back from the device.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    if isinstance(values, PartialTensor):  # the host looks up which part holds a value
        inside_host = np.arange(longest) < lengths[:, None]
        picked = values.take(np.where(inside_host, starts[:, None] + np.arange(longest), 0))
        inside = torch.from_numpy(inside_host).to(values.device, non_blocking=True)
        return _filled(picked, inside, fill=fill), inside
    bounds = torch.from_numpy(np.stack([starts, lengths])).to(values.device, non_blocking=True)
    steps = torch.arange(longest, device=values.device)
    inside = steps < bounds[1, :, None]
    index = torch.where(inside, bounds[0, :, None] + steps, 0)
    return _filled(values[index], inside, fill=fill), inside


def _filled(rows: Tensor, inside: Tensor, *, fill: int | float) -> Tensor:
    """Set `rows` (B, L, ...) to `fill` where `inside` (B, L) is False, in place if their dtype can hold it."""
    outside = ~inside.reshape(inside.shape + (1,) * (rows.ndim - inside.ndim))
    narrow_labels = fill < 0 and rows.dtype in (torch.bool, torch.uint8)
    return (rows.to(torch.int64) if narrow_labels else rows).masked_fill_(outside, fill)
