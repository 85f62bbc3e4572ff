"""The experts of one layer as stacked weights: a loop over them, or one grouped product where it exists."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


class GroupedExperts(nn.Module):
    """E feed-forward experts of one size, without biases.

    Args:
        num_experts, width, hidden: E, D, F.
        activation: gelu: w2 gelu(w1 x); swiglu: w2 (silu(w1 x) * (w3 x)).
        residual_scale: of the initial w2, which writes into the residual stream.

    `expert_ids` name the experts for good: position e of the stacked weights is expert `expert_ids[e]`.
    Every expert's gradient exists after backward, zero where it received no token.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if min(num_experts, width, hidden) < 1:
            raise ValueError(f"{num_experts} experts of {width} x {hidden}: each must be at least 1")
        self.expert_ids = list(range(num_experts))
        self.activation = activation
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty_like(self.w1)) if activation == "swiglu" else None
        nn.init.normal_(self.w1, std=INIT_STD)
        nn.init.normal_(self.w2, std=INIT_STD * residual_scale)
        if self.w3 is not None:
            nn.init.normal_(self.w3, std=INIT_STD)

    def forward(self, x_RD: Tensor, counts_E: Tensor, splits: list[int] | None = None) -> Tensor:
        """Each row through its expert.

        Args:
            x_RD: rows sorted by expert.
            counts_E: int64, rows of each; sums to R.
            splits: `counts_E` on the host where it is already known. Without it the loop reads it, once
                per call: the one device read of a layer that DESIGN 4.11 allows. The grouped product
                reads nothing.
        Returns:
            (R, D), in the products' dtype (autocast's where it is on).
        """
        dtype = _compute_dtype(x_RD)
        if _can_group(x_RD, dtype):
            return self._grouped(x_RD.to(dtype), counts_E, dtype)
        return self._looped(x_RD, counts_E.tolist() if splits is None else splits)

    def _looped(self, x_RD: Tensor, splits: list[int]) -> Tensor:
        # without a row at all the first expert runs on none, so that every weight still gets its zeros
        runs = [e for e, n in enumerate(splits) if n] or [0]
        rows = x_RD.split(splits)
        w1, w2 = self.w1.unbind(0), self.w2.unbind(0)
        w3 = [None] * len(splits) if self.w3 is None else self.w3.unbind(0)
        return torch.cat([self._expert(rows[e], w1[e], w2[e], w3[e]) for e in runs])

    def _expert(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None) -> Tensor:
        if w3 is None:
            return F.linear(F.gelu(F.linear(x, w1)), w2)
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)

    def _grouped(self, x_RD: Tensor, counts_E: Tensor, dtype: torch.dtype) -> Tensor:
        ends = counts_E.cumsum(0).to(torch.int32)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(x, weight.to(dtype).transpose(1, 2), offs=ends)

        up = product(x_RD, self.w1)
        hidden = F.gelu(up) if self.w3 is None else F.silu(up) * product(x_RD, self.w3)
        return product(hidden, self.w2)


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _can_group(x: Tensor, dtype: torch.dtype) -> bool:
    """The grouped product exists for bf16 on CUDA, with rows that start at multiples of 16 bytes."""
    return x.device.type == "cuda" and dtype == torch.bfloat16 and len(x) > 0 and x.shape[1] % 8 == 0
