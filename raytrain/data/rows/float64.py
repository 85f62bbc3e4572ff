"""Columns of float64, which numpy and scikit-learn make, for weights of float32.

A column is converted where float32 holds it as well; where rounding would lose something, such as in seconds since
1970, it stays as it is. This depends on the rows of the training split only: it is the same on every worker and on
resume.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from raytrain.config.messages import abbreviated
from raytrain.data.rows.contract import Batch, Split
from raytrain.data.rows.map_style import SAMPLED_ROWS, gathered, spread_rows, users_rows
from raytrain.data.rows.residency import StreamSplit, rebuild, tensors_of
from raytrain.errors import first_line, message_of

MEMORY_ROWS = 4096
"""Rows that decide where reading them costs little; a dataset reads `SAMPLED_ROWS`."""
ROUNDING = 1e-5
"""Of the spread of a column: rounding errors below do not count. Degrees of 36.5 +- 0.5 are held so."""
LARGE, LARGE_ROUNDING = 2.0**24, 1e-7
"""From here on float32 does not hold every whole number. Times and ids are such numbers, with a spread far below their
size: there rounding may take no more than what it takes from numbers that begin at 0."""


class Float64Columns:
    """Which float64 columns of a source become float32; decided when the first one is seen. `split`: the training rows.
    `seed`: the job's, for what a dataset draws."""

    def __init__(self, split: Split, *, seed: int) -> None:
        self._split, self._seed = split, seed
        self._converted: frozenset[str] | None = None
        self.kept: dict[str, str] = {}  # column that stays float64 -> why; empty until it is decided

    def narrowed(self, batch: Batch) -> Batch:
        """The batch with its float64 columns as float32, where that loses nothing; the batch itself without any."""
        found = [(path, value) for path, value in tensors_of(batch, "") if value.dtype is torch.float64]
        if not found:
            return batch
        if self._converted is None:
            split = self._split.split if isinstance(self._split, StreamSplit) else self._split
            order = split.eval_order()
            rows = order[spread_rows(len(order), MEMORY_ROWS if users_rows(split) is None else SAMPLED_ROWS)]
            columns: dict[str, list[Tensor]] = {}
            for path, value in tensors_of(gathered(split, rows, seed=self._seed, epoch=0), ""):
                if value.dtype is torch.float64:
                    columns.setdefault(_column(path), []).append(value)
            lost = {name: next(filter(None, map(lost_in_float32, values)), None) for name, values in columns.items()}
            self.kept = {name: why for name, why in lost.items() if why is not None}
            self._converted = frozenset(lost) - self.kept.keys()
        new = {id(value): value.float() for path, value in found if _column(path) in self._converted}

        def replaced(value: Any) -> Any:
            return new.get(id(value), value) if isinstance(value, Tensor) else rebuild(value, replaced)

        return replaced(batch) if new else batch

    def explained(self, error: BaseException) -> str | None:
        text = message_of(error)
        if not self.kept or not re.search(r"double|float64", text, re.IGNORECASE):
            return None
        why = next(iter(self.kept.values()))
        return (
            f"the model failed on float64 next to float32 ({first_line(error)}); what stays float64: "
            f"{abbreviated(list(self.kept), 3)}, as {why}; subtract an offset from it or divide it before it becomes "
            'float32, in forward or in the data, or give the data with .astype("float32") to round it all the same'
        )


def _column(path: str) -> str:
    """The name of a tensor's column: a row's number in a list does not count."""
    return re.sub(r"\[\d+\]", "[]", path)


def lost_in_float32(values: Tensor) -> str | None:
    """Why float32 does not hold these float64 values (rows, ..., features) as well; None if it does. Each feature is
    judged by its own spread.

    Example:
        >>> import torch
        >>> from raytrain.data.rows.float64 import lost_in_float32
        >>> lost_in_float32(torch.tensor([36.6, 37.2, 36.9], dtype=torch.float64))
        >>> lost_in_float32(torch.tensor([1.7e9 + 0.25, 1.7e9 + 60], dtype=torch.float64))
        'float32 would round 1700000060.0 to 1700000000.0'
    """
    table = values.detach().reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    if not table.numel() or not bool(torch.isfinite(table).all()):
        return None  # what is not finite has an error of its own
    error = (table - table.float().double()).abs()
    rounding, largest = error.amax(0), table.abs().amax(0)
    spread = table.amax(0) - table.amin(0)
    spread = torch.where((spread == 0) & (largest < LARGE), largest, spread)
    limit = torch.where(largest < LARGE, ROUNDING, LARGE_ROUNDING)
    whole = (table == table.round()).all(0)
    wrong = (rounding > limit * spread) | (whole & (rounding > 0))
    if not bool(wrong.any()):
        return None
    feature = int(wrong.to(torch.uint8).argmax())
    value = table[int(error[:, feature].argmax()), feature]
    where = f" in feature {feature}" if table.shape[1] > 1 else ""
    return f"float32 would round {float(value)!r} to {float(value.float())!r}{where}"
