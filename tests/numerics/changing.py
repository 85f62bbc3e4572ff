"""Models whose forward changes parameters or batch statistics, trained by a gang and by a plain loop in float64. Each
function for a gang is `(rank, world, ...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lab import make_session, train, train_and_save
from torch import Tensor, nn

from raytrain.checkpoint.reader import load
from raytrain.errors import InputError
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers

ROWS, FEATURES, VOCABULARY, STEPS, RATE = 14, 6, 60, 4, 0.1


def features() -> dict[str, Tensor]:
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    return {"x": x, "labels": x[:, :1] * 2 - x[:, 1:2]}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, 7), generator=torch.Generator().manual_seed(3))
    return {"x": ids, "labels": features()["labels"]}


class Net(nn.Module):
    """Two blocks with something between them, and a head."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), norm(), nn.Tanh()) for _ in "ab"
        )
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x), labels)}


# ---------------------------------------------------------------- batch norms


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(super().forward(input))


class Written(nn.BatchNorm1d):
    """The form of timm's BatchNormAct2d: its own call of the functional batch norm, then an activation."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.GELU()

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, variance, momentum = self.running_mean, self.running_var, self.momentum or 0.0
        made = F.batch_norm(
            input, mean, variance, weight=self.weight, bias=self.bias, training=self.training, momentum=momentum,
            eps=self.eps,
        )  # fmt: skip
        return self.act(made)


class OwnMaths(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / (input.var(0, correction=0) + self.eps).sqrt()


class PartlyFrozen(Net):
    """As detection backbones do: `train()` keeps the first batch norm in eval mode."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(FEATURES))

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        self.layers.get_submodule("0.1").eval()
        return self


NORMS: dict[str, Callable[[], nn.Module]] = {
    "activated": lambda: Net(lambda: Activated(FEATURES)),
    "written": lambda: Net(lambda: Written(FEATURES)),
    "cumulative": lambda: Net(lambda: nn.BatchNorm1d(FEATURES, momentum=None)),
    "no statistics": lambda: Net(lambda: nn.BatchNorm1d(FEATURES, track_running_stats=False)),
    "no weights": lambda: Net(lambda: nn.BatchNorm1d(FEATURES, affine=False)),
    "torch's": lambda: Net(lambda: nn.SyncBatchNorm(FEATURES)),
    "partly frozen": PartlyFrozen,
    "own maths": lambda: Net(lambda: OwnMaths(FEATURES)),
}


# ---------------------------------------------------------------- teachers


class Taught(Net):
    """A frozen layer follows the head in each training pass from the `begins`-th on."""

    def __init__(self, begins: int = 1) -> None:
        super().__init__()
        self.begins, self.passes = begins, 0
        self.teacher = nn.Linear(FEATURES, 1).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for own, its in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                own.mul_(0.5).add_(its, alpha=0.5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.passes += 1
            if self.passes >= self.begins:
                self.follow()
        return {"loss": super().forward(x, labels)["loss"] + F.mse_loss(self.taught(x), self.head(x).tanh())}

    def taught(self, x: Tensor) -> Tensor:
        return self.teacher(x).sum(1, keepdim=True).tanh()


class Assigned(Taught):
    """As MoCo's code does: no version of the parameter changes."""

    def follow(self) -> None:
        for own, its in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            own.data = own.data * 0.5 + its.data * 0.5


class Scaled(Taught):
    """The teacher is a batch norm in eval mode: its weight is no statistic that a norm records."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.BatchNorm1d(FEATURES).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.head.weight[0], alpha=0.5)

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.teacher.eval()
        return self


class Projected(Net):
    """Trainable weights, brought to unit length in each pass."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.head.weight.data.copy_(F.normalize(self.head.weight.data, dim=1))
        return super().forward(x, labels)


TEACHERS: dict[str, Callable[[], nn.Module]] = {
    "in place": Taught,
    "assigned": Assigned,
    "late": lambda: Taught(begins=3),
    "scaled": Scaled,
    "projected": Projected,
}


# ---------------------------------------------------------------- embeddings


class Looked(Net):
    """Embeddings before the blocks."""

    def __init__(self, *embeddings: nn.Module) -> None:
        super().__init__()
        for number, embedding in enumerate(embeddings):  # not in a list: those would be the blocks
            self.add_module(f"embedding{number}", embedding)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        looked = [part(x) for name, part in self.named_children() if name.startswith("embedding")]
        rows = torch.stack([one.mean(1) if one.ndim == 3 else one for one in looked]).sum(0)
        return super().forward(rows, labels)


def tied() -> nn.Module:
    """Two embeddings that share one weight, and one beside them."""
    made = [nn.Embedding(VOCABULARY, FEATURES, max_norm=limit) for limit in (0.8, 0.8, 1.1)]
    made[1].weight = made[0].weight
    return Looked(*made)


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "euclidean": lambda: Looked(nn.Embedding(VOCABULARY, FEATURES, max_norm=1.0)),
    "sum": lambda: Looked(nn.Embedding(VOCABULARY, FEATURES, max_norm=1.5, norm_type=1.0)),
    "bag": lambda: Looked(nn.EmbeddingBag(VOCABULARY, FEATURES, max_norm=0.7)),
    "tied": tied,
}

