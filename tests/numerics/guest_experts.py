"""Models that users build around MoELayers, on one worker and on several, as sessions of this process."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from exchange import GangConnection, Scene
from lab import full_weights, make_job, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experts.config import ExpertsConfig
from experts.distribute import distribute
from experts.models import moe_layer
from experts.transport import gloo
from raytrain.train.parallel.collectives import Workers, WorkersGroup
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, Trainable

ROWS = 14
SECTION = {"num_experts": 4, "hidden": 8, "balance": "none", "z_loss_weight": 0.0}


def rows() -> dict[str, Tensor]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": 2 * x[:, :1] - x[:, 1:2]}


class Net(nn.Module):
    """Two layers of experts, called once for each pass."""

    def __init__(self, experts: ExpertsConfig) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(moe_layer(8, experts) for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = x + self.layers[number](x)[0]
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.outer(self.through(torch.tanh(self.inner(x)).unsqueeze(1)).squeeze(1)), y)


class Again(Net):
    """The first layer is called twice for each pass, the second never."""

    def through(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.layers[0](x)[0]
        return x


class NoGrad(Net):
    """Its first layer only answers."""

    def __init__(self, experts: ExpertsConfig) -> None:
        super().__init__(experts)
        self.layers[0].router.requires_grad_(False)  # type: ignore[operator, union-attr]

    def through(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.layers[0](x)[0]
        x = x + first
        return x + self.layers[1](x)[0]


class Twice(Net):
    """Two passes, as losses with two views of each row make."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.5 * super().forward(1.1 * x, y)


class Checkpointed(Net):
    """Recomputes its own layers."""

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda z, layer=layer: layer(z)[0], x, use_reentrant=False)
        return x


class Branches(Net):
    """Calls the second layer if its first row says so."""

    def through(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](x)[0]
        return x + self.layers[1](x)[0] if x[0, 0, 0] > 0 else x


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.02 * torch.stack([one.square().sum() for one in self.parameters()]).sum()


class ListedPenalty(Net):
    def __init__(self, experts: ExpertsConfig) -> None:
        super().__init__(experts)
        self.listed = [list(self.parameters())]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.02 * torch.stack([one.square().sum() for one in self.listed[0]]).sum()


class NamedPenalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.02 * self.layers[1].experts.w1.square().sum()  # type: ignore[union-attr]


class GradientPenalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x.requires_grad_(), y)
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


class Adversarial(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (towards,) = torch.autograd.grad(super().forward(x.requires_grad_(), y), x)
        return super().forward((x + 0.1 * towards.sign()).detach(), y)


class Attributes(Net):
    """Reads what its author has written on the experts, and their sizes."""

    def __init__(self, experts: ExpertsConfig) -> None:
        super().__init__(experts)
        self.layers[0].experts.gain = 0.7  # type: ignore[union-attr]

    def through(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0].experts
        return super().through(x * first.gain * len(first.hidden_E))


class Gathers(nn.Module):
    """Compares its rows with those of all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_gather

        mine, theirs = (F.normalize(layer(x), dim=1) for layer in self.layers)
        wide = F.pad(theirs, (0, 0, 0, 4 - len(x)))  # workers have up to four rows
        every = torch.cat(list(all_gather(wide)))
        return F.cross_entropy(5 * mine @ every.T, torch.arange(len(x)) + 4 * dist.get_rank())


KINDS = {
    kind.__name__: kind
    for kind in (Net, Again, NoGrad, Twice, Checkpointed, Branches, Penalty, ListedPenalty, NamedPenalty,
                 GradientPenalty, Adversarial, Attributes)
}  # fmt: skip


def build(*, kind: str, communicates: bool = False, reads: bool = False, experts: ExpertsConfig) -> Trainable:
    """A model of this kind; with `reads`, a function between steps counts its parameters."""
    made = Trainable.from_module(KINDS[kind](experts))
    made.communicates, made.blocks = communicates, "layers"
    if reads:
        made.between_steps = lambda _step: made.module.requires_grad_(True) and None
    return distribute(made, experts)


def gathers(*, communicates: bool) -> Trainable:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(module(**batch))

    return Trainable(Gathers(), loss, communicates=communicates)


def session_of(
    model: dict[str, Any], hosts: int | str = 0, *, rank: int = 0, workers: int = 1, number: int = 0, **sections: Any
) -> Session:
    """A worker's session in float64; `hosts` is 0 or "colocated", `number` separates the groups of a gang."""
    sections["loop"] = {"global_batch_size": 7, "micro_batch_size": 7, "max_steps": 4, **sections.get("loop", {})}
    sections["optim"] = {
        "name": "sgd", "momentum": 0.0, "lr": 0.1, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "max_grad_norm": None, **sections.get("optim", {}),
    }  # fmt: skip
    own = {"experts": {**SECTION, "hosts": hosts}} if model["builder"].endswith("build") else {}
    data = {"train": rows(), "eval_fraction": 0}
    job, source = make_job(model, data, world_size=workers, precision={"dtype": "fp64"}, **own, **sections)
    group, together = None, Workers()
    if workers > 1 and hosts == "colocated":
        store = dist.distributed_c10d._get_default_store()
        flags = gloo(store, f"own-{number}", rank, workers, interface="lo", timeout_s=30.0)
        group = WorkersGroup(flags, flags, lambda: None)
    if hosts == "colocated":
        connection = GangConnection(Scene(workers, hosts, number=number), rank, group)
        experts = job.builder_sections["experts"].connected(connection)
        job = replace(job, builder_sections={**job.builder_sections, "experts": experts})
    session = Session(job, workers=together, source=source)
    session.prepare(job.planned("precision"))
    return session


def record(session: Session) -> dict[str, Any]:
    reporter, _ = train(session)
    norms = reporter.of("train", "grad_norm")
    return {"loss": reporter.losses, "norm": norms, "weights": full_weights(session)}


def trained(rank: int, world_size: int, jobs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """The record of each job (model, sections), colocated on a gang where the model has experts."""
    made = []
    for number, (model, sections) in enumerate(jobs):
        hosts = "colocated" if model["builder"].endswith("build") else 0
        made.append(record(session_of(model, hosts, rank=rank, workers=world_size, number=number, **sections)))
    return made


def failed(rank: int, world_size: int, model: dict[str, Any], sections: dict[str, Any]) -> str:
    """The last line of what a job ends with."""
    try:
        trained(rank, world_size, [(model, sections)])
    except Exception:
        return traceback.format_exc().strip().splitlines()[-1]
    return ""


def all_rows(kind: str) -> Net:
    """A model of this kind as the session starts with it."""
    return session_of({"builder": "guest_experts:build", "kind": kind}).trainable.module  # type: ignore[return-value]


def same(found: dict[str, Any], wanted: dict[str, Any], *, atol: float = 1e-12) -> None:
    for column in ("loss", "norm"):
        np.testing.assert_allclose(found[column], wanted[column], rtol=0, atol=atol, err_msg=column)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, rtol=0, atol=atol, err_msg=name)
