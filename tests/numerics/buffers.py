"""What the processes of a gang do with models that have buffers. Each function is `(rank, world, ...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lab import Rows, by_step, class_rows, digest, make_session, optimizer_state, train_and_save
from torch import Tensor, nn

from raytrain.checkpoint.reader import load
from raytrain.execution.export import export
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

FEATURES, CLASSES = 12, 4


class Normed(nn.Module):
    """Two batch norms, whose statistics each worker records of its own rows.

    A bias before them would have no gradient but rounding, which AdamW divides by its own size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.BatchNorm1d(FEATURES)) for _ in "ab"
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = F.relu(block(x))
        return {"loss": F.cross_entropy(self.head(x), labels)}


class Centred(nn.Module):
    """A running mean of the rows that training itself subtracts: the workers' differ, and count."""

    centre: Tensor
    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(FEATURES))
        self.register_buffer("fixed", torch.ones(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.centre.data.mul_(0.9).add_(0.1 * x.mean(0))  # as code that is not seen by autograd's counters
        return {"loss": F.cross_entropy(self.head((x - self.centre) * self.fixed), labels)}


class Late(Centred):
    """Its mean stays as it is in the first eight passes, the first four steps: only a save can notice the fifth."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        before = self.centre.clone()
        made = super().forward(x, labels)
        if self.training:
            if self.passes < 8:
                self.centre.copy_(before)
            self.passes += 1
        return made


MODELS = {"normed": Normed, "centred": Centred, "late": Late}


def session_of(name: str, *, strategy: str) -> Session:
    torch.manual_seed(3)
    return make_session(
        {"module": MODELS[name]()},
        {"train": class_rows(70, features=FEATURES, classes=CLASSES), "eval": class_rows(30, seed=5)},
        loop={"max_steps": 12, "micro_batch_size": 4, "eval_every": 3},
        scale={"strategy": strategy},
    )


def trained(
    rank: int, world_size: int, name: str, folder: str, resume: int | None, every: int = 4,
    strategy: str = "data_parallel",
) -> dict[str, Any]:  # fmt: skip
    """A run, or its continuation from a checkpoint, with its export."""
    session = session_of(name, strategy=strategy)
    run = RunFolder(folder)
    if resume is not None:
        session.restore(load(run.checkpoint_dir(resume)))
    reporter, _ = train_and_save(session, run, every=every)
    module = session.full_module()
    if rank == 0 and module is not None:
        export(session, module, run)
    return {
        "losses": by_step(reporter),
        "evals": by_step(reporter, kind="eval"),
        "buffers": digest({name: tensor.clone() for name, tensor in session.trainable.module.named_buffers()}),
        "optimizer": digest(optimizer_state(session)) if strategy == "data_parallel" else "",
        "sent": [row["value"] for row in reporter.events if row.get("what") == "buffers"],
    }


def eval_loss(name: str, weights: dict[str, Tensor]) -> float:
    """Of a plain module over the whole eval split at once."""
    module = MODELS[name]()
    module.load_state_dict(weights)
    module.eval()
    rows = class_rows(30, seed=5)
    with torch.no_grad():
        return float(module(**rows)["loss"])


def exported(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "weights" / "model.safetensors")


def synchronized(rank: int, world_size: int, strategy: str, micro: int, rows: int) -> dict[str, Any]:
    """Six steps in float64 with batch norms over all workers; the last batch of an epoch has `rows` % 16 rows."""
    torch.manual_seed(3)
    session = make_session(
        {"module": Normed()},
        {"train": class_rows(rows, features=FEATURES, classes=CLASSES), "eval": class_rows(30, seed=5)},
        precision="fp64",
        loop={"max_steps": 6, "micro_batch_size": micro, "eval_every": 3},
        scale={"strategy": strategy, "sync_batchnorm": world_size > 1},
    )
    reporter = Rows()
    session.loop(reporter=reporter, should_stop=lambda: False).run(session.state)
    return {
        "losses": reporter.losses,
        "norms": reporter.of("train", "grad_norm"),
        "evals": reporter.of("eval", "loss"),
        "buffers": {name: tensor.tolist() for name, tensor in session.trainable.module.named_buffers()},
    }
