"""Layers that compute in another format than the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.train.activation_checkpointing import recompute
from raytrain.train.precision import LayerPrecision, layers_of, parts_named
from raytrain.trainable import LossOutput, Trainable

CPU = torch.device("cpu")


class Seen(nn.Linear):
    """Remembers the format of what it takes and gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.formats = (x.dtype, y.dtype)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = Seen(6, 6), Seen(6, 3)
        self.blocks = nn.ModuleList(Seen(6, 6) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x * self.gain)

    def formats(self) -> list[torch.dtype]:
        return [part.formats[1] for part in (self.first, *self.blocks, self.last)]


def run(net: Net, *, half: torch.dtype | None = torch.bfloat16) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
        return net(x)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_named_layers_compute_in_fp32_and_the_rest_as_before(half: torch.dtype) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    layers = LayerPrecision(net, CPU)
    layers.keep(["blocks.1", "last"])
    run(net, half=half).sum().backward()
    full = torch.float32
    assert net.formats() == [half, half, full, half, full]
    assert net.blocks[1].formats[0] is full, "what came in half precision is cast up"
    assert all(p.grad is not None and p.grad.dtype is full for p in net.parameters())
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    layers.keep([])
    run(net, half=half)
    assert net.formats() == [half] * 5 and "forward" not in vars(net.last), "nothing of it is left"


def test_a_module_list_means_each_entry_and_without_autocast_nothing_changes() -> None:
    net, plain = Net(), Net()
    LayerPrecision(net, CPU).keep(["blocks"])
    run(net)
    half, full = torch.bfloat16, torch.float32
    assert net.formats() == [half, full, full, full, half]
    assert torch.equal(run(net, half=None), run(plain, half=None))


def test_all_layers_in_fp32_is_fp32() -> None:
    net, plain = Net(), Net()
    LayerPrecision(net, CPU).keep(layers_of(net, blocks=None, most=9))
    assert torch.equal(run(net), run(plain, half=None))


def test_one_layer_alone_in_half_precision() -> None:
    net, plain = Net(), Net()
    exact = run(plain, half=None)
    with LayerPrecision(net, CPU).alone_in("blocks.1", torch.bfloat16):
        rounded = run(net, half=None)
    assert not torch.equal(rounded, exact) and torch.allclose(rounded, exact, rtol=0.05, atol=0.02)
    assert [f is torch.bfloat16 for f in net.formats()] == [False, False, True, False, False]
    assert net.blocks[2].formats[0] is torch.float32, "the rest takes it in fp32"
    assert torch.equal(run(net, half=None), exact)


def test_recomputed_blocks_stay_in_fp32_both_times() -> None:
    def loss(module: nn.Module, batch: dict[str, Any]) -> LossOutput:
        return LossOutput(module(batch["x"]).float().square().mean())

    gradients = []
    for again in (False, True):
        net = Net()
        trainable = Trainable(net, loss, blocks="blocks")
        if again:
            recompute(trainable)
        LayerPrecision(net, CPU).keep(["blocks.0", "last"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(net, {"x": torch.ones(4, 6)}).loss
        value.backward()
        assert net.blocks[0].formats[1] is torch.float32 and net.blocks[1].formats[1] is torch.bfloat16
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        parts_named(Net(), ["first", "block.1"])
    assert caught.value.key == "precision.fp32_layers" and caught.value.exit_code == 2
    assert "block.1" in str(caught.value) and "blocks.1" in str(caught.value)


def test_the_layers_of_a_model() -> None:
    net = Net()
    assert layers_of(net, blocks="blocks", most=9) == ["first", "last", "blocks.0", "blocks.1", "blocks.2"]
    deep = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    assert layers_of(deep, blocks="1", most=9) == ["0", "1.0.0", "1.1.0", "1.2.0"]
    assert layers_of(deep, blocks="1", most=3) == ["0", "1.0", "1.1", "1.2"], "blocks stand for what is in them"
    whole = nn.Sequential(nn.MultiheadAttention(4, 2))
    assert layers_of(whole, blocks=None, most=9) == ["0"], "what owns parameters itself is one layer"
