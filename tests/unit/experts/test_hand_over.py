"""Experts that other processes cannot keep as their author wrote them are refused by name before they leave."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from experts.config import ExpertsConfig, LayerShape
from experts.distribute import distribute
from experts.grouped import GroupedExperts
from experts.layer import MoELayer
from experts.models import moe_layer
from raytrain.errors import InputError
from raytrain.trainable import Trainable

SECTION = ExpertsConfig(num_experts=3, hidden=[4, 4, 6], bias=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.layers = nn.ModuleList([moe_layer(8, SECTION), moe_layer(8, SECTION.model_copy(update={"hidden": 4}))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


class JoinedTo(Exception):
    """A builder's experts leave, with these shapes."""


class Asks:
    """A connection to hosts that are not there: it says which shapes would join."""

    def __init__(self, *, trains: bool = True) -> None:
        self.trains = trains

    def join(self, shapes: list[LayerShape], _rules: Any) -> Any:
        raise JoinedTo(shapes)


def shapes_of(change: Callable[[Net], None], *, trains: bool = True, **fields: Any) -> list[LayerShape]:
    """The shapes that would leave after the author's change of the model, which follows `distribute`."""
    net = Net()
    trainable = distribute(Trainable.from_module(net), SECTION.connected(Asks(trains=trains)))
    change(net)
    for name, value in fields.items():
        setattr(trainable, name, value)
    assert trainable.hand_over is not None
    with pytest.raises(JoinedTo) as caught:
        trainable.hand_over(trainable)
    return caught.value.args[0]


class Doubled(GroupedExperts):
    def forward(self, *args: Any) -> Tensor:
        return 2 * super().forward(*args)


def experts_of(net: Net, number: int = 1) -> Any:
    layer = net.layers[number]
    assert isinstance(layer, MoELayer)
    return layer.experts


def tie(net: Net) -> None:
    experts_of(net).w1 = net.other = nn.Parameter(torch.zeros(3, 4, 8))


def share(net: Net) -> None:
    net.layers.append(MoELayer(net.layers[1].router, experts_of(net)))  # type: ignore[arg-type]


def replace_forward(net: Net) -> None:
    experts = experts_of(net)
    experts.forward = MethodType(lambda own, *args: 2 * GroupedExperts.forward(own, *args), experts)


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "hook": (lambda net: experts_of(net).w2.register_hook(lambda g: g), r"experts\.w2 with a hook"),
    "hook of an uneven one": (
        lambda net: experts_of(net, 0).runs[1].b1.register_hook(lambda g: g),
        r"0\.experts\.runs\.1\.b1 with a h",
    ),
    "hook after": (
        lambda net: experts_of(net).w1.register_post_accumulate_grad_hook(lambda p: None),
        r"experts\.w1 with a",
    ),
    "forward hook": (
        lambda net: experts_of(net).register_forward_hook(lambda *a: None),
        r"experts with its own forward_hooks",
    ),
    "hook before the forward of a run": (
        lambda net: experts_of(net, 0).runs[0].register_forward_pre_hook(lambda *a: None),
        r"0\.experts\.runs\.0 with its own forward_pre_hooks",
    ),
    "backward hook": (
        lambda net: experts_of(net).register_full_backward_hook(lambda *a: None),
        r"experts with its own backward",
    ),
    "own forward": (replace_forward, r"experts with its own forward"),
    "subclass": (lambda net: setattr(net.layers[1], "experts", Doubled(3, 8, 4)), r"Doubled as the .*layers\.1"),
    "parametrized": (lambda net: parametrizations.weight_norm(experts_of(net), "w1"), r"GroupedExperts as .*layers\.1"),
    "weight norm": (lambda net: weight_norm(experts_of(net), "w1"), r"experts with other tensors .*w1"),
    "more weights": (lambda net: setattr(experts_of(net), "gain", nn.Parameter(torch.ones(3))), r"experts with .*gain"),
    "buffer": (lambda net: experts_of(net).register_buffer("mask", torch.ones(3)), r"experts with other .*mask"),
    "tied": (tie, r"got other, which is also a weight of the experts"),
    "shared": (share, r"experts\.w1, which is also a weight"),
    "in a list": (
        lambda net: setattr(net, "all", nn.ModuleList([experts_of(net)])),
        r"got all\.0\.w1, which is also a weight",
    ),
    "nothing else": (
        lambda net: [p.requires_grad_(".experts." in name) for name, p in net.named_parameters()],
        "nothing but its experts",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", list(CHANGES))
def test_what_would_be_lost_is_refused_by_name(name: str) -> None:
    change, said = CHANGES[name]
    with pytest.raises(InputError, match=said) as caught:
        shapes_of(change)
    assert "experts.hosts 0" in str(caught.value)


@pytest.mark.parametrize("part", ["optimizers", "agree"])
def test_an_own_optimizer_or_agreement_is_refused(part: str) -> None:
    with pytest.raises(InputError, match=rf"experts\.hosts: .*its own {part}.*Trainable\.{part} None"):
        shapes_of(lambda net: None, **{part: lambda *_: []})
    assert shapes_of(lambda net: None, trains=False, **{part: lambda *_: []}), "answers need neither"


def test_what_is_frozen_after_distribute_leaves_with_the_experts() -> None:
    def freeze(net: Net) -> None:
        experts_of(net, 0).runs[1].requires_grad_(False)
        experts_of(net).b2.requires_grad_(False)

    plain, frozen = shapes_of(lambda net: None), shapes_of(freeze)
    assert [shape.frozen_E for shape in plain] == [(), ()]
    uneven, even = frozen
    assert uneven.frozen_E == ((), (), ("w1", "w2", "b1", "b2")) and uneven.trained(2) == {}
    assert even.frozen_E == (("b2",),) * 3 and set(even.trained(1)) == {"w1", "w2", "b1"}
    assert [shape.name for shape in frozen] == ["layers.0", "layers.1"]
    assert [LayerShape.from_json(shape.to_json()) for shape in frozen] == frozen


def test_a_layer_called_by_two_names_is_one_layer() -> None:
    def again(net: Net) -> None:
        net.layers.append(net.layers[0])

    assert [shape.name for shape in shapes_of(again)] == ["layers.0", "layers.1"]
