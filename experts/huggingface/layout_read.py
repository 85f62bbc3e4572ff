"""The weights of one expert layer found by name among those of a transformers model, each once and of one shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.kinds import weight_shapes
from raytrain.errors import InputError

GATE, GATE_UP, DOWN = "gate.weight", "experts.gate_up_proj", "experts.down_proj"
SHARED_GATE = "shared_expert_gate.weight"
QWEN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Names:
    """How a layout calls things.

    Attributes:
        block: the expert layer in a decoder layer.
        weights: ours -> theirs, of one expert.
        shared: whether there is a shared expert, which then has a gate.
    """

    block: str
    weights: Mapping[str, str]
    shared: bool


LAYOUTS: dict[str, Names] = {
    "mixtral": Names("block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"}, shared=False),
    "qwen2_moe": Names("mlp", QWEN, shared=True),
    "qwen3_moe": Names("mlp", QWEN, shared=False),
}


@dataclass(frozen=True)
class LayerSizes:
    """E, D, F of a layer, and F of its shared expert, None without one."""

    num_experts: int
    width: int
    hidden: int
    shared: int | None


class FoundLayer:
    """The tensors of one layer by what they are; refuses names of nothing and weights that are there twice."""

    def __init__(self, state: Mapping[str, Tensor], names: Names, prefix: str) -> None:
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
                    raise InputError(full, seen="a tensor that this layout does not have", expected="its weights only")
                continue
            expert, name = int(match[1]), ours[match[2]]
            other = prefix + (DOWN if name == "w2" else GATE_UP) if self.fused else self.experts.get((expert, name))
            if other is not None:
                raise InputError(full, seen=f"expert {expert} twice, also in {other}", expected="each expert once")
            self.experts[expert, name] = full

    def sizes(self) -> LayerSizes:
        """As the tensors themselves say: the router's, the first expert's and the shared expert's."""
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
        """The layer's weights by the names of our `MoELayer`, each of the shape that `sizes` asks for; copies."""
        E, D, F = sizes.num_experts, sizes.width, sizes.hidden
        made = {"router.weight": self._get(GATE, "the router", (E, D)).clone()}
        for (expert, _), full in self.experts.items():
            if expert >= E:
                raise InputError(full, seen=f"expert {expert}", expected=f"experts 0 to {E - 1}, as the router has")
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
        """One tensor, detached; None in `shape` is any size."""
        full = self.prefix + name
        if full not in self.state:
            raise InputError(full, seen="no such tensor", expected=f"the weight of {owner}")
        value = self.state[full].detach()
        fits = len(shape) == value.ndim and all(
            want in (None, have) for want, have in zip(shape, value.shape, strict=True)
        )
        if not fits or not value.is_floating_point():
            wanted = " x ".join("any" if want is None else str(want) for want in shape)
            seen = f"{' x '.join(map(str, value.shape))} of {value.dtype}"
            raise InputError(full, seen=seen, expected=f"{wanted} floating-point numbers")
        return value


def blocks_of(state: Mapping[str, Tensor], names: Names, *, prefix: str) -> dict[int, str]:
    """Number of each decoder layer with experts -> prefix of its names, in order."""
    found: dict[int, str] = {}
    pattern = re.compile(rf"({re.escape(prefix)}(\d+)\.({names.block}|mlp)\.)(gate\.|experts\.|shared_expert)")
    for name in state:
        match = pattern.match(name)
        if match is None:
            continue
        other = found.setdefault(int(match[2]), match[1])
        if other != match[1]:
            raise InputError(name, seen=f"layer {match[2]} twice, also as {other}*", expected="each layer once")
    return dict(sorted(found.items()))
