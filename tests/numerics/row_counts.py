"""Models and sessions about which rows a step has, and of which type; for a gang: functions of `(rank, world, ...)`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lab import make_session, train_and_save
from torch import Tensor, nn

from raytrain.checkpoint.reader import load
from raytrain.data.rows.contract import row_order
from raytrain.runs.folder import RunFolder

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
SGD |= {"max_grad_norm": None}


class Seen(nn.Module):
    """A linear model that keeps the row numbers and types it was given; with `norm`, a batch norm before it."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.line = nn.Linear(3, 1)
        self.batches: list[tuple[bool, list[int]]] = []
        self.types: set[torch.dtype] = set()

    def forward(self, x: Tensor, row: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.batches.append((self.training, row.tolist()))
        self.types |= {x.dtype, labels.dtype}
        return {"loss": F.mse_loss(self.line(self.norm(x)), labels)}


class Pairs(Seen):
    """A loss between the rows of a batch; the first `fails` training passes run out of memory."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: Tensor, row: Tensor, labels: Tensor) -> dict[str, Tensor]:
        super().forward(x, row, labels)
        if self.training and self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("planted")
        z = F.normalize(torch.cat([self.line(x), x], 1), dim=1)
        return {"loss": F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))}


class Clock(nn.Module):
    """Reads times in float64 itself, as seconds since an origin, and a float64 feature with float32 weights."""

    origin: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.line = nn.Linear(2, 1)

    def forward(self, time: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hour = ((time - 1.7e9) / 3600).to(x.dtype)
        return {"loss": F.mse_loss(self.line(torch.stack([hour, x], 1))[:, 0], labels)}


def numbered(rows: int, *, dtype: torch.dtype = torch.float32, seed: int = 3) -> dict[str, Tensor]:
    """Random features with the number of each row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=draw)
    labels = x.sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1, dtype=torch.float64, generator=draw)
    return {"x": x.to(dtype), "row": torch.arange(rows), "labels": labels.to(dtype)}


def plain_losses(module: nn.Module, batches: list[dict[str, Tensor]], *, lr: float = 0.05) -> list[float]:
    """A plain loop of SGD over these batches."""
    net, losses = copy.deepcopy(module).train(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        loss = net(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(rows: dict[str, Tensor], size: int, *, epochs: int, drop: bool = True) -> list[dict[str, Tensor]]:
    """The global batches of some epochs in raytrain's order, without the last rows of each."""
    count, found = len(rows["labels"]), []
    for epoch in range(epochs):
        order = row_order(count, seed=0, epoch=epoch)
        end = count - count % size if drop else count
        found += [{name: value[order[at : at + size]] for name, value in rows.items()} for at in range(0, end, size)]
    return found


def session_of(module: nn.Module, rows: Any, *, batch: int, eval_rows: Any = None, **more: Any) -> Any:
    """A session of SGD over these rows, for two epochs."""
    held = {"eval_fraction": 0} if eval_rows is None else {"eval": eval_rows}
    data = {"train": rows, **held, **more.pop("data", {})}
    loop = {"global_batch_size": batch, "epochs": 2, "max_steps": None, **more.pop("loop", {})}
    return make_session({"module": module}, data, optim=SGD, loop=loop, seed=0, **more)


def dropping(rank: int, world: int, folder: str, start: int | None, micro: int) -> dict[str, Any]:
    """Two epochs of 23 rows in global batches of 6, without the last 5; a checkpoint every 2 steps."""
    data, loop = {"drop_last": True}, {"micro_batch_size": micro}
    session = session_of(Seen(), numbered(23), batch=6, data=data, loop=loop)
    run = RunFolder(folder)
    if start is not None:
        session.restore(load(run.checkpoint_dir(start)))
    reporter, _ = train_and_save(session, run, every=2, asynchronous=False)
    return {"losses": reporter.losses, "rows": [rows for _, rows in session.trainable.module.batches]}


def as_arrays(rows: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The same as numpy arrays."""
    return {name: value.numpy() for name, value in rows.items()}
