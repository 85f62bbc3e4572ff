"""Statistics of the routers: counts of each layer, imbalance, drops, last use. Device tensors, read at logged rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from experts.routing.router import TopKRouter
from experts.routing.trace import RoutingTrace
from raytrain.trainable import GlobalStep


def imbalance(counts_LE: Tensor) -> Tensor:
    """Busiest expert over the mean of each layer, (L,) float64; 1 where nothing was routed."""
    counts = counts_LE.double()
    mean = counts.mean(-1)
    return torch.where(mean > 0, counts.amax(-1) / mean.clamp(min=1e-300), torch.ones_like(mean))


class LoadTracker:
    """Keeps the global counts of the routers of a model, layer by layer.

    Args:
        routers: one per layer, in the order of the layers.
        decay: of the moving average over steps.
        trace: notified of the end of each step, or None.

    One vector holds a step: for each layer its E counts, then its drops. The counts of the log interval in progress are
    part of a checkpoint (`state_dict`), so that a resumed run counts every step exactly once.
    """

    def __init__(self, routers: Sequence[TopKRouter], *, decay: float = 0.9, trace: RoutingTrace | None = None) -> None:
        self.routers, self.decay, self.trace = list(routers), decay, trace
        self.sizes = [router.num_experts + 1 for router in self.routers]
        self.last: list[Tensor] = []
        """Per layer the counts of the last committed step, (E + 1,) float64."""
        self.average: list[Tensor] = []
        """Per layer their moving average, which starts with the counts of the first step."""
        total = sum(self.sizes)
        self.step = self.window_steps = 0
        """Committed steps, skipped ones included; and their number since the last logged row."""
        self.window = torch.zeros(total, dtype=torch.float64)
        """Sum of the counts since the last logged row."""
        self.used = torch.zeros(total, dtype=torch.float64)
        """The last step in which each count was not zero; 0 = never."""

    def pending(self) -> Tensor:
        """Copy this rank's counts since the last commit: (sum of E + 1 over layers,) int64."""
        return torch.cat([router.pending_counts for router in self.routers])

    @torch.no_grad()
    def commit(self, agreed: GlobalStep) -> None:
        """End a step in every router, with the counts of all ranks (None = the step was dropped)."""
        counts, skipped = agreed.counts, agreed.skip
        self.step, self.window_steps = self.step + 1, self.window_steps + 1
        if self.trace is not None:
            self.trace.end_step(self.step)
        parts = [None] * len(self.sizes) if counts is None else counts.split(self.sizes)
        for router, part in zip(self.routers, parts, strict=True):
            router.commit(part, skipped=skipped)
        if counts is None:
            return
        self._add(counts, skipped)
        new = [part.double() for part in counts.split(self.sizes)]
        if self.last:  # a skipped step does not count; whether it is one stays on the device
            stays = torch.as_tensor(skipped, device=counts.device)
            new = [torch.where(stays, old, part) for old, part in zip(self.last, new, strict=True)]
        old = self.average or new
        self.average = [self.decay * a + (1 - self.decay) * n for a, n in zip(old, new, strict=True)]
        self.last = new

    def _add(self, counts: Tensor, skipped: Tensor) -> None:
        done = counts.double() * ~torch.as_tensor(skipped, device=counts.device)
        self.window = self.window.to(done.device) + done
        self.used = torch.where(done > 0, float(self.step), self.used.to(done.device))

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        steps = torch.tensor([self.step, self.window_steps], dtype=torch.int64)
        return {"steps": steps, "window": self.window, "used": self.used}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        self.step, self.window_steps = (int(number) for number in state["steps"])
        self.window, self.used = state["window"].clone(), state["used"].clone()

    def metrics(self) -> dict[str, Tensor]:
        """Of the last committed step: `load_imbalance` (mean over layers) and `dropped_fraction`."""
        if not self.last:
            return {}
        peaks = torch.cat([imbalance(part[:-1].unsqueeze(0)) for part in self.last])
        dropped = torch.stack([part[-1] for part in self.last]).sum()
        routed = torch.stack([part[:-1].sum() for part in self.last]).sum()
        return {"load_imbalance": peaks.mean(), "dropped_fraction": dropped / routed.clamp(min=1)}
