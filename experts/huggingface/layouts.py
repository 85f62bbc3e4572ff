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

from experts.layer import MoELayer
from experts.routing.grouped import GroupedExperts, SharedExpert
from experts.routing.router import TopKRouter
from experts.shapes import weight_shapes
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
    """The tensor names of a layout.

    Attributes:
        block: name of the expert layer inside a decoder layer.
        weights: our name -> their name, for each weight of an expert.
        shared: whether the layout has a shared expert, which then has a gate.
    """

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


def to_layout(layer: MoELayer, layout: Layout, *, prefix: str = "", fused: bool = False) -> dict[str, Tensor]:
    """Return the weights of one layer under their names in a layout: copies in the layer's dtype, on its device.

    Args:
        prefix: prepended to each name, such as "model.layers.0.mlp."; empty gives the state dict of the layer alone.
        fused: store a layer's experts in two tensors, as a model of transformers 5 does in memory.

    Raises:
        InputError: the layout cannot express the layer; names the key of the `experts` section.

    Example:
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface.layouts import to_layout
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
        >>> from experts.huggingface.layouts import from_layout, to_layout
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
    found = LayerTensors(state, names, prefix)
    sizes = found.sizes()
    read = found.read(sizes)
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
        >>> from experts.huggingface.layouts import export_layers, load_layers
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
            got=f"{len(blocks)} layers with experts, {_list_numbers(list(blocks))}",
            expected=f"{len(layers)}, as many as the model has",
        )
    for block, layer in zip(blocks.values(), layers, strict=True):
        experts = _expressible(layer, layout, router_state=False)
        shared = layer.shared.hidden if isinstance(layer.shared, SharedExpert) else None
        sizes = LayerSizes(layer.router.num_experts, experts.width, experts.hidden_E[0], shared)
        targets = layer.state_dict()
        for name, value in LayerTensors(state, names, block).read(sizes).items():
            targets[name].copy_(value * layer.router.temperature if name == "router.weight" else value)
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
    """Return every MoELayer of `module` as `to_layout` does, under the names of a complete model.

    Args:
        numbers: of the decoder layers that contain them; None counts from 0.

    Example:
        >>> from experts.config import ExpertsConfig
        >>> from experts.huggingface.layouts import export_layers
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


def _list_numbers(numbers: Sequence[int]) -> str:
    return f"numbers {', '.join(map(str, numbers))}" if numbers else "none"


class LayerTensors:
    """Index of the tensors of one layer; refuses unknown names and weights that occur twice."""

    def __init__(self, state: Mapping[str, Tensor], names: LayoutNames, prefix: str) -> None:
        self.state, self.names, self.prefix = state, names, prefix
        self.fused = prefix + GATE_UP in state or prefix + DOWN in state
        ours = {theirs: name for name, theirs in names.weights.items()}
        self.experts: dict[tuple[int, str], str] = {}
        pattern = re.compile(rf"experts\.(\d+)\.({'|'.join(ours)})\.weight")
        fixed = {GATE, GATE_UP, DOWN}
        if names.shared:
            fixed |= {SHARED_GATE, *(f"shared_expert.{theirs}.weight" for theirs in ours)}
        for full in sorted(name for name in state if name.startswith(prefix)):
            match = pattern.fullmatch(full[len(prefix) :])
            if match is None:
                if full[len(prefix) :] not in fixed:
                    raise InputError(full, got="a tensor that this layout does not have", expected="its weights only")
                continue
            expert, name = int(match[1]), ours[match[2]]
            other = prefix + (DOWN if name == "w2" else GATE_UP) if self.fused else self.experts.get((expert, name))
            if other is not None:
                raise InputError(full, got=f"expert {expert} twice, also in {other}", expected="each expert once")
            self.experts[expert, name] = full

    def sizes(self) -> LayerSizes:
        """Read the sizes from the tensors of the router, the first expert and the shared expert."""
        number, width = self._get(GATE, "the router", (None, None)).shape
        if self.fused:
            hidden = self._get(GATE_UP, "every expert", (number, None, width)).shape[1] // 2
        else:
            hidden = len(self._get(self._name(0, "w1"), "expert 0", (None, width)))
        shared = None
        if self.names.shared:
            name = f"shared_expert.{self.names.weights['w1']}.weight"
            shared = len(self._get(name, "the shared expert", (None, width)))
        return LayerSizes(number, width, hidden, shared)

    def read(self, sizes: LayerSizes) -> dict[str, Tensor]:
        """Return copies of the weights under the names of our `MoELayer`, each checked against `sizes`."""
        E, D, F = sizes.num_experts, sizes.width, sizes.hidden
        made = {"router.weight": self._get(GATE, "the router", (E, D)).clone()}
        for (expert, _), full in self.experts.items():
            if expert >= E:
                raise InputError(full, got=f"expert {expert}", expected=f"experts 0 to {E - 1}, as the router has")
        if self.fused:
            w1, w3 = self._get(GATE_UP, "every expert", (E, 2 * F, D)).split(F, dim=1)
            w2 = self._get(DOWN, "every expert", (E, D, F))
            stacks = {"w1": w1.clone(), "w2": w2.clone(), "w3": w3.clone()}
        else:
            shapes = weight_shapes(D, F, activation="swiglu")
            stacks = {
                name: torch.stack([self._get(self._name(e, name), f"expert {e}", shape) for e in range(E)])
                for name, shape in shapes.items()
            }
        made |= {f"experts.{name}": stack for name, stack in stacks.items()}
        if sizes.shared is not None:
            for name, shape in weight_shapes(D, sizes.shared, activation="swiglu").items():
                full = f"shared_expert.{self.names.weights[name]}.weight"
                made[f"shared.{name}"] = self._get(full, "the shared expert", shape).clone()
            made["shared.gate.weight"] = self._get(SHARED_GATE, "the shared expert", (1, D)).clone()
        return made

    def _name(self, expert: int, name: str) -> str:
        found = self.experts.get((expert, name))
        return found[len(self.prefix) :] if found else f"experts.{expert}.{self.names.weights[name]}.weight"

    def _get(self, name: str, owner: str, shape: tuple[int | None, ...]) -> Tensor:
        """Return one tensor, detached; None in `shape` matches any size."""
        full = self.prefix + name
        if full not in self.state:
            raise InputError(full, got="no such tensor", expected=f"the weight of {owner}")
        value = self.state[full].detach()
        fits = len(shape) == value.ndim and all(
            want in (None, have) for want, have in zip(shape, value.shape, strict=True)
        )
        if not fits or not value.is_floating_point():
            wanted = " x ".join("any" if want is None else str(want) for want in shape)
            seen = f"{' x '.join(map(str, value.shape))} of {value.dtype}"
            raise InputError(full, got=seen, expected=f"{wanted} floating-point numbers")
        return value


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
