"""Splits stored as tensors: rows of fixed shape, windows of a long text, and rows of different lengths, padded.

Sources build them; `raytrain.data.prepare` places them, and batches are gathered from them by index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from raytrain.data.rows.contract import IGNORED_LABEL, Batch, RowSplit, Split, generator, nonfinite
from raytrain.data.rows.residency import Column, PartialTensor, full_tensor, index_for, placed_column, take
from raytrain.errors import InputError

# ---------------------------------------------------------------- splits


def is_integer(tensor: Column) -> bool:
    """Whether `tensor` has an integer or bool dtype (the rule by which `raytrain.trainable` counts labels)."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def host_tensor(values: ArrayLike | Tensor) -> Tensor:
    """Return an array, tensor or list of numbers as a CPU tensor, sharing memory if possible. Raises TypeError,
    ValueError: not numbers, or ragged."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(f"{int(np.ma.count_masked(values)):,} masked values; fill them in")
    array = np.ascontiguousarray(values) if isinstance(values, np.ndarray) else np.asarray(values)
    if not isinstance(values, np.ndarray) and array.dtype == np.float64:
        array = array.astype(np.float32)  # torch's own default for Python floats
    if array.dtype == np.uint16:
        array = array.astype(np.int32)  # torch cannot index uint16 everywhere
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise TypeError(f"values of type {array.dtype}")
    return torch.from_numpy(array if array.flags.writeable else array.copy()).reshape(np.shape(values))


def check_finite(name: str, tensor: Tensor, *, key: str, rows: np.ndarray | None = None) -> None:
    """Raise InputError, naming column and row, if a float tensor (rows, ...) holds NaN or infinity.

    `rows` are the offsets (rows + 1) if `tensor` holds the concatenated values of ragged rows.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return
    at = int((~torch.isfinite(tensor)).reshape(-1).to(torch.uint8).argmax())
    place = at // max(tensor[0].numel(), 1)
    row = place if rows is None else int(np.searchsorted(rows, place, side="right")) - 1
    raise nonfinite(key, value=float(tensor.reshape(-1)[at]), column=name, row=row)


class TensorSplit(RowSplit):
    """Columns of tensors (rows, ...) with equal row counts. Batches have the same column names.

    Integer `labels` become int64 in the batch; every other column keeps its dtype.

    Args:
        columns: the tensor of each column; not copied.
        divisors: columns stored in a compact dtype that become `float32 / divisor` in the batch.
        counts: labels other than -100 of each row (int64), if already known (`counted`); otherwise counted here, on
            the host. None if every row has weight 1: one label per row, none, or labels that are no class numbers.
        tokens_per_row: see `Split`.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        *,
        divisors: Mapping[str, float] | None = None,
        counts: np.ndarray | None = None,
        counted: bool = False,
        tokens_per_row: int | None = None,
    ) -> None:
        self.tokens_per_row = tokens_per_row
        self.columns = dict(columns)
        self.divisors = dict(divisors or {})
        self._rows = next(iter(self.columns.values())).shape[0]
        labels = self.columns.get("labels")
        self.counts = counts
        if not counted and labels is not None and is_integer(labels):
            found = (full_tensor(labels) != IGNORED_LABEL).reshape(self._rows, -1).sum(1).numpy()
            self.counts = None if bool((found == 1).all()) else found
        self.returns_views = False
        self.device = next(iter(self.columns.values())).device
        self._widen = labels is not None and is_integer(labels) and labels.dtype != torch.int64

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return sum(column.numel() * column.element_size() for column in self.columns.values())

    def gather(self, indices: np.ndarray) -> Batch:
        """See `Split`. With `returns_views`, contiguous rows are returned as views of the columns, without a copy."""
        batch: Batch = {}
        first, count = int(indices[0]), len(indices)
        neighbours = self.returns_views and not self.divisors and int(indices[-1]) - first == count - 1
        if neighbours and not (np.diff(indices) != 1).any():
            columns = self.columns.items()
            batch = {name: column.narrow(0, first, count) for name, column in columns if isinstance(column, Tensor)}
        if not batch:
            at = index_for(next(iter(self.columns.values())), indices)  # all columns are placed alike
            batch = {name: take(column, at) for name, column in self.columns.items()}
        for name, divisor in self.divisors.items():
            batch[name] = batch[name].to(torch.float32).div_(divisor)
        if self._widen:
            batch["labels"] = batch["labels"].to(torch.int64)
        return batch

    def weights(self, indices: np.ndarray) -> int:
        return len(indices) if self.counts is None else int(self.counts[indices].sum())

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Tokens of each row, the width of `input_ids`; None for rows without tokens."""
        tokens = self.columns.get("input_ids")
        return None if tokens is None or tokens.ndim < 2 else np.full(len(indices), tokens.shape[1])

    def select(self, rows: np.ndarray) -> TensorSplit:
        chosen = {name: take(column, rows) for name, column in self.columns.items()}
        return self._with(chosen, counts=None if self.counts is None else self.counts[rows])

    def _with(self, columns: Mapping[str, Column], *, counts: np.ndarray | None) -> TensorSplit:
        return TensorSplit(
            columns, divisors=self.divisors, counts=counts, counted=True, tokens_per_row=self.tokens_per_row
        )

    def to(self, device: torch.device | str, *, rows: int | None = None) -> TensorSplit:
        """Returns self if every column is there already."""
        moved = {name: placed_column(column, device, rows=rows) for name, column in self.columns.items()}
        if all(moved[name] is column for name, column in self.columns.items()):
            return self
        return self._with(moved, counts=self.counts)


