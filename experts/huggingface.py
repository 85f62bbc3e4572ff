"""Reads and writes the expert layers of transformers' Mixtral and Qwen-MoE models; does not need transformers.

A layout is transformers' `model_type`. Its files store each expert separately (`experts.3.w1.weight`); a model of
transformers 5 in memory holds a layer's experts fused (`experts.gate_up_proj`). Both forms are read, and either is
written (conversion_mapping.py and modeling_{mixtral,qwen2_moe,qwen3_moe}.py of transformers 5.23).

Settings that the weights do not contain are in `config.json`: `top_k` is `num_experts_per_tok`, `renormalize` is
`norm_topk_prob` (always true for Mixtral), and `hidden_act` must be silu. Not covered: everything outside the expert
layers (attention, norms, embeddings), quantised weights, Mixtral's `router_jitter_noise`, and transformers' auxiliary
loss, which differs from ours. These layouts cannot express our noise, capacity and balance settings. A temperature is
part of the router's weights there: they are divided by it when written and multiplied by it when read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experts.config import weight_shapes
from experts.grouped import GroupedExperts, SharedExpert
from experts.layer import MoELayer
from experts.router import TopKRouter
from raytrain.errors import InputError

__all__ = ["export_layers", "from_layout", "load_layers", "to_layout"]


Layout = Literal["mixtral", "qwen2_moe", "qwen3_moe"]

LAYERS = "model.layers."
"""Prefix of a decoder layer's number in a complete model."""

GATE, GATE_UP, DOWN = "gate.weight", "experts.gate_up_proj", "experts.down_proj"
SHARED_GATE = "shared_expert_gate.weight"
QWEN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class LayoutNames:
    """The tensor names of a layout: of the expert layer in a decoder layer, of an expert's weights by ours; and whether
    it has a shared expert, which then has a gate."""

    block: str
    weights: Mapping[str, str]
    shared: bool


LAYOUTS: dict[str, LayoutNames] = {
    "mixtral": LayoutNames("block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"}, shared=False),
    "qwen2_moe": LayoutNames("mlp", QWEN, shared=True),
    "qwen3_moe": LayoutNames("mlp", QWEN, shared=False),
}


