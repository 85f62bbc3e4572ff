"""Which layers must stay in fp32: the fewest of the most sensitive ones. Pure: measurements in, `Resolved` out.

The method of mixed-precision searches by sensitivity (such as HAWQ: rank the layers, then cut): the rank comes from one
layer at a time in half precision, the cut from the complete model with the most sensitive layers in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.search.precision import LOSS_TOLERANCE, NORM_BAND
from raytrain.config.messages import abbreviated
from raytrain.plan.choice import Resolved

NAMED_AT_MOST = 6


@dataclass(frozen=True)
class LayerChange:
    """What one layer in half precision, all others in fp32, does to a micro-batch.

    Attributes:
        loss: difference relative to fp32's; NaN where not finite.
        gradient: norm of the difference of the whole gradient, relative to fp32's norm.
        error: why it cannot be computed so, or None.
    """

    layer: str
    loss: float
    gradient: float
    error: str | None = None

    @property
    def score(self) -> float:
        """The change relative to the tolerance of a complete model."""
        parts = (abs(self.loss) / LOSS_TOLERANCE, self.gradient / (1 - NORM_BAND[0]))
        return math.inf if self.error or any(math.isnan(part) for part in parts) else max(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; null for what is not finite."""
        return {key: None if value != value or value == math.inf else value for key, value in asdict(self).items()}


def choose_layers(changes: Sequence[LayerChange], refusal: Callable[[list[str]], str], *, precision: str) -> Resolved:
    """The fewest of the most sensitive layers that bring the loss into the gate's band when they stay in fp32.

    Args:
        changes: of each layer alone.
        refusal: why the complete model with these layers in fp32 is outside the band, "" where it is inside.
    """
    touched = sorted((change for change in changes if change.score > 0), key=lambda change: -change.score)
    names = [change.layer for change in touched]
    first = refusal([])
    if not first:
        return Resolved([], f"all {len(names)} layers that {precision} changes are in the band in it")
    low, high, step = 0, len(names), 1
    while low + step < high and refusal(names[: low + step]):
        low, step = low + step, 2 * step
    high = min(high, low + step)
    last = refusal(names) if high == len(names) else ""
    if last:
        return Resolved(names, f"with every layer in fp32 {last}: the deviation under {precision} is not in a layer")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refusal(names[:middle]) else (low, middle)
    share = 1 - high / len(names)
    kept = abbreviated(names[:high], NAMED_AT_MOST)
    reason = f"with {kept} in fp32 the loss is in the band, {share:.0%} of {len(names)} layers in {precision}"
    return Resolved(names[:high], f"{reason}; with none {first}")
