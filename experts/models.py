"""Builders of mixture-of-experts models; raytrain reaches the experts only through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.distribute import LoadLog, attach_lifecycle, attach_sleep, distribute
from experts.grouped import SharedExpert, build_experts
from experts.layer import MoELayer, worst_case_routing
from experts.lifecycle.controller import Lifecycle
from experts.router import LoadTracker, TopKRouter, build_trace
from experts.sizes import (
    check_experts,
    check_moe_mlp,
    first_experts,
    hidden_widths,
    moe_gpt_flops,
    moe_mlp_flops,
    shared_width,
)
from raytrain.models.attention import KeyValueCache
from raytrain.models.gpt import GPT, PreNorm, language_loss
from raytrain.models.mlp import as_input, supervised
from raytrain.models.sizes import check_gpt
from raytrain.trainable import IGNORED_LABEL, Batch, LossOutput, Trainable, is_integer, need_keys

__all__ = ["moe_gpt", "moe_layer", "moe_mlp"]


class MoEBlock(PreNorm):
    """A GPT block whose feed-forward is a MoELayer; also returns its auxiliary loss."""

    def forward(
        self, x_BSD: Tensor, valid_BS: Tensor | None = None, weight_BS: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x_BSD = self.attend(x_BSD, cache)
        y_BSD, aux = self.feed_forward(self.norm_feed_forward(x_BSD), valid_BS, weight_BS)
        return x_BSD + self.drop(y_BSD), aux


class MoEGPT(GPT):
    """The GPT of raytrain with experts in every block."""

    @property
    def takes_cache(self) -> bool:
        """False with a capacity, which counts the earlier tokens of a sequence: a single token does not show them."""
        routers = [part for part in self.modules() if isinstance(part, TopKRouter)]
        return all(router.capacity_factor is None for router in routers)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None, *,
        cache: KeyValueCache | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """As `GPT.forward`; in training with labels also "aux", the sum of the layers' auxiliary losses.

        Logits do not depend on `labels`: every token visits its experts, whether it has a label or not.

        Args:
            attention_mask: (B, S), 0 for padding, which follows the tokens of its row; causal attention hides it from
                them. Padding takes no capacity and is not counted. None = no padding.
        """
        valid_BS = None if attention_mask is None else attention_mask != 0
        weight_BS = None if labels is None else labelled_weight(labels, valid_BS)
        x_BSD, terms = self.embed(input_ids, cache), []
        for block in self.blocks:
            held = () if cache is None else (cache,)
            x_BSD, aux = block(x_BSD, valid_BS, weight_BS, *held)
            terms.append(aux)
        if cache is not None:
            x_BSD = cache.end_pass(x_BSD)
        out, aux = self.outputs(self.logits(x_BSD), labels), total(terms)
        return out if aux is None or labels is None else out | {"aux": aux}


def labelled_weight(labels_BS: Tensor, valid_BS: Tensor | None) -> Tensor:
    """Weight of each token in the auxiliary loss, (B, S) float64: the labels of its row over the row's valid tokens.

    The balance loss of a row is about all of its valid tokens, and has the weight of its labels, as in the main loss. A
    row without labels has no weight: a micro-batch of such rows is not run at all, so what they add must not depend on
    how rows are divided into micro-batches.
    """
    labels_B1 = (labels_BS != IGNORED_LABEL).sum(1, keepdim=True).double()
    if valid_BS is None:
        return (labels_B1 / labels_BS.shape[1]).expand(labels_BS.shape)
    return labels_B1 / valid_BS.sum(1, keepdim=True).clamp(min=1) * valid_BS


class MoEMLP(nn.Module):
    """Rows of features through residual layers of experts: x (B, ...) -> (outputs (B, classes), aux)."""

    def __init__(self, layers: list[MoELayer], *, features: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed = nn.Linear(features, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in layers)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`labels` (B,): rows whose label is -100 are part of no loss and are not counted."""
        ignorable = labels is not None and is_integer(labels)
        weight_B1 = (labels != IGNORED_LABEL).unsqueeze(1) if ignorable else None
        y_BD = F.gelu(self.embed(as_input(x, self.embed.weight.dtype).flatten(1)))
        terms = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            added, aux = layer(norm(y_BD).unsqueeze(1), None, weight_B1)
            added = F.dropout(added, self.dropout, self.training) if self.dropout else added
            y_BD = y_BD + added.squeeze(1)
            terms.append(aux)
        return self.head(y_BD), total(terms)


def total(terms: Iterable[Tensor | None]) -> Tensor | None:
    """Sum of the terms that are not None, or None."""
    present = [term for term in terms if term is not None]
    return torch.stack(present).sum() if present else None


