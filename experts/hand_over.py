"""What the author of a model said about its experts and other processes cannot keep: refused before they leave."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import nn

from experts.config import LayerShape
from experts.exchange.dispatch import REMEDY
from experts.grouped import GroupedExperts, UnevenExperts
from experts.layer import MoELayer
from experts.member.shard import stacked_names
from raytrain.errors import InputError
from raytrain.trainable import Trainable


def shape_of(experts: nn.Module, name: str) -> LayerShape:
    """The shape of the experts of the layer of this name. Raises InputError: they cannot move to other processes."""
    if type(experts) not in (GroupedExperts, UnevenExperts):
        raise InputError(
            "model.builder", got=f"{type(experts).__name__} as the experts of a MoELayer ({name})",
            expected="experts of experts.grouped, which can move to other processes",
            remedy="experts.hosts 0 keeps any module inside the workers",
        )  # fmt: skip
    assert isinstance(experts, GroupedExperts | UnevenExperts)
    stacks = [experts.slot(expert)[0] for expert in range(len(experts.hidden_E))]
    frozen = tuple(
        tuple(weight for weight in stack.names if not getattr(getattr(stack, weight, None), "requires_grad", True))
        for stack in stacks
    )
    kind = experts.activation, experts.bias, frozen if any(frozen) else ()
    return LayerShape(experts.width, experts.hidden_E, *kind, name=name)


def check_hand_over(
    trainable: Trainable, layers: Mapping[str, MoELayer], shapes: list[LayerShape], *, trains: bool
) -> None:
    """Refuse what would be lost when the experts of these layers, by name, move to other processes.

    Args:
        trains: False where the experts only answer, so that gradients and optimizers do not matter.

    Raises:
        InputError: naming the layer, or the part of the Trainable.
    """
    numbers = {id(layer): number for number, layer in enumerate(dict.fromkeys(layers.values()))}
    for name, layer in layers.items():
        experts, place, shape = layer.experts, f"{name}.experts".lstrip("."), shapes[numbers[id(layer)]]
        own = {f"{place}.{one}" for one, _ in chain(experts.named_parameters(), experts.named_buffers())}
        odd = sorted(own ^ set(stacked_names(place, 0, shape)))
        if odd:
            raise _refused(f"{place} with other tensors than it was built with ({odd[0]})", "those of GroupedExperts")
        for path, part in experts.named_modules():
            for key, value in vars(part).items():
                if (key.endswith("_hooks") and value) or callable(value):
                    raise _refused(f"{place}{path and '.'}{path} with its own {key.strip('_')}", "experts without it")
        for path, parameter in experts.named_parameters():
            if trains and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
                raise _refused(f"{place}.{path} with a hook on its gradient", "weights of experts without hooks")
    holders = {id(one): layer for layer in layers.values() for one in layer.experts.parameters()}
    for name, parameter in trainable.module.named_parameters(remove_duplicate=False):
        layer = holders.get(id(parameter))
        if layer is not None and layers.get(name.rpartition(".experts.")[0]) is not layer:
            raise _refused(f"{name}, which is also a weight of the experts of a MoELayer", "a weight of its own")
    if not trains:
        return
    for part in ("optimizers", "agree"):
        if getattr(trainable, part) is not None:
            got = f"a Trainable with its own {part}, which the holders of the experts do not have"
            raise _refused(got, "the optimizer of the section optim", remedy=f"leave Trainable.{part} None, or ")
    if not any(one.requires_grad and id(one) not in holders for one in trainable.module.parameters()):
        raise _refused("a model that trains nothing but its experts", "a trained parameter in the workers")


def _refused(got: str, expected: str, remedy: str = "") -> InputError:
    return InputError("experts.hosts", got=got, expected=f"0, or {expected}", remedy=remedy + REMEDY)
