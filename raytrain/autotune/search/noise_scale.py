"""The gradient noise scale: how many rows a step can use before more of them teach little more. Pure, without torch.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), section 2.2 and appendix A.1:
the expected squared norm of the mean gradient of B rows is |G|^2 + tr(S) / B, so that two batch sizes give |G|^2 and
tr(S), and B_simple = tr(S) / |G|^2. A batch of B rows makes B / (B + B_simple) of the progress that B rows one by
one would make. Qiao et al. 2021, "Pollux" (arXiv:2008.12260): goodput = throughput x that efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.9


@dataclass(frozen=True)
class NormPair:
    """Squared gradient norms of one draw of rows: of a few of them, and of all; each of the mean gradient."""

    small_rows: int
    big_rows: int
    small_squares: float
    big_squares: float


@dataclass(frozen=True)
class NoiseScale:
    """B_simple in rows, with the interval at `LEVEL` of a bootstrap over the draws.

    Attributes:
        rows: infinite if the mean gradient cannot be distinguished from zero.
        low, high: of the interval; `high` is infinite where some resamples say so.
        draws: how many it was estimated from.
    """

    rows: float
    low: float
    high: float
    draws: int

    def efficiency(self, batch: float, *, reference: float) -> float:
        """The efficiency of a row in a batch, relative to a row in the reference batch."""
        return efficiency(self.rows, batch, reference=reference)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; an infinite number as None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def efficiency(noise_rows: float, batch: float, *, reference: float) -> float:
    """(noise + reference) / (noise + batch); 1 where the noise is infinite, since then no row is wasted."""
    return 1.0 if math.isinf(noise_rows) else (noise_rows + reference) / (noise_rows + batch)


def noise_scale(pairs: Sequence[NormPair], *, seed: int = 0) -> NoiseScale:
    """Estimate from several draws: both parts are averaged over them before they are divided, which a mean of ratios
    would bias.

    Raises:
        ValueError: no draw, or one whose two sizes are equal.
    """
    if not pairs or any(pair.big_rows <= pair.small_rows for pair in pairs):
        raise ValueError("the noise scale needs draws with two sizes of batch each")
    parts = np.array([_parts(pair) for pair in pairs])  # (draws, 2)
    picks = np.random.default_rng(seed).integers(len(parts), size=(RESAMPLES, len(parts)))
    spread = np.sort([_ratio(trace, square) for trace, square in parts[picks].mean(axis=1)])
    low, high = (spread[round(part * (RESAMPLES - 1))] for part in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return NoiseScale(_ratio(*parts.mean(axis=0)), float(low), float(high), len(pairs))


def _parts(pair: NormPair) -> tuple[float, float]:
    """Unbiased (tr(S), |G|^2) of one draw; either may come out below zero."""
    trace = (pair.small_squares - pair.big_squares) / (1 / pair.small_rows - 1 / pair.big_rows)
    square = (pair.big_rows * pair.big_squares - pair.small_rows * pair.small_squares) / (
        pair.big_rows - pair.small_rows
    )
    return trace, square


def _ratio(trace: float, square: float) -> float:
    return math.inf if square <= 0 else max(0.0, float(trace) / float(square))


def goodput_advice(scale: NoiseScale, *, global_batch: int) -> str:
    """One line of advice about the global batch, from the noise scale.

    It holds for the current point of the training: the scale usually grows as the loss falls.
    """
    if math.isinf(scale.rows):
        return "gradient noise scale: too large to tell from these draws; a larger global batch would not waste rows"
    band = f"{scale.low:.3g} to {scale.high:.3g}" if math.isfinite(scale.high) else f"{scale.low:.3g} or more"
    worth = scale.efficiency(2 * global_batch, reference=global_batch)
    advice = f"at twice the global batch of {global_batch} a row is worth {worth:.0%} of what it is now"
    if scale.high < global_batch:
        advice += "; a smaller one would learn as much from fewer rows"
    elif scale.low > global_batch:
        advice += "; a larger one is hardly less efficient"
    return f"gradient noise scale about {scale.rows:.3g} rows here ({band}): {advice}"
