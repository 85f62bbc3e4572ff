"""Modules of users for the tests of several workers: built by name in each process, and trained in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import RaytrainError
from raytrain.train.device import seed_everything
from raytrain.trainable import Trainable
from tests.numerics.lab import make_session, train

SGD = {
    "name": "sgd", "momentum": 0.5, "lr": 0.1, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.01,
    "max_grad_norm": None,
}  # fmt: skip


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 0, 0, 1, 2, 0, 1, 1, 2, 0, 2, 1])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)])
        self.o = nn.Linear(3, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.o(x.mean((2, 3))), labels)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat) * 0.3)
        self.o = nn.Linear(6, 3)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.tensor([0.1, 0.7, 2.0, 1.0])))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.fft.irfft((torch.fft.rfft(x, dim=1) * self.turn) @ self.w, n=6, dim=1)
        return F.cross_entropy(self.o(y), labels)


class Sliced(nn.Module):
    """Weights with gaps in memory, transposed and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.t = nn.Parameter(torch.randn(6, 13)[:, 1::2]), nn.Parameter(torch.randn(3, 6).t())
        self.p = nn.Parameter(torch.randn(3, 6, 2).permute(1, 2, 0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ self.s) @ (self.t + self.p[:, 1]), labels)


class Branch(nn.Module):
    """Rows with a large first feature use a second layer, which therefore only some workers do; nobody uses a third."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.extra, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y, some = self.o(x), x[:, 0] > 0.9
        if some.any():
            y = torch.where(some[:, None], y + self.extra(x), y)
        return F.cross_entropy(y, labels)


class Domains(nn.Module):
    """A batch norm for each kind of row, of another width each, called where there are such rows."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.norms = nn.Linear(6, 3), nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(3)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        some = x[:, 0] > 0.9
        y = self.o(self.norms[0](x) if some.any() else x)
        return F.cross_entropy(self.norms[1](y), labels)


class ReadsBlock(nn.Module):
    """A number of a block's weight, read outside it: each shard would give another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.o = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = 1 + 0.1 * self.layers[0].weight.detach().norm().item()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.o(x), labels) * scale


class Mean(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.o, self.how = nn.Linear(6, 3), how

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.how(self.o(x), labels)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=logits.new_tensor([1.0, 10.0, 0.5]))


def ignoring(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=0)


def told(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    mask = (labels != 0).to(logits.dtype)
    each = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": (each * mask).sum() / mask.sum(), "weight": mask.sum()}


KINDS: dict[str, Callable[[], nn.Module]] = {
    "images": Images, "fourier": Fourier, "sliced": Sliced, "branch": Branch, "weighted": lambda: Mean(weighted),
    "domains": Domains, "reads a block": ReadsBlock, "ignoring": lambda: Mean(ignoring), "told": lambda: Mean(told),
}  # fmt: skip


def data_of(kind: str) -> dict[str, Tensor]:
    return {"x": drawn(12, 3, 5, 4) if kind == "images" else drawn(12, 6), "labels": LABELS}


def build(kind: str) -> nn.Module:
    return KINDS[kind]()


def values(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def live(rank: int, world_size: int, kind: str, sections: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Train in this process: the losses, and the state that it holds at the end."""
    loop = {"max_steps": steps, "global_batch_size": 12, **sections.get("loop", {})}
    session = make_session(
        {"builder": "tests.numerics.guests:build", "kind": kind}, {"train": data_of(kind), "eval_fraction": 0},
        precision=sections.get("dtype", "fp64"), optim=SGD, loop=loop, seed=0,
        scale={"workers": world_size, **sections.get("scale", {})},
    )  # fmt: skip
    found, _ = train(session)
    own = values(session.trainable.module) if "scale" not in sections else {}
    module = session.full_module()
    return {"losses": found.losses, "own": own, "full": {} if module is None else values(module)}


def plain(kind: str, steps: int, *, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The same in a plain loop over the whole batch."""
    seed_everything(0)
    made = build(kind)
    module = made.module if isinstance(made, Trainable) else made
    wide = {torch.float32: dtype, torch.complex64: dtype.to_complex()}
    module._apply(lambda tensor: tensor.to(wide.get(tensor.dtype, tensor.dtype)))
    batch = {name: value.to(wide.get(value.dtype, value.dtype)) for name, value in data_of(kind).items()}
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": SGD["weight_decay"]},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.SGD(groups, lr=0.1, momentum=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = module(**batch)
        loss = out["loss"] if isinstance(out, dict) else out
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "full": values(module)}


def refused(rank: int, world_size: int, kind: str, sections: Mapping[str, Any]) -> str:
    """The error that ends a run."""
    try:
        live(rank, world_size, kind, sections, 2)
    except RaytrainError as error:
        return str(error)
    return ""