@dataclass(frozen=True)
class LayerSizes:
    """E, D and F of a layer, and F of its shared expert (None without one)."""

    num_experts: int
    width: int
    hidden: int
    shared: int | None

    def shapes(self, names: LayoutNames, *, fused: bool) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a layer, by its name in the layout."""
        E, D, F = self.num_experts, self.width, self.hidden
        found: dict[str, tuple[int, ...]] = {GATE: (E, D)}
        if fused:
            found |= {GATE_UP: (E, 2 * F, D), DOWN: (E, D, F)}
        else:
            own = weight_shapes(D, F, activation="swiglu")
            found |= {f"experts.{e}.{names.weights[name]}.weight": own[name] for e in range(E) for name in own}
        if self.shared is not None:
            own = weight_shapes(D, self.shared, activation="swiglu")
            found |= {f"shared_expert.{names.weights[name]}.weight": own[name] for name in own}
            found[SHARED_GATE] = (1, D)
        return found


def to_layout(layer: MoELayer, layout: Layout, *, prefix: str = "", fused: bool = False) -> dict[str, Tensor]:
    """Return the weights of one layer under their names in a layout: copies in the layer's dtype, on its device.

    Args:
        prefix: prepended to each name, such as "model.layers.0.mlp."; empty gives the state dict of the layer alone.
        fused: store a layer's experts in two tensors, as a model of transformers 5 does in memory.

    Raises:
        InputError: the layout cannot express the layer; names the key of the `experts` section.

    Example:
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface import to_layout
        >>> from experts.models import moe_layer
        >>> layer = moe_layer(8, ExpertsConfig(num_experts=2, hidden=16, activation="swiglu"))
        >>> tensors = to_layout(layer, "mixtral", prefix="model.layers.0.block_sparse_moe.")
        >>> tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"].shape
        torch.Size([8, 16])
    """
    names = _names(layout)
    experts = _expressible(layer, layout)
    stacks = {name: getattr(experts, name).detach() for name in names.weights}
    made = {GATE: layer.router.weight.detach() / layer.router.temperature}
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
    """Build a layer from the tensors that `to_layout` writes, per expert or fused; keeps their dtype.

    Args:
        state: every name under `prefix` must belong to this layer; other names are ignored.
        top_k, renormalize: `num_experts_per_tok` and `norm_topk_prob` of config.json.
        router: more arguments of `TopKRouter`, such as balance.

    Raises:
        InputError: a tensor is missing, duplicated, unknown or of another shape; names it.
        ValueError: `top_k` exceeds the number of experts.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface import from_layout, to_layout
        >>> from experts.models import moe_layer
        >>> layer = moe_layer(8, ExpertsConfig(num_experts=2, hidden=16, activation="swiglu")).eval()
        >>> again = from_layout(to_layout(layer, "mixtral"), "mixtral", top_k=2, renormalize=True).eval()
        >>> x = torch.randn(1, 3, 8)
        >>> torch.equal(again(x)[0], layer(x)[0])
        True
    """
    names = _names(layout)
    if layout == "mixtral" and not renormalize:
        raise InputError("renormalize", got="false", expected="true, as Mixtral always does")
    sizes = _sizes_of(state, names, prefix)
    read = _read(state, names, prefix, sizes)
    made = TopKRouter(sizes.width, sizes.num_experts, top_k, score="softmax", renormalize=renormalize, **router)
    with torch.device("meta"):  # no random initialisation: the weights are assigned below
        experts = GroupedExperts(sizes.num_experts, sizes.width, sizes.hidden, activation="swiglu")
        shared = SharedExpert(sizes.width, sizes.shared, activation="swiglu", gate=True) if sizes.shared else None
    layer = MoELayer(made, experts, shared)
    read["router.weight"] *= made.temperature
    routing = {f"router.{name}": value for name, value in made.state_dict().items()}
    layer.load_state_dict(routing | read, assign=True)
    return layer


def load_layers(
    module: nn.Module, state: Mapping[str, Tensor], layout: Layout, *, prefix: str = LAYERS
) -> tuple[int, ...]:
    """Copy the expert layers of a complete model into those of `module`, in order, one at a time.

    The first decoder layer of `state` that has experts goes into the first `MoELayer` of `module`, and so on; decoder
    layers without experts are skipped. `module` must still hold its experts: with expert hosts, call this before
    `experts.distribute.distribute`. Weights are converted to the dtype of `module`, the routers' balancing state is
    reset, and their `top_k` and `renormalize` do not change.

    Args:
        state: tensors of the complete model; `raytrain.models.weights.stored.StoredTensors` reads them from a folder
            one at a time.

    Returns:
        The numbers of the decoder layers that were read.

    Raises:
        InputError: a tensor is missing, duplicated, unknown or of another shape; `module` may be partly loaded then.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface import export_layers, load_layers
        >>> from experts.models import moe_gpt
        >>> section = ExpertsConfig(num_experts=2, hidden=16, activation="swiglu")
        >>> sizes = {"layers": 2, "heads": 2, "width": 8, "context": 8, "vocab_size": 256, "experts": section}
        >>> trained, fresh = moe_gpt(**sizes).module, moe_gpt(**sizes).module
        >>> load_layers(fresh, export_layers(trained, "mixtral"), "mixtral")
        (0, 1)
        >>> name = "blocks.1.feed_forward.experts.w1"
        >>> torch.equal(fresh.get_parameter(name), trained.get_parameter(name))
        True
    """
    names = _names(layout)
    blocks = blocks_of(state, names, prefix=prefix)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    if len(blocks) != len(layers):
        raise InputError(
            f"{prefix}*",
            got=f"{len(blocks)} layers with experts, numbers {', '.join(map(str, blocks)) or 'none'}",
            expected=f"{len(layers)}, as many as the model has",
        )
    for block, layer in zip(blocks.values(), layers, strict=True):
        experts = _expressible(layer, layout, router_state=False)
        shared = layer.shared.hidden if isinstance(layer.shared, SharedExpert) else None
        sizes = LayerSizes(layer.router.num_experts, experts.width, experts.hidden_E[0], shared)
        targets = layer.state_dict()
        for name, value in _read(state, names, block, sizes).items():
            targets[name].copy_(value * layer.router.temperature if name == "router.weight" else value)
        layer.router.bias_E.zero_()
        layer.router.shares_E.fill_(1 / sizes.num_experts)
    return tuple(blocks)


def export_layers(
    module: nn.Module, layout: Layout, *, numbers: Sequence[int] | None = None, prefix: str = LAYERS,
    fused: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return every MoELayer of `module` as `to_layout` does, under the names of a complete model.

    Args:
        numbers: of the decoder layers that contain them; None counts from 0.

    Example:
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface import export_layers
        >>> from experts.models import moe_gpt
        >>> section = ExpertsConfig(num_experts=2, hidden=16, activation="swiglu")
        >>> model = moe_gpt(layers=1, heads=2, width=8, context=8, vocab_size=256, experts=section).module
        >>> sorted(export_layers(model, "mixtral", numbers=[3]))[0]
        'model.layers.3.block_sparse_moe.experts.0.w1.weight'
    """
    names = _names(layout)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    block = "mlp" if fused else names.block
    places = range(len(layers)) if numbers is None else numbers
    made: dict[str, Tensor] = {}
    for number, layer in zip(places, layers, strict=True):
        made |= to_layout(layer, layout, prefix=f"{prefix}{number}.{block}.", fused=fused)
    return made


