"""Expert layers as transformers' Mixtral and Qwen-MoE models name their weights, both ways; needs no transformers.

A layout is transformers' `model_type`. Its files hold each expert by itself (`experts.3.w1.weight`); a model of
transformers 5 in memory holds a layer's experts fused (`experts.gate_up_proj`). Both are read, and either is written
(conversion_mapping.py and modeling_{mixtral,qwen2_moe,qwen3_moe}.py of transformers 5.23).

What such weights do not say, `config.json` says: `top_k` is `num_experts_per_tok`, `renormalize` is `norm_topk_prob`
(always true for Mixtral), and `hidden_act` must be silu. Not covered: everything outside the expert layers (attention,
norms, embeddings), quantised weights, Mixtral's `router_jitter_noise`, and transformers' auxiliary loss, which is
another than ours. Our noise, temperature, capacity and balance settings have no place in these layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experts.huggingface.layout_read import (
    DOWN,
    GATE,
    GATE_UP,
    LAYOUTS,
    SHARED_GATE,
    FoundLayer,
    LayerSizes,
    Names,
    blocks_of,
)
from experts.layer import MoELayer
from experts.routing.grouped import GroupedExperts, SharedExpert
from experts.routing.router import TopKRouter
from raytrain.errors import InputError

Layout = Literal["mixtral", "qwen2_moe", "qwen3_moe"]

LAYERS = "model.layers."
"""Before the number of a decoder layer in a whole model."""


def to_layout(layer: MoELayer, layout: Layout, *, prefix: str = "", fused: bool = False) -> dict[str, Tensor]:
    """The weights of one layer by their names in a layout; copies, in the layer's dtype and on its device.

    Args:
        prefix: before each name, such as "model.layers.0.mlp."; empty gives the state dict of the layer alone.
        fused: a layer's experts in two tensors, as a model of transformers 5 holds them in memory.
    Raises:
        InputError: names the key of the `experts` section that the layout cannot express.
    """
    names = _names(layout)
    experts = _expressible(layer, layout)
    stacks = {name: getattr(experts, name).detach() for name in names.weights}
    made = {GATE: layer.router.weight.detach().clone()}
    if fused:
        made |= {GATE_UP: torch.cat([stacks["w1"], stacks["w3"]], dim=1), DOWN: stacks["w2"].clone()}
    else:
        for e in range(layer.router.num_experts):
            made |= {f"experts.{e}.{theirs}.weight": stacks[ours][e].clone() for ours, theirs in names.weights.items()}
    if isinstance(layer.shared, SharedExpert) and layer.shared.gate is not None:
        shared = {theirs: getattr(layer.shared, ours) for ours, theirs in names.weights.items()}
        made |= {f"shared_expert.{theirs}.weight": weight.detach().clone() for theirs, weight in shared.items()}
        made[SHARED_GATE] = layer.shared.gate.weight.detach().clone()
    return {prefix + name: value for name, value in made.items()}


def from_layout(
    state: Mapping[str, Tensor], layout: Layout, *, top_k: int, renormalize: bool, prefix: str = "", **router: Any
) -> MoELayer:
    """A layer with the weights of one in a layout, in their dtype; what `to_layout` names, per expert or fused.

    Args:
        state: names under `prefix` must all be of this layer; others are not looked at.
        top_k, renormalize: `num_experts_per_tok` and `norm_topk_prob` of config.json.
        router: further arguments of `TopKRouter`, such as balance.
    Raises:
        InputError: names the tensor that is missing, doubled, unknown or of another shape.
        ValueError: more choices than experts.
    """
    names = _names(layout)
    if layout == "mixtral" and not renormalize:
        raise InputError("renormalize", seen="false", expected="true, as Mixtral always does")
    found = FoundLayer(state, names, prefix)
    sizes = found.sizes()
    read = found.read(sizes)
    made = TopKRouter(sizes.width, sizes.num_experts, top_k, score="softmax", renormalize=renormalize, **router)
    with torch.device("meta"):  # nothing is drawn: the weights are there
        experts = GroupedExperts(sizes.num_experts, sizes.width, sizes.hidden, activation="swiglu")
        shared = SharedExpert(sizes.width, sizes.shared, activation="swiglu", gate=True) if sizes.shared else None
    layer = MoELayer(made, experts, shared)
    routing = {f"router.{name}": value for name, value in made.state_dict().items()}
    layer.load_state_dict(routing | read, assign=True)
    return layer


def load_layers(
    module: nn.Module, state: Mapping[str, Tensor], layout: Layout, *, prefix: str = LAYERS
) -> tuple[int, ...]:
    """Copy the expert layers of a whole model into those of `module`, in order, one at a time.

    The first decoder layer of `state` that has experts goes into the first `MoELayer` of `module`, and so on; decoder
    layers without experts are passed over. `module` holds its experts itself: in a run whose experts live on hosts this
    is before `experts.distribute.distribute`. Weights take the dtype of `module`, the routers' balance starts anew, and
    their `top_k` and `renormalize` are as they were built.

    Args:
        state: of the whole model; `raytrain.models.weights.stored.StoredTensors` reads it from a folder a tensor at a
            time.
    Returns:
        The numbers of the decoder layers that were read.
    Raises:
        InputError: names what is missing, doubled, unknown or of another shape; `module` may then be loaded in part.
    """
    names = _names(layout)
    blocks = blocks_of(state, names, prefix=prefix)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    if len(blocks) != len(layers):
        raise InputError(
            f"{prefix}*",
            seen=f"{len(blocks)} layers with experts, {_listed(list(blocks))}",
            expected=f"{len(layers)}, as many as the model has",
        )
    for block, layer in zip(blocks.values(), layers, strict=True):
        experts = _expressible(layer, layout, whole=False)
        shared = layer.shared.hidden if isinstance(layer.shared, SharedExpert) else None
        sizes = LayerSizes(layer.router.num_experts, experts.width, experts.hidden_E[0], shared)
        targets = layer.state_dict()
        for name, value in FoundLayer(state, names, block).read(sizes).items():
            targets[name].copy_(value)
        layer.router.bias_E.zero_()
        layer.router.shares_E.fill_(1 / sizes.num_experts)
    return tuple(blocks)


def export_layers(
    module: nn.Module,
    layout: Layout,
    *,
    numbers: Sequence[int] | None = None,
    prefix: str = LAYERS,
    fused: bool = False,
) -> dict[str, Tensor]:
    """Every MoELayer of `module` as `to_layout`, named as in a whole model.

    Args:
        numbers: of the decoder layers that they stand in; None counts from 0.
    """
    names = _names(layout)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    block = "mlp" if fused else names.block
    places = range(len(layers)) if numbers is None else numbers
    made: dict[str, Tensor] = {}
    for number, layer in zip(places, layers, strict=True):
        made |= to_layout(layer, layout, prefix=f"{prefix}{number}.{block}.", fused=fused)
    return made


def _expressible(layer: MoELayer, layout: Layout, *, whole: bool = True) -> GroupedExperts:
    """The layer's experts, if the layout has a place for all that they are; with `whole` the router's state too."""
    experts, router, shared = layer.experts, layer.router, layer.shared
    if not isinstance(experts, GroupedExperts):
        seen = type(experts).__name__
        raise InputError("experts", seen=seen, expected="experts of one size (experts.hidden), held by the module")
    gated = isinstance(shared, SharedExpert) and shared.gate is not None
    alike = isinstance(shared, SharedExpert) and shared.activation == "swiglu" and not shared.bias
    checks: list[tuple[str, bool, object, str]] = [
        ("activation", experts.activation == "swiglu", experts.activation, "swiglu"),
        ("bias", not experts.bias, experts.bias, "false"),
        ("score", router.score == "softmax", router.score, "softmax"),
        ("shared_expert", (shared is not None) == _names(layout).shared, shared is not None,
         str(_names(layout).shared).lower()),
        ("shared_expert", shared is None or alike, "one of another kind", "a SwiGLU without biases"),
        ("shared_gate", shared is None or gated, False, "true"),
        ("renormalize", layout != "mixtral" or router.renormalize, router.renormalize, "true"),
        ("balance", not whole or not bool(router.bias_E.any()), "a bias that decides who is chosen",
         "none: train with experts.balance loss, or set router.bias_E to zero"),
    ]  # fmt: skip
    for key, fits, seen, expected in checks:
        if not fits:
            raise InputError(f"experts.{key}", seen=str(seen).lower(), expected=f"{expected} in the layout {layout}")
    return experts


def _names(layout: str) -> Names:
    if layout not in LAYOUTS:
        raise InputError("layout", seen=repr(layout), expected=f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]


def _listed(numbers: Sequence[int]) -> str:
    return f"numbers {', '.join(map(str, numbers))}" if numbers else "none"
