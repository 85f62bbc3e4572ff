"""Runs of modules whose state is more than weights, for processes of a gang; they return numbers, never tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lab import digest, make_session, train_and_save
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from raytrain.checkpoint.reader import newest_valid
from raytrain.execution.export import export
from raytrain.runs.folder import RunFolder
from raytrain.train.job import place_of

STEPS, BREAK = 7, 4


class Block(nn.Module):
    """Counts its passes in training, keeps their mean as an extra state, and reads both. Its second version."""

    _version = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.seen, self.means = nn.Linear(width, width), 0, [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.means = [self.means[0] * 0.9 + 0.1 * self.linear.bias.detach().sum()]
        return x + self.linear(x).tanh() * (1 + 0.05 * self.seen) + 0.01 * self.means[0]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:  # the first version kept the negative
            state_dict[f"{prefix}linear.bias"] = -state_dict[f"{prefix}linear.bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "means": self.means, "why": ("a test", None, float("inf"))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["why"] == ("a test", None, float("inf"))
        self.seen, self.means = state["seen"], list(state["means"])


class Counting(nn.Module):
    """Two such blocks, and a table of whole numbers, whose dtype no collective knows."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)
        self.register_buffer("table", torch.arange(1, 4).to(torch.uint16))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(self.head(x) * self.table[1].float(), labels)}


class NormBlock(nn.Module):
    """Two of torch's parametrizations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = weight_norm(nn.Linear(width, width)), spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Normed(nn.Module):
    """Weights that are computed in every pass."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormBlock(width) for _ in range(2)])
        self.last, self.head = orthogonal(nn.Linear(width, width)), nn.Linear(width, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(self.head(self.last(x)), labels)}


def rows() -> dict[str, Tensor]:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(3))
    return {"x": x, "labels": x[:, :1] * 2 - x[:, 1:2] * x[:, 2:3]}


def made(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return Counting() if kind == "counting" else Normed()


def life(
    rank: int, world_size: int, kind: str, strategy: str, path: str, until: int = STEPS, resumed: bool = False
) -> dict[str, Any]:
    """Losses by step, the state at the end, and the exported weights of a run that ends after `until` steps."""
    run = RunFolder(path)
    session = make_session(
        {"module": made(kind)}, {"train": rows(), "eval_fraction": 0}, scale={"strategy": strategy},
        loop={"max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2},
    )  # fmt: skip
    if resumed:
        found = newest_valid(run, place=place_of(session.job, rank=rank, world_size=world_size)).checkpoint
        assert found is not None
        session.restore(found)
    begun = session.state.step
    reporter, _ = train_and_save(session, run, every=BREAK, should_stop=lambda: session.state.step >= until)
    module = session.full_module()
    if module is not None and rank == 0 and until == STEPS:
        export(session, module, run)
    exported = Path(run.weights).exists()
    return {"losses": reporter.losses, "from": begun, "state": "" if module is None else digest(module.state_dict()),
            "exported": str(run.weights) if exported else ""}  # fmt: skip
