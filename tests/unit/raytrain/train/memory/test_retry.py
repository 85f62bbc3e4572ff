"""Generators and buffers, put back after passes that do not count."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.train.memory.retry import SavedState
from raytrain.train.parallel.buffers import ForwardChanges
from raytrain.train.parallel.collectives import Workers

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


class Taught(nn.Module):
    """A frozen layer follows the other one, unseen by versions; an embedding limits the rows it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.table = nn.Embedding(5, 4, max_norm=0.1)

    def forward(self, rows: Tensor) -> Tensor:
        for own, its in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data.mul_(0.5).add_(its.data, alpha=0.5)
        return self.layer(self.table(rows)) + self.teacher(self.table(rows))


def test_parameters_that_forward_changes_are_as_before() -> None:
    module = Taught()
    changes = ForwardChanges(module, workers=Workers())
    saved, of_probe = SavedState(module, CPU, changes), SavedState(module, CPU)
    for step in range(3):  # what the first step has shown is known in the others
        for state in (saved, of_probe):
            state.take()
            before = {name: value.detach().clone() for name, value in module.named_parameters()}
            if state is saved:
                changes.before_passes()
            module(torch.tensor([step, 3]))
            assert not torch.equal(module.teacher.weight, before["teacher.weight"])
            assert not torch.equal(module.table.weight, before["table.weight"])
            state.restore()
            assert all(torch.equal(value, before[name]) for name, value in module.named_parameters()), step
        changes.before_passes()
        saved.take()
        module(torch.tensor([step, 3]))
        changes.after_passes()
    assert sorted(map(id, changes.changed())) == sorted(map(id, [*module.teacher.parameters(), module.table.weight]))


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