def moe_layer(
    width: int, experts: ExpertsConfig, *, residual_scale: float = 1.0,
    scope: Literal["sequence", "batch"] = "sequence", context: int | None = None,
) -> MoELayer:  # fmt: skip
    """Build one layer from the `experts` section; the shared expert has the activation of the others.

    Args:
        width: D, of the tokens.
        residual_scale: scales the initial weights that write into the residual stream, such as 1 / sqrt(2 x layers).
        scope, context: as `TopKRouter`'s `balance_scope` and `context`.

    Raises:
        InputError: keys of the section that do not fit, such as no `num_experts`.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.models import moe_layer
        >>> layer = moe_layer(8, ExpertsConfig(num_experts=4, top_k=2, hidden=16))
        >>> output, aux = layer(torch.randn(2, 5, 8))  # (batch, tokens, width)
        >>> output.shape, aux.shape
        (torch.Size([2, 5, 8]), torch.Size([]))
        >>> silent = moe_layer(8, ExpertsConfig(num_experts=4, hidden=16), residual_scale=0.0)
        >>> silent(torch.randn(2, 5, 8))[0].abs().max().item()
        0.0
    """
    router = TopKRouter(
        width, check_experts(experts), experts.top_k, score=experts.score, renormalize=experts.renormalize,
        balance=experts.balance, balance_scope=scope, balance_weight=experts.balance_weight,
        z_loss_weight=experts.z_loss_weight, bias_rate=experts.bias_rate, capacity_factor=experts.capacity_factor,
        context=context, noise=experts.noise, temperature=experts.temperature,
        living=first_experts(experts) if experts.lifecycle.enabled else None, prior=experts.graph_routing > 0,
    )  # fmt: skip
    kind = {"activation": experts.activation, "bias": experts.bias, "residual_scale": residual_scale}
    shared = None
    if experts.shared_expert:
        shared = SharedExpert(width, shared_width(experts, width), gate=experts.shared_gate, **kind)
    return MoELayer(router, build_experts(width, hidden_widths(experts, width), **kind), shared)


def moe_gpt(
    *, layers: int, heads: int, width: int, context: int, dropout: float = 0.0, vocab_size: int,
    window: int | None = None, experts: ExpertsConfig,
) -> Trainable:  # fmt: skip
    """Build a GPT with experts in every block.

    Args:
        window: as for `raytrain.models.gpt:gpt`.
        experts: the section; null means 4 for num_experts, and 4 x width for hidden.

    Raises:
        ValueError: sizes that do not fit each other.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.models import moe_gpt
        >>> section = ExpertsConfig(num_experts=4, top_k=1)
        >>> trainable = moe_gpt(layers=1, heads=2, width=16, context=8, vocab_size=256, experts=section)
        >>> ids = torch.tensor([list(b"the mill")])
        >>> found = trainable.loss(trainable.module, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        >>> 5 < found.loss.item() < 6, found.aux.item() > 0  # about log(256), and the router's balance loss
        (True, True)
    """
    check_gpt(
        layers=layers, heads=heads, width=width, context=context, dropout=dropout, vocab_size=vocab_size, window=window
    )
    scale = 1 / math.sqrt(2 * layers)
    layer = partial(moe_layer, width, experts, residual_scale=scale, context=context)
    blocks = [MoEBlock(width, heads, dropout, layer(), window=window) for _ in range(layers)]
    module = MoEGPT(blocks, width=width, context=context, vocab_size=vocab_size, dropout=dropout)
    sizes = {"layers": layers, "width": width, "context": context, "vocab_size": vocab_size, "window": window}
    flops = moe_gpt_flops(**sizes, experts=experts)
    return _trainable(module, _language_loss, flops, experts=experts, blocks="blocks")


def moe_mlp(
    *, width: int = 128, layers: int = 2, num_features: int | None = None, num_classes: int | None = None,
    dropout: float = 0.0, experts: ExpertsConfig,
) -> Trainable:  # fmt: skip
    """Build a residual network of expert layers on batches {"x": (B, ...), "labels": (B,)}.

    Rows form no sequence: the balance loss uses the shares of the last committed step, and there is no capacity.

    Raises:
        ValueError: sizes that cannot be built. InputError: keys of the section that do not fit.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.models import moe_mlp
        >>> trainable = moe_mlp(width=8, layers=2, num_features=4, num_classes=3, experts=ExpertsConfig(num_experts=2))
        >>> outputs, aux = trainable.module(torch.randn(5, 4))
        >>> outputs.shape
        torch.Size([5, 3])
    """
    given = {"width": width, "layers": layers, "num_features": num_features, "num_classes": num_classes}
    features, classes = check_moe_mlp(**given, dropout=dropout, experts=experts)
    stack = [moe_layer(width, experts, residual_scale=1 / math.sqrt(layers), scope="batch") for _ in range(layers)]
    module = MoEMLP(stack, features=features, width=width, classes=classes, dropout=dropout)
    flops = moe_mlp_flops(width=width, layers=layers, features=features, classes=classes, experts=experts)
    return _trainable(module, _row_loss, flops, experts=experts)


def _language_loss(module: nn.Module, batch: Batch) -> LossOutput:
    """`language_loss` with the mask of padding, where the batch has one."""
    return language_loss(module, batch, "attention_mask")


def _row_loss(module: nn.Module, batch: Batch) -> LossOutput:
    need_keys(batch, "x", "labels")
    outputs, aux = module(batch["x"], batch["labels"])
    plain = supervised(outputs, batch["labels"], training=module.training)
    return LossOutput(plain.loss, aux=aux, metrics=plain.metrics)


def _trainable(
    module: nn.Module, loss: Callable[..., LossOutput], flops: float, *, experts: ExpertsConfig,
    blocks: str | None = None,
) -> Trainable:  # fmt: skip
    routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
    loads = LoadTracker(routers, trace=build_trace(routers, experts.trace_every))
    trainable = Trainable(
        module, loss, blocks=blocks, flops_per_sample=flops, counts=loads.pending, commit=loads.commit,
        log_metrics=loads.metrics, interval_log=LoadLog(loads), state_parts=lambda: {"load": loads},
        worst_case=partial(worst_case_routing, module),
    )  # fmt: skip
    lifecycle = None
    if experts.lifecycle.enabled:
        layers = [part.experts for part in module.modules() if isinstance(part, MoELayer)]
        lifecycle = Lifecycle(experts, loads, layers)
        attach_lifecycle(trainable, lifecycle)
        if experts.lifecycle.replay.bytes is not None:
            attach_sleep(trainable, lifecycle)
    return distribute(trainable, experts, lifecycle=lifecycle)