MODELS = {**NORMS, **TEACHERS, **EMBEDDINGS}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(5)
    return MODELS[name](), tokens() if name in EMBEDDINGS else features()


# ---------------------------------------------------------------- the two loops


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: value.double().reshape(-1).tolist() for name, value in module.state_dict().items()}


def by_torch(name: str, *, evaluated: bool = False) -> dict[str, Any]:
    """A plain loop over the whole batch."""
    net, batch = made(name)
    net.double().train()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if evaluated:
            net.eval()
            with torch.no_grad():
                net(**{key: value[:5] for key, value in batch.items()})
            net.train()
    return {"losses": losses, "state": values(net)}


def trained(
    rank: int, world_size: int, name: str, sections: dict[str, dict[str, Any]], folder: str = "", *,
    evaluated: bool = False, resume: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same by the product. With `folder` each step is saved there; `resume` continues after that one."""
    net, batch = made(name)
    data = {"train": batch, "eval": {key: value[:5] for key, value in batch.items()}}
    optim = {"name": "sgd", "momentum": 0.0, "lr": RATE, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
             "max_grad_norm": None}  # fmt: skip
    loop = {"global_batch_size": ROWS, "max_steps": STEPS, "eval_every": 1}
    session = make_session(
        {"module": net}, data if evaluated else {"train": batch, "eval_fraction": 0.0}, precision="fp64",
        optim=optim, scale=sections.get("scale", {}), loop=loop | sections.get("loop", {}),
    )  # fmt: skip
    if resume is not None:
        session.restore(load(RunFolder(folder).checkpoint_dir(resume)))
    if folder:
        rows, _ = train_and_save(session, RunFolder(folder), every=1, asynchronous=False)
    else:
        rows, _ = train(session)
    module = session.full_module()
    sent = [row["value"] for row in rows.events if row.get("what") == "buffers"]
    return {"losses": rows.losses, "state": {} if module is None else values(module), "sent": sent}


def evaluated(rank: int, world_size: int, name: str, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """With an evaluation after each step."""
    return trained(rank, world_size, name, sections, evaluated=True)


def resumed(
    rank: int, world_size: int, name: str, sections: dict[str, dict[str, Any]], folder: str, step: int
) -> dict[str, Any]:
    """The rest of a run from a checkpoint."""
    return trained(rank, world_size, name, sections, folder, resume=step)


def refused(rank: int, world_size: int, name: str, sections: dict[str, dict[str, Any]]) -> str:
    """The message of the refusal."""
    try:
        trained(rank, world_size, name, sections)
    except InputError as error:
        return str(error)
    return "trained"


class TwoAlike(Workers):
    """Two workers in one process, which have the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.ndim == 2 and len(tensor) == 2 and not tensor[1].any():  # a row for each rank
                tensor[1] = tensor[0]
            else:
                tensor.mul_(2)
