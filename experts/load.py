"""What the routers did: counts over layers, imbalance, drops. Device tensors; read at log intervals only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.router import TopKRouter
from raytrain.trainable import GlobalStep


def imbalance(counts_LE: Tensor) -> Tensor:
    """Busiest expert over the mean, per layer (L,), float64; 1 where nothing was routed."""
    counts = counts_LE.double()
    mean = counts.mean(-1)
    return torch.where(mean > 0, counts.amax(-1) / mean.clamp(min=1e-300), torch.ones_like(mean))


class LoadBook:
    """Keeps the global counts of the routers of a model, layer by layer.

    Args:
        routers: one per layer, in the order of the layers.
        decay: of the moving average over steps.

    One vector holds a step: for each layer its E counts, then its drops.
    """

    def __init__(self, routers: Sequence[TopKRouter], *, decay: float = 0.9) -> None:
        self.routers, self.decay = list(routers), decay
        self.sizes = [router.num_experts + 1 for router in self.routers]
        self.last: list[Tensor] = []
        """Per layer the counts of the last committed step, (E + 1,) float64."""
        self.average: list[Tensor] = []
        """Per layer their moving average, the first step taken whole."""

    def pending(self) -> Tensor:
        """This rank's counts since the last commit: (sum of E + 1 over layers,) int64, a copy."""
        return torch.cat([router.pending_counts for router in self.routers])

    @torch.no_grad()
    def commit(self, agreed: GlobalStep) -> None:
        """End a step in every router, with the counts of all ranks (None = the step was dropped)."""
        counts, skipped = agreed.counts, agreed.skip
        parts = [None] * len(self.sizes) if counts is None else counts.split(self.sizes)
        for router, part in zip(self.routers, parts, strict=True):
            router.commit(part, skipped=skipped)
        if counts is None:
            return
        new = [part.double() for part in counts.split(self.sizes)]
        if self.last:  # a skipped step is not counted; which it was stays on the device
            stays = torch.as_tensor(skipped, device=counts.device)
            new = [torch.where(stays, old, part) for old, part in zip(self.last, new, strict=True)]
        old = self.average or new
        self.average = [self.decay * a + (1 - self.decay) * n for a, n in zip(old, new, strict=True)]
        self.last = new

    def metrics(self) -> dict[str, Tensor]:
        """Of the last committed step: `load_imbalance` (mean over layers) and `dropped_fraction`."""
        if not self.last:
            return {}
        peaks = torch.cat([imbalance(part[:-1].unsqueeze(0)) for part in self.last])
        dropped = torch.stack([part[-1] for part in self.last]).sum()
        routed = torch.stack([part[:-1].sum() for part in self.last]).sum()
        return {"load_imbalance": peaks.mean(), "dropped_fraction": dropped / routed.clamp(min=1)}
