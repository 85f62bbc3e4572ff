"""The experts of hosts come back into the module at the end of training, on a device that has room for them.

The device "meta", which has no memory, stands in for a GPU. What is moved from there to the CPU is empty then.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import experts.distribute as distribute
from experts.config import ExpertsConfig, LayerShape
from experts.layer import MoELayer
from experts.models import moe_gpt
from raytrain.trainable import Trainable

GPU, CPU = torch.device("meta"), torch.device("cpu")
SHAPES = [LayerShape(8, (16, 16, 24), "gelu"), LayerShape(8, (16, 16, 16), "gelu")]
BYTES = 4 * sum(shape.numel(expert) for shape in SHAPES for expert in range(3))


class Client:
    """A worker's end of the exchange with hosts, which send weights of `SHAPES`."""

    discard = end_passes = shortages = begin_save = None

    def __init__(self, rank: int) -> None:
        self.member = SimpleNamespace(rank=rank, note="", workers_group=None, deaths=[])
        self.interleaver, self.shapes, self.fetched, self.ended = None, SHAPES, list[int](), False

    def fetch(self, layer: int) -> list[dict[str, Tensor]] | None:
        self.fetched.append(layer)
        shape = self.shapes[layer]
        weights = [{name: torch.ones(size) for name, size in shape.weights(e).items()} for e in range(3)]
        return None if self.member.rank else weights

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Trainable:
    """A model on a GPU whose layers have no experts here, after a backward."""
    made = moe_gpt(layers=2, heads=2, width=8, context=6, vocab_size=11, experts=ExpertsConfig(num_experts=3))
    for layer in layers_of(made):
        layer.experts = nn.Identity()
    made.module.to(GPU)
    for parameter in made.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    cast = nn.Module.to

    def to(module: nn.Module, device: torch.device | None = None, **dtype: Any) -> nn.Module:
        return cast(module, **dtype) if device is None else module.to_empty(device=device)

    monkeypatch.setattr(nn.Module, "to", to)
    return made


def layers_of(made: Trainable) -> list[MoELayer]:
    return [part for part in made.module.modules() if isinstance(part, MoELayer)]


def gathered(made: Trainable, *, rank: int = 0) -> tuple[nn.Module | None, Client]:
    client: Any = Client(rank)
    state = distribute.RemoteExpertState(client, layers_of(made), made, stacked=[], rebalancer=None)
    return state.gather_module(made.module), client


def devices(module: nn.Module | None) -> set[torch.device]:
    assert module is not None
    return {value.device for value in module.state_dict().values()}


@pytest.mark.parametrize(("room", "device"), [(BYTES, GPU), (BYTES - 1, CPU), (None, GPU)])
def test_experts_come_to_the_trunks_gpu_only_if_all_fit(
    made: Trainable, monkeypatch: pytest.MonkeyPatch, room: int | None, device: torch.device
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(distribute, "room_on", lambda device: asked.append(device) or room)
    module, client = gathered(made)
    assert devices(module) == {device} and asked == [GPU]
    assert client.fetched == [0, 1] and client.ended
    assert [layer.experts.hidden_E for layer in layers_of(made)] == [shape.hidden_E for shape in SHAPES]
    if device == CPU:
        assert not any(parameter.grad is not None for parameter in made.module.parameters())


def test_room_that_another_process_takes_meanwhile_leaves_all_of_the_model_on_the_cpu(
    made: Trainable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, torch.device]] = []
    build = distribute.empty_experts

    def taken(shape: LayerShape, hidden: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        asked.append((SHAPES.index(shape), device))
        if asked[-1] == (1, GPU):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(shape, hidden, dtype=dtype, device=device)

    monkeypatch.setattr(distribute, "room_on", lambda _device: BYTES)
    monkeypatch.setattr(distribute, "empty_experts", taken)
    module, client = gathered(made)
    assert asked == [(0, GPU), (1, GPU), (1, CPU)] and devices(module) == {CPU} and client.ended


def test_the_other_workers_look_for_no_room(made: Trainable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribute, "room_on", lambda _device: pytest.fail("only rank 0 gets the experts"))
    module, client = gathered(made, rank=1)
    assert module is None and client.fetched == [0, 1] and client.ended
