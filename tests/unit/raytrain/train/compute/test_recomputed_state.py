"""Blocks whose forward changes buffers or frozen parameters, recomputed in backward, against the plain blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.train.activation_checkpointing import recompute
from raytrain.trainable import Trainable

WIDTH = 8
LARGE = 20_000
"""Elements of a buffer too large to be copied in every pass for nothing."""


class Mean(nn.Module):
    """A running mean that its own forward subtracts. Subclasses say how it is changed."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def change(self, rows: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * rows.mean(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            self.change(y.detach())
        return torch.tanh(y if self.mean is None else y - self.mean.clone() * y)


class Replaced(Mean):
    """Another tensor takes the buffer's place."""

    def change(self, rows: Tensor) -> None:
        self.mean = self.mean * 0.9 + 0.1 * rows.mean(0)


class Unversioned(Mean):
    """Changed as older code does, without autograd's version."""

    def change(self, rows: Tensor) -> None:
        self.mean.data.mul_(0.9).add_(0.1 * rows.mean(0))


class Made(Mean):
    """There is no buffer before the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = None  # pyright: ignore[reportAttributeAccessIssue]

    def change(self, rows: Tensor) -> None:
        self.mean = rows.mean(0) if self.mean is None else self.mean * 0.9 + 0.1 * rows.mean(0)


class Codebook(Mean):
    """Large, and changed by `.data`; beside a large table that never changes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(LARGE, WIDTH))
        self.register_buffer("table", torch.ones(LARGE))

    def change(self, rows: Tensor) -> None:
        self.mean.data[: len(rows)].mul_(0.9).add_(0.1 * rows)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            self.change(y.detach())
        return torch.tanh(y - self.mean[: len(y)].clone() * y * self.table[0])


class Normed(Mean):
    """Batch norms, of which the second is computed after the last tensor that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.norm(x))
        with torch.no_grad():
            self.last(y)
        return y


class Taught(nn.Module):
    """A frozen copy of its layer follows the layer in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, its in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            own.data = 0.7 * own.data + 0.3 * its.detach()
        return torch.tanh(self.layer(x) + x * self.teacher(x))


class Model(nn.Module):
    """Two blocks, each called twice in a pass."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x).square().mean()


KINDS = [Mean, Replaced, Unversioned, Made, Codebook, Normed, Taught]


def model_of(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model whose blocks are recomputed, and the same without."""
    torch.manual_seed(1)
    made = Model(kind).double()
    plain = copy.deepcopy(made)
    recompute(Trainable.from_module(made, loss=lambda module, batch: module(batch["x"])))
    return made, plain


def stepped(model: nn.Module, seed: int, *, passes: int = 2) -> list[Tensor]:
    """The loss and the gradients of several passes with their backwards, then a step; and the state after it."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = []
    for number in range(passes):
        draw = torch.Generator().manual_seed(10 * seed + number)
        loss = model(torch.randn(6, WIDTH, dtype=torch.float64, generator=draw))
        loss.backward()
        found.append(loss.detach())
    optimizer.step()
    return [*found, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_block_changes_its_state_once_and_reads_what_the_pass_read(kind: type[nn.Module]) -> None:
    made, plain = model_of(kind)
    for model in (made, plain):
        model.eval()  # with gradients, as a worker without rows under fsdp
    for step in range(4):
        for one, other in zip(stepped(made, step), stepped(plain, step), strict=True):
            assert torch.equal(one, other), (kind.__name__, step)
        if step == 0:
            made.train()
            plain.train()
    assert dict(made.named_buffers()).keys() == dict(plain.named_buffers()).keys()


def test_two_backwards_of_one_pass_read_the_same_state() -> None:
    made, plain = model_of(Mean)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for model in (made, plain):
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(made.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, made.buffers(), plain.buffers()))


def test_a_failed_recomputation_leaves_the_state_of_the_pass() -> None:
    made, plain = model_of(Mean)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    loss, expected = made(x), plain(x)
    held = {name: id(value) for name, value in made.named_buffers()}

    def fails(*_: object) -> None:
        raise ValueError("in the recomputation")

    assert torch.equal(loss, expected)
    handle = made.get_submodule("layers.1.layer").register_forward_hook(fails)
    with pytest.raises(ValueError, match="in the recomputation"):
        loss.backward()
    handle.remove()
    assert {name: id(value) for name, value in made.named_buffers()} == held
    assert all(map(torch.equal, made.buffers(), plain.buffers()))


def test_a_large_table_is_copied_in_the_first_pass_of_a_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = model_of(Codebook)
    copied: list[int] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self, **how: (copied.append(self.numel()), clone(self, **how))[1])
    counts = []
    for _ in range(3):
        copied.clear()
        F.softplus(made(torch.randn(5, WIDTH, dtype=torch.float64))).backward()
        counts.append((copied.count(LARGE), copied.count(LARGE * WIDTH)))
    calls = 4
    # each call copies the codebook before the pass and for the recomputation; the table once for each block
    assert counts == [(2 + 2, 2 * calls), (0, 2 * calls), (0, 2 * calls)]
