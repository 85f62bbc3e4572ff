"""From nested items to rows and from rows to batches, by raytrain's rules or by the user's `data.collate`.

Map-style datasets and objects in memory become rows here; the loader's processes collate with the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain.config.messages import describe
from raytrain.data.rows.contract import Batch, Split, SplitView
from raytrain.data.rows.residency import StreamSplit, full_tensor, rebuild, tensors_of, with_fields
from raytrain.data.rows.splits import (
    MASK,
    Ragged,
    RaggedSplit,
    TensorSplit,
    check_finite,
    fill_value,
    host_tensor,
    is_integer,
    mask_column,
    pad_rows,
)
from raytrain.errors import InputError

# ---------------------------------------------------------------- collate


NUMBERS = (bool, int, float, np.number, np.bool_)


def as_row(item: Any, *, key: str) -> dict[str, Any]:
    """Return one item as a dict whose numeric values are CPU tensors."""
    if isinstance(item, Mapping):
        return {str(name): leaves(value) for name, value in item.items()}
    if isinstance(item, tuple) and len(item) == 2 and not hasattr(item, "_fields"):
        return {"x": leaves(item[0]), "labels": leaves(item[1])}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: leaves(getattr(item, field.name)) for field in dataclasses.fields(item)}
    value = leaves(item)
    if isinstance(value, Tensor):
        return {"x": value}
    size = f" of {len(item)}" if isinstance(item, Sequence) else ""
    raise InputError(
        key, got=f"an item that is a {type(item).__name__}{size}", expected="dicts of tensors or (x, y) pairs"
    )


def leaves(value: Any) -> Any:
    """Convert every array, number and list of numbers inside `value` to a tensor; other values are unchanged."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return host_tensor(value) if value.dtype.kind in "biufc" else value
    if isinstance(value, NUMBERS) or (isinstance(value, list) and all(isinstance(part, NUMBERS) for part in value)):
        try:  # with torch's types for numbers of Python
            return torch.tensor(value) if not isinstance(value, np.generic) else host_tensor(np.asarray(value))
        except (OverflowError, ValueError, RuntimeError, TypeError) as error:
            seen = f"{describe(value)} in an item"
            raise InputError("data.source", got=seen, expected="numbers of at most 64 bits") from error
    return rebuild(value, leaves)


def collate_rows(rows: list[dict[str, Any]], *, key: str, masked: Collection[str] = ()) -> Batch:
    """Collate rows (see `as_row`) into one batch, with `attention_mask` (B, L) of a column in `masked`.

    If there is no such column, only a batch with padding has a mask, of a padded column.
    """
    batch = collate(rows, key=key, path="")
    lengths: dict[str, list[int]] = {}
    for name in batch:
        values = [row[name] for row in rows]
        if all(isinstance(value, Tensor) and value.ndim for value in values):
            lengths[name] = [value.shape[0] for value in values]
    padded = [name for name, found in lengths.items() if min(found) < max(found)]
    shown = [name for name in lengths if name in masked] or padded
    if shown and MASK not in batch:
        column = mask_column(shown)
        found = torch.tensor(lengths[column], device=batch[column].device)
        steps = torch.arange(int(found.max()), device=found.device)
        batch[MASK] = (steps < found[:, None]).to(torch.int64)
    return batch


