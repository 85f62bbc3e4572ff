"""What the experts of a layer look like, wherever they are; and how one is named. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from experts.kinds import Activation, weight_shapes

Key = tuple[int, int]
"""(layer, logical expert)."""


@dataclass(frozen=True)
class LayerShape:
    """The experts of one layer; `hidden_E` is the hidden width of each."""

    width: int
    hidden_E: tuple[int, ...]
    activation: Activation
    bias: bool = False

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.hidden_E)

    @property
    def kind(self) -> dict[str, Any]:
        """What they have in common, as `build_experts` takes it."""
        return {"activation": self.activation, "bias": self.bias}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> LayerShape:
        """The inverse of `to_json`."""
        return cls(**{**row, "hidden_E": tuple(row["hidden_E"])})

    def weights(self, expert: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight of one expert, in the order in which they travel."""
        return weight_shapes(self.width, self.hidden_E[expert], **self.kind)

    def numel(self, expert: int) -> int:
        """Parameters of one expert."""
        return sum(math.prod(shape) for shape in self.weights(expert).values())

    def row_work(self, expert: int) -> float:
        """FLOPs of one row, forward and backward."""
        return 6.0 * self.numel(expert)
