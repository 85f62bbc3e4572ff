"""Models that are hard to shard, and runs of them, for processes of a gang; they return numbers, never tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lab import full_weights, make_session, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from jobs.driver.check_job import check_on_driver
from jobs.job.spec import load_spec
from raytrain.errors import InputError, RaytrainError
from raytrain.train.parallel.order import BlockOrder
from raytrain.train.session import Session
from raytrain.trainable import Trainable

ROWS, STEPS = 12, 5


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Four blocks and a head; `order` names the blocks that a pass calls."""

    def __init__(self, order: Callable[[Net], list[int]] = lambda _net: [0, 1, 2, 3]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(6, 1)
        self.extra = nn.Linear(6, 1)
        self.order, self.step, self.passes = order, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        for index in self.order(self):
            x = self.layers[index](x)
        return self.head(x)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def drawn(net: Net) -> list[int]:
    """Layer drop: the same draw on all workers, another one in each step, none in evaluation."""
    draw = torch.rand(4, generator=torch.Generator().manual_seed(net.step)) > 0.4
    return [index for index in range(4) if draw[index] or not net.training]


ORDERS: dict[str, Callable[[Net], list[int]]] = {
    "swapped": lambda net: [0, 1, 2, 3] if rank() == 0 else [0, 2, 1, 3],
    "short": lambda net: [0, 1, 2, 3] if rank() == 0 else [0, 1, 2],
    "in evaluation": lambda net: [0, 1, 2, 3] if net.training or rank() == 0 else [0, 1, 2],
    "later": lambda net: [0, 1, 2, 3] if rank() == 0 or net.step < 2 or not net.training else [0, 2, 1, 3],
    "drawn": drawn,
    "twice": lambda net: [0, 1, 2, 3, 1, 0],
    "steady": lambda net: [0, 1, 2, 3],
}


def ordered(kind: str) -> Trainable:
    net = Net(ORDERS[kind])
    made = Trainable.from_module(net, loss=lambda module, batch: mse_loss(module(batch["x"]), batch["labels"]))
    made.between_steps = lambda step: setattr(net, "step", step)
    return made


def attached() -> Trainable:
    """Hooks that close over their parameter, and attributes that forward and the optimizer read."""
    net = Net()
    for layer in net.layers:
        weight: Any = layer.up.weight  # pyright: ignore
        weight.register_hook(lambda g, weight=weight: torch.cat([torch.zeros_like(g[:3]), g[3:] + 0.1 * weight[3:]]))
    net.head.weight.slow, net.extra.weight.share = True, 0.25  # pyright: ignore
    net.head.bias.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mse_loss(module(batch["x"]), batch["labels"])

    forward = net.extra.forward
    net.extra.forward = lambda x: forward(x) * net.extra.weight.share  # pyright: ignore
    net.head.register_forward_hook(lambda _module, given, output: output + net.extra(given[0]))

    def optimizers(module: nn.Module, optim: Any) -> list[torch.optim.Optimizer]:
        slow = [one for one in module.parameters() if getattr(one, "slow", False)]
        assert len(slow) == 1
        fast = [one for one in module.parameters() if one is not slow[0]]
        return [torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": fast, "lr": 0.1}], lr=0.1)]

    made = Trainable.from_module(net, loss=loss)
    made.optimizers = optimizers
    return made


class Sometimes(Net):
    """Parameters that some steps, or some workers, do not use."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = x[:, 0] < -1.2
        for index in [0, 1, 2] if self.step % 2 == 0 else [0, 1, 2, 3]:
            x = self.layers[index](x)
        y = self.head(x)
        if self.step % 2 == 0 and rows.any():
            y = y.index_add(0, rows.nonzero()[:, 0], self.extra(x[rows]))
        return mse_loss(y, labels)


def sometimes() -> Trainable:
    net = Sometimes()
    made = Trainable.from_module(net, loss=lambda module, batch: module(**batch))
    made.between_steps = lambda step: setattr(net, "step", step)
    return made


def rows(count: int = ROWS, seed: int = 1) -> dict[str, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "labels": x[:, :1] * 2 - x[:, 1:2]}


OPTIM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": None, "schedule": "constant"}


def session_of(builder: str, strategy: str = "fsdp", *, evaluate: int = 0, **sections: Any) -> Session:
    name, _, kind = builder.partition(" ")
    model = {"builder": f"unshardable:{name}", **({"kind": kind} if kind else {})}
    data = {"train": rows(), **({"eval": rows(evaluate, seed=2)} if evaluate else {"eval_fraction": 0})}
    loop = {"max_steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": 2, "eval_every": 2}
    optim = {**OPTIM, "warmup_steps": 0, **sections.pop("optim", {})}
    return make_session(
        model, data, precision="fp64", scale={"strategy": strategy}, optim=optim,
        loop={**loop, **sections.pop("loop", {})}, **sections,
    )  # fmt: skip


def found(session: Session) -> dict[str, Any]:
    told, _ = train(session)
    return {"losses": told.losses, "norms": told.of("train", "grad_norm"), "evals": told.of("eval", "loss"),
            "weights": full_weights(session)}  # fmt: skip


def trained(_rank: int, _world: int, builder: str, strategy: str, sections: dict[str, Any]) -> dict[str, Any]:
    return found(session_of(builder, strategy, **sections))


def failed(_rank: int, _world: int, kind: str, patience_s: float) -> tuple[str, str, int]:
    """The error of each worker: (its type, its words, steps committed before it)."""
    assert BlockOrder.__init__.__kwdefaults__ is not None
    BlockOrder.__init__.__kwdefaults__["patience_s"] = patience_s
    session = session_of(f"ordered {kind}", evaluate=2)
    try:
        train(session)
    except RaytrainError as error:
        dist.destroy_process_group()  # as the end of the process does: others may wait
        return type(error).__name__, str(error), session.state.step
    return "", "", session.state.step


def exchanges(_rank: int, _world: int, kind: str) -> list[int]:
    """How often a worker has asked the others, after each step."""
    session, counts = session_of(f"ordered {kind}"), []
    order: Any = session.strategy.passes.order  # pyright: ignore
    inner, number = order._compare, [0]

    def compare(*given: Any) -> None:
        number[0] += 1
        inner(*given)

    order._compare = compare
    after = session.trainable.between_steps
    assert after is not None
    session.trainable.between_steps = lambda step: (after(step), counts.append(number[0]))  # pyright: ignore
    train(session)
    return counts


# ---------------------------------------------------------------- the driver's comparison


class Guest(Net):
    """Is another model where its blocks are sharded, except for the kinds "same" and "random"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.BatchNorm1d(6)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        apart = isinstance(self.layers[0].up.weight, DTensor)  # pyright: ignore
        kind = self.kind if apart else ""
        if kind == "ends":
            os.kill(os.getpid(), 9)
        if kind == "fails":
            raise ValueError("no shards here")
        y = super().forward(self.norm(x))
        if kind == "state":
            self.seen += 1.0
        if kind == "gradient":
            y = 0.01 * y.detach() + 0.99 * y
        if self.kind == "random":
            y = y * (1.0 + time.perf_counter() % 1.0)
        return mse_loss(y, labels) / self.passes + float(kind == "loss")


def guest(kind: str) -> nn.Module:
    return Guest(kind)


def guest_rows() -> dict[str, Any]:
    return {"train": rows(), "eval": rows(7, seed=2)}


def checked(_rank: int, _world: int, kinds: list[str], precision: str) -> list[tuple[str, str]]:
    """(key, words) of the error with which the driver refuses each kind under fsdp, ("", "") without one. In a new
    process: one that has run a backward pass cannot try another in a fork."""
    answers = []
    for kind in kinds:
        job = {
            "model": {"builder": "unshardable:guest", "kind": kind}, "data": {"source": "unshardable:guest_rows"},
            "scale": {"strategy": "fsdp", "mode": "cpu"}, "precision": {"dtype": precision},
        }  # fmt: skip
        try:
            assert check_on_driver(load_spec(None, mapping=job).spec).note is None
            answers.append(("", ""))
        except InputError as error:
            answers.append((error.key, str(error)))
    return answers
