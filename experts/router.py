"""Top-k routing, its losses, counts and statistics, and how a router's counts divide rows over hosts.

Losses and counts are additive over any split of the sequences.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from experts.placement.values import LayerPlacement, Placement, split_rows
from raytrain.train.activation_checkpointing import inside_backward
from raytrain.trainable import GlobalStep

# ---------------------------------------------------------------- router

UNCERTAINTY_UNIT = 1 << 20
"""Of a token's uncertainty in the pending counts."""


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens.

    Attributes:
        indices_TK: int64, the K experts of each token, best first; distinct.
        weights_TK: float32 (float64 for float64 models), zero where the token was dropped.
        counts_E: int64, rows of each expert.
        kept_TK: bool, false where the expert was full; None if nothing can be dropped.
        aux: scalar, weighted balance loss plus z-loss, a weighted mean over the tokens; None in evaluation.
    """

    indices_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    kept_TK: Tensor | None
    aux: Tensor | None


class TopKRouter(nn.Module):
    """Scores every expert for every token and picks the best K.

    Args:
        width, num_experts, top_k: D, E, K.
        score: softmax over the experts, or a sigmoid each.
        renormalize: the K weights of a token sum to one.
        balance: "loss", the loss-free "bias", "both" or "none".
        balance_scope: "sequence" computes the balance loss of each sequence separately; "batch", for rows that form no
            sequence, uses the shares of the last committed step, so that it is additive over a split too.
        capacity_factor: an expert takes at most ceil(factor * context * K / E) tokens of a sequence, the earlier ones;
            None drops nothing. The rule is the same in training, evaluation and generation: whether a token is dropped
            depends only on the tokens before it, not on how many follow.
        context: tokens of the longest sequence, for the capacity. None = the valid tokens of each sequence, for layers
            that see complete sequences only: a prefix then has less capacity than the sequence it begins.
        noise: standard deviation of the noise added to the logits in training.
        temperature: divides the logits, in training, evaluation and generation.
        living: experts 0 to `living` - 1 are open and the others closed, until `open_E` is changed; None = all are
            open, and stay so. A closed expert is as one that does not exist: its logit is minus infinity, and losses,
            capacity and the bias are those of a router for the open ones.
        prior: keep `prior_EE`, for selection only, as the bias: [i, j] is what j gains from the score of i
            (`experts.graph_routing`).

    The bias is added for selection only and moves at a commit, from the step's global counts. State kept in
    checkpoints: `bias_E`, `shares_E` (the last committed step's), `open_E` and `prior_EE`; pending counts are not.
    """

    bias_E: Tensor
    shares_E: Tensor
    open_E: Tensor | None
    prior_EE: Tensor | None
    pending_counts: Tensor

    def __init__(
        self, width: int, num_experts: int, top_k: int, *, score: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True, balance: Literal["bias", "loss", "both", "none"] = "both",
        balance_scope: Literal["sequence", "batch"] = "sequence", balance_weight: float = 0.01,
        z_loss_weight: float = 0.001, bias_rate: float = 0.001, capacity_factor: float | None = None,
        context: int | None = None, noise: float = 0.0, temperature: float = 1.0, living: int | None = None,
        prior: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}, expected 1 to num_experts ({num_experts})")
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.renormalize = score, renormalize
        self.balance_scope, self.capacity_factor, self.context = balance_scope, capacity_factor, context
        self.balance_weight = balance_weight if balance in ("loss", "both") else 0.0
        self.bias_rate = bias_rate if balance in ("bias", "both") else 0.0
        self.z_loss_weight, self.noise, self.temperature = z_loss_weight, noise, temperature
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("bias_E", torch.zeros(num_experts))
        open_E = None if living is None else torch.arange(num_experts) < living
        first = torch.full((num_experts,), 1 / num_experts) if open_E is None else open_E / open_E.sum()
        self.register_buffer("shares_E", first)
        self.register_buffer("open_E", open_E)
        self.register_buffer("prior_EE", torch.zeros(num_experts, num_experts) if prior else None)
        # after the experts drops, and with `living` the tokens' uncertainty; int64, so that sums over ranks are exact
        # and casts leave it alone
        pending = torch.zeros(num_experts + (1 if living is None else 2), dtype=torch.int64)
        self.register_buffer("pending_counts", pending, persistent=False)
        self.forced: list[int] | None = None
        """For measurements: experts that all tokens go to, regardless of the scores: the first `top_k`, or, with a
        capacity, all in turn."""
        self.traced = False
        self.seen: tuple[Tensor, Tensor, Tensor | None] | None = None
        """If `traced`: indices_BSK, weights_BSK and valid_BS of the first training forward after a reset to None."""

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None = None, weight_BS: Tensor | None = None) -> Routing:
        """Route the tokens of B sequences.

        Args:
            x_BSD: any float dtype; scores are float32 even under autocast, float64 for float64.
            valid_BS: bool, false for padding, which takes no capacity, is not counted, and is part of no loss. None =
                all. Tokens without a label are valid: attention sees them.
            weight_BS: of each valid token in the auxiliary loss, which is a weighted mean; None = 1. Only tokens with a
                positive weight are counted.
        """
        logits_BSE = self._closed(self._logits(x_BSD))
        noisy_BSE = logits_BSE
        if self.noise and self.training:
            noisy_BSE = logits_BSE + self.noise * torch.randn_like(logits_BSE)
        scores_BSE = self._scores(noisy_BSE / self.temperature if self.temperature != 1.0 else noisy_BSE)
        wanted_BSE = scores_BSE if self.prior_EE is None else scores_BSE + scores_BSE @ self.prior_EE.to(scores_BSE)
        indices_BSK = self._closed(wanted_BSE + self.bias_E).topk(self.top_k, dim=-1).indices
        if self.forced is not None:
            S, K = indices_BSK.shape[1:]
            places = torch.arange(S * K if self.capacity_factor is not None else K, device=indices_BSK.device)
            chosen = torch.tensor(self.forced, device=indices_BSK.device)[places % len(self.forced)]
            indices_BSK = chosen.view(-1, K).expand_as(indices_BSK).contiguous()
        weights_BSK = scores_BSE.gather(-1, indices_BSK)
        if self.renormalize:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        counts_BE = self._count(indices_BSK, None)
        weight_BS = valid_BS if weight_BS is None else weight_BS
        aux = None
        if self.training:
            routed_BE = counts_BE if valid_BS is None else self._count(indices_BSK, valid_BS)
            aux = self._aux(logits_BSE, scores_BSE, routed_BE, weight_BS)
        kept_BSK = self._keep(indices_BSK, valid_BS)
        self._count_pending(indices_BSK, kept_BSK, weight_BS, scores_BSE)
        if kept_BSK is not None:
            weights_BSK = weights_BSK * kept_BSK
            counts_BE = self._count(indices_BSK, kept_BSK)
        if self.traced and self.seen is None and self.training and not inside_backward():
            self.seen = (indices_BSK, weights_BSK.detach(), valid_BS)
        kept_TK = None if kept_BSK is None else kept_BSK.flatten(0, 1)
        return Routing(indices_BSK.flatten(0, 1), weights_BSK.flatten(0, 1), counts_BE.sum(0), kept_TK, aux)

    @torch.no_grad()
    def commit(self, counts: Tensor | None, *, skipped: Tensor | bool) -> None:
        """End a step: update the bias and the shares by the global counts, and reset the pending counts.

        Args:
            counts: (E + 1,) of all ranks, as `pending_counts`; None = the step was dropped.
            skipped: bool or bool tensor (not read from the device); a skipped step changes nothing.
        """
        self.pending_counts.zero_()
        if counts is None or skipped is True:
            return
        counts_E = counts[: self.num_experts].double()
        mean = counts_E.mean() if self.open_E is None else counts_E.sum() / self.open_E.sum()
        steps_E = torch.sign(mean - counts_E).to(self.bias_E)
        bias_E = self.bias_E + self.bias_rate * (steps_E if self.open_E is None else steps_E * self.open_E)
        shares_E = (counts_E / counts_E.sum().clamp(min=1)).to(self.shares_E)
        stays = torch.as_tensor(skipped, device=mean.device) | (mean == 0)
        self.bias_E.copy_(torch.where(stays, self.bias_E, bias_E))
        self.shares_E.copy_(torch.where(stays, self.shares_E, shares_E))

    @property
    def number(self) -> Tensor | int:
        """The number of experts that rows can go to."""
        return self.num_experts if self.open_E is None else self.open_E.sum(dtype=torch.float64)

    def _closed(self, values_BSE: Tensor) -> Tensor:
        """`values_BSE`, minus infinity for closed experts; a measurement's `forced` choices may be closed."""
        if self.open_E is None or self.forced is not None:
            return values_BSE
        return values_BSE.masked_fill(~self.open_E, -math.inf)

    def scores(self, x_BSD: Tensor) -> Tensor:
        """The scores of tokens as in evaluation, (B, S, E), without choosing; nothing is counted."""
        logits_BSE = self._closed(self._logits(x_BSD))
        return self._scores(logits_BSE / self.temperature)

    def _logits(self, x_BSD: Tensor) -> Tensor:
        dtype = torch.float64 if torch.float64 in (x_BSD.dtype, self.weight.dtype) else torch.float32
        with torch.autocast(x_BSD.device.type, enabled=False):
            return F.linear(x_BSD.to(dtype), self.weight.to(dtype))

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def _count(self, indices_BSK: Tensor, mask: Tensor | None) -> Tensor:
        """Chosen tokens per sequence and expert (B, E), int64; `mask` is (B, S) or (B, S, K)."""
        flat = indices_BSK.flatten(1)
        if mask is None:
            ones = torch.ones_like(flat)
        else:
            mask = mask.unsqueeze(-1) if mask.ndim == 2 else mask
            ones = mask.expand_as(indices_BSK).flatten(1).to(torch.int64)
        return flat.new_zeros(len(flat), self.num_experts).scatter_add_(1, flat, ones)

    def _keep(self, indices_BSK: Tensor, valid_BS: Tensor | None) -> Tensor | None:
        """Return which choices fit: the first `capacity` of each expert, in the order of the sequence.

        Padding takes no capacity and adds none, so the result does not depend on the amount of padding.
        """
        if self.capacity_factor is None:
            return None
        B, S, K = indices_BSK.shape
        wanted = indices_BSK.new_ones(B, S * K)
        if valid_BS is not None:
            wanted = valid_BS.repeat_interleave(K, dim=1, output_size=S * K).to(torch.int64)
        per_choice = self.capacity_factor / self.number
        choices_B1 = wanted.sum(1, keepdim=True) if self.context is None else wanted.new_full((B, 1), self.context * K)
        capacity_B1 = (choices_B1.double() * per_choice).ceil()
        # one column per expert: a choice's place is the number of choices of that expert in its sequence up to it
        each_E = torch.arange(self.num_experts, device=indices_BSK.device)
        chosen = (indices_BSK.view(B, S * K, 1) == each_E) * wanted.unsqueeze(-1)
        place = (chosen.cumsum(1) * chosen).sum(-1)
        return ((place <= capacity_B1) & (wanted > 0)).view(B, S, K)

    def _aux(
        self, logits_BSE: Tensor, scores_BSE: Tensor, routed_BE: Tensor, weight_BS: Tensor | None
    ) -> Tensor | None:
        """Both losses as weighted means over the tokens; a sequence's balance loss has the weight of its tokens."""
        per_token = None
        if self.z_loss_weight:
            per_token = self.z_loss_weight * torch.logsumexp(logits_BSE, dim=-1).square()
        if self.balance_weight:
            portions = scores_BSE
            if self.score == "sigmoid":
                portions = scores_BSE / scores_BSE.sum(-1, keepdim=True)
            if self.balance_scope == "sequence":
                shares_BE = routed_BE / routed_BE.sum(-1, keepdim=True).clamp(min=1)
                balance_BS = (portions * shares_BE.to(portions).unsqueeze(1)).sum(-1)
            else:
                balance_BS = portions @ self.shares_E.to(portions)
            balance_BS = self.balance_weight * self.number * balance_BS
            per_token = balance_BS if per_token is None else per_token + balance_BS
        if per_token is None:
            return None
        if weight_BS is None:
            return per_token.mean()
        weight_BS = weight_BS.to(per_token)
        total = weight_BS.sum()
        return (per_token * weight_BS).sum() / torch.where(total > 0, total, 1.0)

    @torch.no_grad()
    def _count_pending(
        self, indices_BSK: Tensor, kept_BSK: Tensor | None, weight_BS: Tensor | None, scores_BSE: Tensor
    ) -> None:
        """Add to the pending counts, in training forwards only; recomputation in backward does not count.

        A token's uncertainty is the entropy of its scores over that of an even choice, as a multiple of 1 /
        `UNCERTAINTY_UNIT`: a sum of integers is the same for any split of the tokens.
        """
        compiled = torch.compiler.is_compiling()
        if not self.training or (not compiled and inside_backward()):
            return
        add = _add_outside_backward if compiled else Tensor.add_
        counted_BS = None if weight_BS is None else weight_BS > 0
        add(self.pending_counts[: self.num_experts], self._count(indices_BSK, counted_BS).sum(0))
        if kept_BSK is not None:
            dropped = ~kept_BSK if counted_BS is None else ~kept_BSK & counted_BS.unsqueeze(-1)
            add(self.pending_counts[self.num_experts], dropped.sum())
        if self.open_E is None:
            return
        shares_BSE = scores_BSE if self.score == "softmax" else scores_BSE / scores_BSE.sum(-1, keepdim=True)
        entropy_BS = torch.special.entr(shares_BSE).sum(-1) / torch.log(torch.as_tensor(self.number).clamp(min=2))
        units_BS = (entropy_BS * UNCERTAINTY_UNIT).round().to(torch.int64)
        add(self.pending_counts[-1], (units_BS if weight_BS is None else units_BS * (weight_BS > 0)).sum())


@torch.library.custom_op("raytrain::add_outside_backward", mutates_args=("pending",))
def _add_outside_backward(pending: Tensor, more: Tensor) -> None:
    """`pending += more` outside backward. Compiled code is the same in both passes, and checks this when it runs."""
    if not inside_backward():
        pending += more


# ---------------------------------------------------------------- trace

#: Traced steps without a logged row whose choices are kept.
MOST_KEPT = 64


class RoutingTrace:
    """Records every N steps the choices of the first micro-batch on rank 0.

    Args:
        routers: of the model, in the order of the layers; each starts to keep its first forward of a step.
        every: N.

    A file is a NumPy archive without pickles: `indices` (L, B, S, K) int16, the experts of each token, best first;
    `weights` of the same shape, zero where the token was dropped; `valid` (B, S), false for padding; `step`. Files are
    written with the logged rows; between two of them, the last `MOST_KEPT` traced steps are kept on the device.
    """

    def __init__(self, routers: Sequence[TopKRouter], *, every: int) -> None:
        self.routers, self.every = list(routers), every
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for router in self.routers:
            router.traced = True

    def end_step(self, step: int) -> None:
        """Keep the choices of `step` if it is traced. Reads nothing from the device."""
        seen = [router.seen for router in self.routers]
        self.forget()
        found = [one for one in seen if one is not None]
        if step % self.every or len(found) < len(seen) or not found:  # without rows on this worker in this step
            return
        valid = found[0][2]
        self._kept[step] = (
            torch.stack([indices.to(torch.int16) for indices, _, _ in found]),
            torch.stack([weights for _, weights, _ in found]),
            torch.ones_like(found[0][0][..., 0], dtype=torch.bool) if valid is None else valid,
        )
        if len(self._kept) > MOST_KEPT:
            del self._kept[min(self._kept)]

    def forget(self) -> None:
        for router in self.routers:
            router.seen = None

    def take(self) -> dict[int, bytes]:
        """Return step -> file content of the kept steps, and forget them; reads the device."""
        files: dict[int, bytes] = {}
        for step, tensors in self._kept.items():
            buffer, (indices, weights, valid) = io.BytesIO(), (tensor.cpu().numpy() for tensor in tensors)
            np.savez_compressed(buffer, indices=indices, weights=weights, valid=valid, step=np.int64(step))
            files[step] = buffer.getvalue()
        self._kept = {}
        return files


def build_trace(routers: Sequence[TopKRouter], every: int | None) -> RoutingTrace | None:
    """Build a trace on rank 0; None without `every` and on other ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    return RoutingTrace(routers, every=every) if every is not None and first else None


# ---------------------------------------------------------------- load


def imbalance(counts_LE: Tensor, number: Tensor | int | None = None) -> Tensor:
    """Busiest expert over the mean of each layer, (L,) float64; 1 where nothing was routed.

    Args:
        number: of the experts that rows can go to, where that is not E.
    """
    counts = counts_LE.double()
    mean = counts.mean(-1) if number is None else counts.sum(-1) / number
    return torch.where(mean > 0, counts.amax(-1) / mean.clamp(min=1e-300), torch.ones_like(mean))


class LoadTracker:
    """Keeps the global counts of the routers of a model, layer by layer.

    Args:
        routers: one per layer, in the order of the layers.
        trace: notified of the end of each step, or None.

    One vector holds a step: for each layer its E counts, then its drops. The counts of the log interval in progress are
    part of a checkpoint (`state_dict`), so that a resumed run counts every step exactly once.
    """

    def __init__(self, routers: Sequence[TopKRouter], *, trace: RoutingTrace | None = None) -> None:
        self.routers, self.trace = list(routers), trace
        self.sizes = [router.num_experts + 1 for router in self.routers]
        self.last: list[Tensor] = []
        """Per layer the counts of the last committed step, (E + 1,) float64."""
        total = sum(self.sizes)
        self.step = self.window_steps = 0
        """Committed steps, skipped ones included; and their number since the last logged row."""
        self.window = torch.zeros(total, dtype=torch.float64)
        """Sum of the counts since the last logged row."""
        self.used = torch.zeros(total, dtype=torch.float64)
        """The last step in which each count was not zero; 0 = never."""

    def pending(self) -> Tensor:
        """Copy this rank's counts since the last commit: (sum of E + 1 over layers,) int64."""
        return torch.cat([router.pending_counts[: router.num_experts + 1] for router in self.routers])

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
        done = counts.double() * ~torch.as_tensor(skipped, device=counts.device)
        self.window = self.window.to(done.device) + done
        self.used = torch.where(done > 0, float(self.step), self.used.to(done.device))
        new = [part.double() for part in counts.split(self.sizes)]
        if self.last:  # a skipped step does not count; whether it is one stays on the device
            stays = torch.as_tensor(skipped, device=counts.device)
            new = [torch.where(stays, old, part) for old, part in zip(self.last, new, strict=True)]
        self.last = new

    def forget(self, layer: int, slot: int, *, heir: int | None) -> None:
        """End the statistics of a slot whose expert goes: they become those of the slot `heir`, if there is one."""
        start = sum(self.sizes[:layer])
        gone = start + slot
        window, used = self.window.clone(), self.used.clone()  # a checkpoint may still read the old ones
        if heir is not None:
            window[start + heir] += window[gone]
            used[start + heir] = torch.maximum(used[start + heir], used[gone])
        window[gone] = used[gone] = 0.0
        self.window, self.used = window, used

    def state_dict(self) -> dict[str, Tensor]:
        steps = torch.tensor([self.step, self.window_steps], dtype=torch.int64)
        return {"steps": steps, "window": self.window, "used": self.used}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.step, self.window_steps = (int(number) for number in state["steps"])
        self.window, self.used = state["window"].clone(), state["used"].clone()

    def metrics(self) -> dict[str, Tensor]:
        """Of the last committed step: `load_imbalance` (mean over layers) and `dropped_fraction`."""
        if not self.last:
            return {}
        numbers = [None if router.open_E is None else router.number for router in self.routers]
        pairs = zip(self.last, numbers, strict=True)
        peaks = torch.cat([imbalance(part[:-1].unsqueeze(0), number) for part, number in pairs])
        dropped = torch.stack([part[-1] for part in self.last]).sum()
        routed = torch.stack([part[:-1].sum() for part in self.last]).sum()
        return {"load_imbalance": peaks.mean(), "dropped_fraction": dropped / routed.clamp(min=1)}


# ---------------------------------------------------------------- routes


@dataclass(frozen=True)
class Route:
    """How this worker's rows of one micro-batch and layer are divided over the hosts.

    Attributes:
        host_counts: rows for each host, (H,).
        slot_counts: for each host the rows of each of its slots.
        segments: (start, stop) pieces of the rows sorted by expert, in the order in which they are sent; None if that
            is the order they already have.
    """

    host_counts: list[int]
    slot_counts: list[list[int]]
    segments: list[tuple[int, int]] | None


@dataclass(frozen=True)
class LayerRoutes:
    """One layer's placement in the form that passes use.

    A host's *slots* are its homes, ascending, then its replicas, ascending.

    Attributes:
        slots: for each host (expert, index of the copy) of each slot.
        homes: for each host the number of its slots that are homes.
    """

    placed: LayerPlacement
    slots: tuple[tuple[tuple[int, int], ...], ...]
    homes: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, layer: int) -> LayerRoutes:
        placed = placement.layers[layer]
        slots, homes = [], []
        for host in range(placement.num_hosts):
            held = placement.slots(layer, host)
            own = [expert for expert in held if placed.copies[expert][0] == host]
            rest = [expert for expert in held if placed.copies[expert][0] != host]
            slots.append(tuple((expert, placed.copies[expert].index(host)) for expert in (*own, *rest)))
            homes.append(len(own))
        return cls(placed, tuple(slots), tuple(homes))

    @cached_property
    def in_order(self) -> bool:
        """Whether rows sorted by expert are also sorted by host and slot."""
        experts = [expert for held in self.slots for expert, _ in held]
        return experts == sorted(set(experts)) and self.placed.replicas == 0

    def route(self, counts: Sequence[int]) -> Route:
        """Divide rows over the hosts; `counts` (E,) are those of each expert. Deterministic, in pure Python."""
        parts = split_rows(counts, self.placed.shares)
        slot_counts = [[parts[expert][copy] for expert, copy in held] for held in self.slots]
        host_counts = [sum(rows) for rows in slot_counts]
        if self.in_order:
            return Route(host_counts, slot_counts, None)
        starts, total = [], 0
        for count in counts:
            starts.append(total)
            total += count
        segments: list[tuple[int, int]] = []
        for held, rows in zip(self.slots, slot_counts, strict=True):
            for (expert, copy), number in zip(held, rows, strict=True):
                if number:
                    begin = starts[expert] + sum(parts[expert][:copy])
                    end = begin + number
                    if segments and segments[-1][1] == begin:  # it continues the last piece
                        begin = segments.pop()[0]
                    segments.append((begin, end))
        return Route(host_counts, slot_counts, None if segments in ([], [(0, total)]) else segments)