def _expressible(layer: MoELayer, layout: Layout, *, router_state: bool = True) -> GroupedExperts:
    """Return the layer's experts. Raises InputError for a setting that the layout cannot express; with `router_state`
    also for the router's bias."""
    experts, router, shared = layer.experts, layer.router, layer.shared
    if not isinstance(experts, GroupedExperts):
        seen = type(experts).__name__
        raise InputError("experts", got=seen, expected="experts of one size (experts.hidden), held by the module")
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
        ("balance", not router_state or not bool(router.bias_E.any()), "a bias that decides who is chosen",
         "none: train with experts.balance loss, or set router.bias_E to zero"),
    ]  # fmt: skip
    for key, fits, seen, expected in checks:
        if not fits:
            raise InputError(f"experts.{key}", got=str(seen).lower(), expected=f"{expected} in the layout {layout}")
    return experts


def _names(layout: str) -> LayoutNames:
    if layout not in LAYOUTS:
        raise InputError("layout", got=repr(layout), expected=f"one of {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]


def _sizes_of(state: Mapping[str, Tensor], names: LayoutNames, prefix: str) -> LayerSizes:
    """The sizes of a layer by the tensors of its router, its first expert and its shared expert; the first of them that
    is missing is refused by `_read`."""
    fused = prefix + GATE_UP in state or prefix + DOWN in state
    w1 = names.weights["w1"]

    def side(name: str, dim: int) -> int:
        shape = state[prefix + name].shape if prefix + name in state else ()
        return shape[dim] if dim < len(shape) else 0

    hidden = side(GATE_UP, 1) // 2 if fused else side(f"experts.0.{w1}.weight", 0)
    shared = side(f"shared_expert.{w1}.weight", 0) if names.shared else None
    return LayerSizes(side(GATE, 0), side(GATE, 1), hidden, shared)


def _read(state: Mapping[str, Tensor], names: LayoutNames, prefix: str, sizes: LayerSizes) -> dict[str, Tensor]:
    """Copies of the weights of a layer under the names of our `MoELayer`, each checked against `sizes`.

    Raises:
        InputError: a tensor is missing, has no place in the layer, or has another shape; names it.
    """
    fused = prefix + GATE_UP in state or prefix + DOWN in state
    wanted = sizes.shapes(names, fused=fused)
    for full in sorted(name for name in state if name.startswith(prefix)):
        if full[len(prefix) :] not in wanted:
            expected = f"each weight of {sizes.num_experts} experts once, {'fused' if fused else 'one by one'}"
            raise InputError(full, got="a tensor that this layer does not have", expected=expected)
    found: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        if prefix + name not in state:
            owner = "the router" if name == GATE else "the layer"
            raise InputError(prefix + name, got="no such tensor", expected=f"a weight of {owner}")
        found[name] = value = state[prefix + name].detach()
        if tuple(value.shape) != shape or not value.is_floating_point():
            seen = f"{' x '.join(map(str, value.shape))} of {value.dtype}"
            expected = f"{' x '.join(map(str, shape))} floating-point numbers"
            raise InputError(prefix + name, got=seen, expected=expected)
    made = {"router.weight": found[GATE].clone()}
    if fused:
        w1, w3 = found[GATE_UP].split(sizes.hidden, dim=1)
        made |= {"experts.w1": w1.clone(), "experts.w2": found[DOWN].clone(), "experts.w3": w3.clone()}
    for ours, theirs in names.weights.items():
        if not fused:
            every = [found[f"experts.{expert}.{theirs}.weight"] for expert in range(sizes.num_experts)]
            made[f"experts.{ours}"] = torch.stack(every)
        if sizes.shared is not None:
            made[f"shared.{ours}"] = found[f"shared_expert.{theirs}.weight"].clone()
    if sizes.shared is not None:
        made["shared.gate.weight"] = found[SHARED_GATE].clone()
    return made


def blocks_of(state: Mapping[str, Tensor], names: LayoutNames, *, prefix: str) -> dict[int, str]:
    """Return {number of each decoder layer with experts: prefix of its names}, in order."""
    found: dict[int, str] = {}
    pattern = re.compile(rf"({re.escape(prefix)}(\d+)\.({names.block}|mlp)\.)(gate\.|experts\.|shared_expert)")
    for name in state:
        match = pattern.match(name)
        if match is None:
            continue
        other = found.setdefault(int(match[2]), match[1])
        if other != match[1]:
            raise InputError(name, got=f"layer {match[2]} twice, also as {other}*", expected="each layer once")
    return dict(sorted(found.items()))
