"""Chooses the shares of a global batch from the measured speed of every worker, so that the slowest finishes as early
as possible. Pure, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.plan.choice import Resolved
from raytrain.plan.shares import Shares, gain_over_equal

WORTHWHILE = 0.05
"""Shares that save less than this fraction of a step stay equal: they would follow noise."""

SIZE_GAIN = 0.03
"""A larger micro-batch must give this fraction more rows per second, or the smaller one is kept."""


@dataclass(frozen=True)
class WorkerSpeed:
    """One worker's seconds for a pass of each size; infinite where it did not fit. `kind` names its device."""

    kind: str
    pass_s: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, for the record; null for a size that did not fit."""
        fitting = {str(size): seconds if seconds < float("inf") else None for size, seconds in self.pass_s.items()}
        return {"kind": self.kind, "pass_s": fitting}


def choose_shares(paces: Sequence[WorkerSpeed], *, total: int, micro_batch: int) -> Resolved:
    """The shares of a global batch of `total` rows for workers of these speeds, in the order of the ranks.

    Each kind of device has one size of pass: `micro_batch`, or a larger one that fits on all its workers and is
    faster.

    Returns:
        `Shares.to_json()`, or "equal" where unequal shares would save less than `WORTHWHILE`.
    """
    sizes = {kind: _best_size([p for p in paces if p.kind == kind], micro_batch) for kind in {p.kind for p in paces}}
    rows = tuple(sizes[pace.kind] for pace in paces)
    chosen = Shares(micro_batch, rows, tuple(pace.pass_s[size] for pace, size in zip(paces, rows, strict=True)))
    gain = gain_over_equal(chosen, total=total, plain_s=[pace.pass_s[micro_batch] for pace in paces])
    ratio = max(chosen.row_s) / min(chosen.row_s)
    ratio_text = f"the slowest worker needs {ratio:.2f} times as long for a row as the fastest"
    if gain < 1 + WORTHWHILE:
        return Resolved(
            "equal", f"{ratio_text}: unequal shares of {total} rows would save {max(0.0, 1 - 1 / gain):.0%}"
        )
    return Resolved(chosen.to_json(), f"{ratio_text}; {shown(chosen, total)}: {gain:.2f} times as fast as equal shares")


def _best_size(paces: Sequence[WorkerSpeed], micro_batch: int) -> int:
    """The smallest size within `SIZE_GAIN` of the most rows per second, of those that fit on all of them."""
    slowest = {size: max(pace.pass_s[size] for pace in paces) for size in paces[0].pass_s}
    rates = {size: size / seconds for size, seconds in slowest.items() if seconds < float("inf")}
    good = [size for size, rate in rates.items() if rate * (1 + SIZE_GAIN) >= max(rates.values())]
    return min(good, default=micro_batch)


def shown(shares: Shares, total: int) -> str:
    """Rows and passes of the ranks, equal neighbours together: "ranks 0-3: 48 rows in 6 passes, rank 4: 8 rows in 2".

    Args:
        total: rows of the window.
    """
    groups: list[tuple[int, int, str]] = []
    for rank in range(len(shares.rows)):
        passes = shares.passes(total, rank=rank, micro_batch=shares.micro_batch)
        text = f"{sum(map(len, passes))} rows in {len(passes)}"
        if groups and groups[-1][2] == text:
            groups[-1] = (groups[-1][0], rank, text)
        else:
            groups.append((rank, rank, text))
    named = [(f"rank {first}" if first == last else f"ranks {first}-{last}", text) for first, last, text in groups]
    return ", ".join(f"{name}: {text}{'' if n else ' passes'}" for n, (name, text) in enumerate(named))
