"""Generators and buffers, put back after passes that do not count."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.train.memory.retry import SavedState

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Counts, draws and learns in its forward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor in its place
        return self.norm(x)


def test_generators_and_buffers_are_as_before() -> None:
    module = Counting()
    saved = SavedState(module, CPU)
    for _ in range(2):  # the second time over the same buffers
        saved.take()
        before = {name: value.clone() for name, value in module.named_buffers()}
        places = {name: id(value) for name, value in module.named_buffers()}
        drawn = (float(torch.rand(())), float(np.random.rand()), random.random())
        module(torch.randn(8, 4))
        assert int(module.calls) != int(before["calls"])
        assert saved.restore() is False
        assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())
        assert {name: id(value) for name, value in module.named_buffers()} == places
        assert (float(torch.rand(())), float(np.random.rand()), random.random()) == drawn
        module(torch.randn(8, 4))


def test_a_model_without_random_numbers_gives_the_same_results() -> None:
    module = nn.Linear(3, 3)
    saved = SavedState(module, CPU)
    saved.take()
    module(torch.ones(2, 3))
    assert saved.restore() is True
    random.random()
    assert saved.restore() is False


def test_a_random_draw_after_many_steps_without_one_is_detected() -> None:
    saved = SavedState(nn.Linear(3, 3), CPU)
    for _ in range(6):
        saved.take()
    np.random.rand()  # between two steps, or in this one: nobody knows
    after = np.random.get_state()
    assert saved.restore() is False
    assert all(map(np.array_equal, np.random.get_state(), after))
    saved.take()
    before, drawn = np.random.get_state(), np.random.rand()
    assert saved.restore() is False and all(map(np.array_equal, np.random.get_state(), before))
    assert np.random.rand() == drawn