class TextSplit(Split):
    """Windows of `context` (T) tokens of one text; an index is the position of the window's first token.

    Batches: `input_ids` (B, T) int64 and `labels` (B, T) int64, the next tokens; with `same_labels` the input_ids, with
    the first of each row -100, for a model that shifts them. Tokens are stored in a compact dtype and widened in the
    batch.

    Training windows of one epoch do not overlap: an offset below `context` and an order are drawn from (seed, epoch);
    every epoch has the same number of windows. Evaluation covers the text from its first token; less than one window
    remains at the end. Raises InputError, naming `key`: the text is shorter than one window plus one token."""

    def __init__(
        self, tokens: np.ndarray | Tensor, *, context: int, key: str = "data.path", same_labels: bool = False
    ) -> None:
        self.same_labels = same_labels
        if isinstance(tokens, np.ndarray):
            if tokens.dtype == np.uint16:  # to what torch can index on every device
                small = not len(tokens) or int(tokens.max()) < 2**15
                tokens = tokens.view(np.int16) if small else tokens.astype(np.int32)
            tokens = torch.from_numpy(tokens if tokens.flags.writeable else tokens.copy())
        self.tokens = tokens
        self.context = self.tokens_per_row = context
        self._length = self.tokens.shape[0]
        if self._length < context + 1:
            raise InputError(
                key,
                got=f"a text of {self._length} tokens",
                expected=f"at least {context + 1}: one window of model.context {context} and a token",
                remedy="give more text, a smaller model.context, or data.eval_fraction 0 for no evaluation",
            )
        self.device = self.tokens.device
        self._windows: Column = self.tokens.unfold(0, context, 1)

    def __len__(self) -> int:
        """Windows of one training epoch; the same for every offset."""
        return (self._length - self.context) // self.context

    @property
    def nbytes(self) -> int:
        return self._length * self.tokens.element_size()

    def order(self, seed: int, epoch: int) -> np.ndarray:
        draw = generator(seed, epoch)
        offset = int(draw.integers(self.context))
        return offset + draw.permutation(len(self)) * self.context

    def eval_order(self) -> np.ndarray:
        return np.arange((self._length - 1) // self.context) * self.context

    def gather(self, indices: np.ndarray) -> Batch:
        if self.same_labels:
            ids = take(self._windows, indices).to(torch.int64)
            labels = ids.clone()
            labels[:, 0] = IGNORED_LABEL
            return {"input_ids": ids, "labels": labels}
        at = index_for(self._windows, indices)
        return {
            "input_ids": take(self._windows, at).to(torch.int64),
            "labels": take(self._windows, at + 1).to(torch.int64),
        }

    def weights(self, indices: np.ndarray) -> int:
        return len(indices) * (self.context - self.same_labels)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.context)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> TextSplit:
        """Returns self if the tokens are there already. With `rows` the text of the first windows is moved."""
        kept = self._length if rows is None else max(rows, 1) * self.context
        whole = self.tokens if kept < self._length else self.tokens.to(device)
        if whole is self.tokens and kept >= self._length:
            return self
        split = TextSplit(whole, context=self.context, same_labels=self.same_labels)
        if kept < self._length:
            inside = kept - self.context + 1
            head, tail = self.tokens[:kept].to(device), self.tokens[inside:]  # the host holds windows across the border
            split._windows = PartialTensor(head.unfold(0, self.context, 1), tail.unfold(0, self.context, 1))
        return split


# ---------------------------------------------------------------- ragged
# Rows of different lengths, stored concatenated, and padded and masked in the batch.


MASK = "attention_mask"


@dataclass(frozen=True)
class Ragged:
    """One column: `values` (sum of lengths, ...) and `offsets` (rows + 1, int64, always on the host)."""

    values: Column
    offsets: np.ndarray

    def select(self, rows: np.ndarray) -> Ragged:
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
    """Columns with rows of different lengths, together with columns of fixed shape (`dense`).

    A batch pads each ragged column to its longest row in that batch (`fills`, else `fill_value`) and holds
    `attention_mask` (B, L) int64, 1 for tokens and 0 for padding, unless a column already has that name (`adds_mask`).
    It may describe the columns of `mask`, None for all ragged ones; if that has none, only batches that contain padding
    have a mask, of a padded column. `counts`, `counted`: see `TensorSplit`."""

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
        self.adds_mask = MASK not in self.ragged and (dense is None or MASK not in dense.columns)
        self.counts, labels = counts, self.ragged.get("labels")
        if not counted and labels is not None and is_integer(labels.values):
            values = full_tensor(labels.values)
            kept = (values != IGNORED_LABEL).reshape(values.shape[0], -1).sum(1).numpy()
            before = np.concatenate([[0], np.cumsum(kept)])
            self.counts = before[labels.offsets[1:]] - before[labels.offsets[:-1]]
        elif not counted:
            self.counts = None if dense is None else dense.counts

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
