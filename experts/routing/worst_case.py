"""The routing that takes the most memory, for passes that are only measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from experts.exchange.dispatch import PooledExperts
from experts.layer import MoELayer


@contextlib.contextmanager
def worst_case(module: nn.Module) -> Iterator[None]:
    """Inside, every token goes to the widest experts, whose intermediate values are then the largest there can be; or,
    where an expert has room for a part only, to all in turn, so that nothing is dropped.

    Layers whose experts live elsewhere route as always: what arrives there is no memory of this process.
    """
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    for layer in layers:
        if not isinstance(layer.experts, PooledExperts):
            widths = getattr(layer.experts, "hidden_E", (0,) * layer.router.num_experts)
            layer.router.forced = sorted(range(len(widths)), key=lambda e, widths=widths: -widths[e])
    try:
        yield
    finally:
        for layer in layers:
            layer.router.forced = None
