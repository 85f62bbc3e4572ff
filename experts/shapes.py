"""Shapes of a layer's experts and of their weights, and the key that names one expert. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Activation = Literal["gelu", "swiglu", "relu"]

Key = tuple[int, int]
"""(layer, logical expert)."""


def weight_shapes(
    width: int, hidden: int, *, activation: Activation | str, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of one expert by name, in the order in which they are packed.

    w1 (F, D) is the input projection, w2 (D, F) the output projection; swiglu multiplies by a third one, w3 (F, D).
    With `bias` each adds a vector: b1 (F,), b2 (D,), b3 (F,).
    """
    shapes: dict[str, tuple[int, ...]] = {"w1": (hidden, width), "w2": (width, hidden)}
    if activation == "swiglu":
        shapes["w3"] = (hidden, width)
    if bias:
        shapes |= {f"b{name[1]}": shape[:1] for name, shape in list(shapes.items())}
    return shapes


@dataclass(frozen=True)
class LayerShape:
    """Sizes and kind of the experts of one layer.

    Attributes:
        hidden_E: the hidden width of each.
        frozen_E: the weights of each that are not trained, by name; empty if all are.
        name: of the layer in the model, for messages.
    """

    width: int
    hidden_E: tuple[int, ...]
    activation: Activation
    bias: bool = False
    frozen_E: tuple[tuple[str, ...], ...] = ()
    name: str = ""

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.hidden_E)

    @property
    def kind(self) -> dict[str, Any]:
        """Keyword arguments of `build_experts` that all experts share."""
        return {"activation": self.activation, "bias": self.bias}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> LayerShape:
        """The inverse of `to_json`."""
        frozen = tuple(map(tuple, row.get("frozen_E", ())))
        return cls(**{**row, "hidden_E": tuple(row["hidden_E"]), "frozen_E": frozen})

    def weights(self, expert: int) -> dict[str, tuple[int, ...]]:
        """`weight_shapes` of one expert."""
        return weight_shapes(self.width, self.hidden_E[expert], **self.kind)

    def trained(self, expert: int) -> dict[str, tuple[int, ...]]:
        """`weights` without the frozen ones."""
        frozen = self.frozen_E[expert] if self.frozen_E else ()
        return {name: shape for name, shape in self.weights(expert).items() if name not in frozen}

    def numel(self, expert: int) -> int:
        """Number of parameters of one expert."""
        return sum(math.prod(shape) for shape in self.weights(expert).values())


def row_work(parameters: int) -> float:
    """FLOPs of one row of an expert with this number of parameters, forward and backward."""
    return 6.0 * parameters
