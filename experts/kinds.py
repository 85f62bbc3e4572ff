"""What one expert is made of: its weights by name and shape; no torch here."""

from __future__ import annotations

from typing import Literal

Activation = Literal["gelu", "swiglu", "relu"]


def weight_shapes(
    width: int, hidden: int, *, activation: Activation | str, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each weight of one expert, in the order in which they travel.

    w1 (F, D) leads into the expert and w2 (D, F) out of it; with swiglu w3 (F, D) is the factor beside w1. With
    `bias` each of them adds a vector: b1 (F,), b2 (D,), b3 (F,).
    """
    shapes: dict[str, tuple[int, ...]] = {"w1": (hidden, width), "w2": (width, hidden)}
    if activation == "swiglu":
        shapes["w3"] = (hidden, width)
    if bias:
        shapes |= {f"b{name[1]}": shape[:1] for name, shape in list(shapes.items())}
    return shapes