def collate(values: list[Any], *, key: str, path: str) -> Any:
    """Collate the values at one path of the items: tensors are stacked, containers recursed into, others listed."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _stack(values, key=key, path=path)
    if all(value is None for value in values):
        return None
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if isinstance(first, Mapping):
        for value in values:
            if value.keys() != first.keys():
                seen = f"items with the keys {sorted(first)} and {sorted(value)}{f' in {path}' if path else ''}"
                raise InputError(key, got=seen, expected="the same keys in every item")
        return {name: collate([v[name] for v in values], key=key, path=_join(path, name)) for name in first}
    if isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
        parts = [collate(list(part), key=key, path=f"{path}[{i}]") for i, part in enumerate(zip(*values, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first):
        fields = [field.name for field in dataclasses.fields(first)]
        parts = {name: [getattr(value, name) for value in values] for name in fields}
        return with_fields(first, {n: collate(part, key=key, path=_join(path, n)) for n, part in parts.items()})
    return list(values)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)


def _stack(tensors: list[Tensor], *, key: str, path: str) -> Tensor:
    name = path.rsplit(".", 1)[-1]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        stacked = torch.stack(tensors)
    elif len({shape[1:] for shape in shapes}) == 1 and all(shapes):
        lengths = np.array([tensor.shape[0] for tensor in tensors])
        values = _joined(tensors)
        starts = np.cumsum(lengths) - lengths
        stacked = pad_rows(values, starts, lengths, fill=fill_value(name, values))[0]
    else:
        seen = " and ".join(map(str, sorted(shapes)[:2]))
        raise InputError(
            key, got=f"the shapes {seen} in '{path}'", expected="shapes that differ only in their first dimension"
        )
    return stacked.to(torch.int64) if name == "labels" and is_integer(stacked) else stacked


def _joined(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors, without empty ones: the dtype of an empty Python list is meaningless."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch.cat(filled or tensors)


def tensor_split(
    rows: list[dict[str, Any]], *, key: str, masked: Collection[str] = ()
) -> TensorSplit | RaggedSplit | None:
    """Return the rows as a split of tensors, or None unless they hold only tensors of compatible shapes.

    Its batches are bitwise equal to those of `collate_rows`, with the same `masked` columns.
    """
    first = rows[0]
    if any(row.keys() != first.keys() or not all(isinstance(v, Tensor) for v in row.values()) for row in rows):
        return None
    dense, ragged = {}, {}
    for name in first:
        tensors = [row[name] for row in rows]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) == 1 and name not in masked:
            dense[name] = torch.stack(tensors)
            check_finite(name, dense[name], key=key)
        elif len({shape[1:] for shape in shapes}) == 1 and all(shapes):
            offsets = np.concatenate([[0], np.cumsum([tensor.shape[0] for tensor in tensors])])
            ragged[name] = Ragged(_joined(tensors), offsets)
            check_finite(name, full_tensor(ragged[name].values), key=key, rows=offsets)
        else:
            return None
    split = TensorSplit(dense) if dense else None
    return RaggedSplit(ragged, dense=split, mask=masked) if ragged else split


def tensor_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(value, ""))


# ---------------------------------------------------------------- users collate
# `data.collate`: batches made by the user's own function, from a list of rows to a dict of tensors.


@dataclass(frozen=True)
class UsersCollate:
    function: Callable[[list[Any]], Any]  # from a list of rows to a batch
    name: str  # for messages

    def __call__(self, rows: list[Any]) -> Batch:
        """Collate rows. Raises InputError: the function returned something other than a dict of tensors on the CPU."""
        batch = self.function(rows)
        if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
            names = f" with the keys {list(batch)}" if isinstance(batch, Mapping) else ""
            raise self._refused(f"a {type(batch).__name__}{names}")
        tensors = list(tensors_of(batch, ""))
        if not tensors:
            raise self._refused(f"the keys {', '.join(batch) or 'none'} without a tensor")
        for path, tensor in tensors:
            if tensor.device.type != "cpu":
                raise self._refused(f"{path} on {tensor.device}")
        return dict(batch)

    def _refused(self, seen: str) -> InputError:
        return InputError(
            "data.collate",
            got=f"{self.name} returned {seen}",
            expected="a dict of tensors on the CPU, with string keys",
        )


class CollatedSplit(SplitView):
    """Rows in memory that the user's function collates. `split`: the rows, on the host. `key`: what an error names."""

    def __init__(self, split: Split, collate: UsersCollate, *, key: str) -> None:
        super().__init__(split)
        self.collate = collate
        self.key = key

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Each row as a dict of tensors, not padded and without a mask; no code of the user's runs."""
        adds_mask = getattr(self.split, "adds_mask", False)
        rows = (self.split.gather(indices[at : at + 1]) for at in range(len(indices)))
        return [{name: value[0] for name, value in row.items() if not (adds_mask and name == MASK)} for row in rows]

    def batch(self, rows: list[Any]) -> Batch:
        return self.collate(rows)

    def gather(self, indices: np.ndarray) -> Batch:
        return self.batch(self.read(indices))

    def weights(self, indices: np.ndarray) -> None:
        """Not known without calling the function, which may change the labels."""

    def to(self, device: torch.device | str, *, rows: int | None = None) -> StreamSplit:
        """Rows stay on the host; each batch is moved."""
        return StreamSplit(self, device=device)
