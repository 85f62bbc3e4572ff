"""Arms of benches in this process: a session of raytrain without Ray, the plain PyTorch loop beside it, and what both
train on.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobs.bench.harness.measuring import BenchMeasurement
from jobs.bench.harness.options import BenchOptions, TextOptions
from jobs.driver.build import kept_for_backward
from jobs.driver.local_session import session_of
from raytrain.execution.reporter import SilentReporter

# ---------------------------------------------------------------- plain
# The plain PyTorch loop that raytrain is compared with: a hand-written script that uses nothing of raytrain.


LR, WEIGHT_DECAY, BETAS = 1e-3, 0.1, (0.9, 0.99)
"""The defaults of a job."""


class PlainLoop:
    """Forward, backward, clip, AdamW and a learning-rate schedule, as in a script of forty lines.

    Args:
        module: the model, on its device.
        loss: `loss(model, batch)` -> scalar; `model` is the module, or DDP around it.
        batches: an endless iterator.
        clip: "torch" for `clip_grad_norm_`; "rows" for raytrain's norm, the same to the last bit.
        ddp: wrap the module in DistributedDataParallel.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Iterator[Any], *, max_steps: int,
        clip: str = "rows", ddp: bool = False,
    ) -> None:  # fmt: skip
        self.parameters = list(module.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        self.model = DistributedDataParallel(module) if ddp else module
        self.loss, self.batches, self.clip = loss, batches, clip
        self.max_steps, self.warmup, self.done = max_steps, min(100, max_steps // 20), 0

    def step(self) -> Tensor:
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR * self.factor(self.done)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, next(self.batches))
        loss.backward()
        if self.clip == "rows":
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            rows = [torch.linalg.vector_norm(one.view(-1, one.shape[-1]), dim=1) for one in gradients]
            norm = torch.cat(rows).double().square().sum().sqrt()
            factor = (1.0 / (norm + 1e-6)).clamp(max=1.0).float()
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        else:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def factor(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        if step <= self.warmup:
            return step / (self.warmup + 1)
        done = min(1.0, (step - self.warmup - 1) / max(1, self.max_steps - self.warmup - 1))
        return 0.1 + 0.5 * 0.9 * (1.0 + math.cos(math.pi * done))

    def run(self, steps: int) -> list[float]:
        """Train `steps` steps; returns the global loss of the first and of every tenth, as a job logs them."""
        losses = []
        for _ in range(steps):
            loss = self.step()
            if self.done == 1 or self.done % 10 == 0:
                if dist.is_initialized():
                    dist.all_reduce(loss)
                    loss = loss / dist.get_world_size()
                losses.append(loss.item())
        return losses


# ---------------------------------------------------------------- sessions

#: Where the arms of this process compute.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


class RunLog(SilentReporter):
    """A reporter that records the loss and the peak memory of each logged step, and the events."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.losses.append(row["loss"])
            self.peaks.append(row["peak_memory_bytes"])

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


class SessionArm:
    """A prepared session whose loop runs a block of steps at a time; `connection` as for `session_of`."""

    def __init__(self, job: Mapping[str, Any], *, precision: str = "fp32", connection: Any = None) -> None:
        self.session = session_of(job, connection=connection)
        self.session.prepare(precision)
        self.log = RunLog()
        self.loop = self.session.loop(reporter=self.log, should_stop=lambda: False)

    @property
    def losses(self) -> list[float]:
        return self.log.losses

    def run(self, steps: int) -> float:
        """Train `steps` more steps; returns the seconds. The last step is logged, which synchronizes the device."""
        self.loop.limits = replace(self.loop.limits, max_steps=self.session.state.step + steps)
        return timed(lambda: self.loop.run(self.session.state))


def alternate_steps(
    found: BenchMeasurement, arms: Mapping[str, Any], *, steps: int, blocks: int, named: str = "{}"
) -> dict[str, list[float]]:
    """Train blocks of `steps` steps of each arm in turn, by its `run(steps)`; returns the seconds per step, see
    `BenchMeasurement.alternate`."""
    blocks_of = {name: lambda arm=arm: arm.run(steps) / steps for name, arm in arms.items()}
    return found.alternate(blocks_of, blocks=blocks, named=named)


@contextlib.contextmanager
def restored_threads(threads: int | None = None) -> Iterator[None]:
    """Restores torch's number of threads on exit; sets it to `threads` inside, if given."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def saved_for_backward(module: nn.Module, forward: Callable[[], Any]) -> int:
    """The bytes that autograd saves for backward in `forward`, without parameters, each storage once."""
    with kept_for_backward(module.parameters()) as kept:
        _kept_alive = forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# ---------------------------------------------------------------- inputs
# Generated training data, and the jobs that train on it.

MAX_TOKENS = 1_000_000


def job_of(
    options: BenchOptions, model: dict[str, Any], data: Any, *, name: str, loop: dict[str, Any], workers: int = 1,
    threads: int = 1, **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A job on the CPU that trains on all of its data, which is the path of a text or is given as `data.train`."""
    source = {"source": "text", "path": str(data)} if isinstance(data, Path) else {"train": data}
    return {
        "name": f"bench-{name}",
        "seed": options.seed,
        "model": model,
        "data": {**source, "eval_fraction": 0.0},
        "loop": {"max_steps": 1_000_000, **loop},
        "scale": {"workers": workers, "mode": "cpu", "threads": threads, **sections.pop("scale", {})},
        **sections,
    }


def gpt_model(options: BenchOptions, *, builder: str = "raytrain.models.gpt:gpt", **sizes: int) -> dict[str, Any]:
    """The section `model` of a GPT with the sizes of the options, over four heads."""
    own = options.model_dump(include={"layers", "heads", "width", "context"})
    return {"builder": builder, "heads": 4, **own, **sizes}


def perceptron_model(width: int, *, classes: int) -> dict[str, Any]:
    """The section `model` of a perceptron with three hidden layers."""
    return {"builder": "raytrain.models.mlp:mlp", "hidden": [width] * 3, "num_classes": classes}


def draw_bytes(seed: int, size: int = 60_000) -> bytes:
    draw = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(97, 123, (size,), generator=draw, dtype=torch.uint8).tolist())


def draw_rows(rows: int, features: int, *, classes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random features "x", (rows, features), with random "labels"."""
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, features, generator=draw), "labels": torch.randint(classes, (rows,), generator=draw)}


def write_text(folder: Path, options: TextOptions, *, steps: int) -> Path:
    """Write random letters and return their path. Their windows fill every step of an epoch, which has `steps` steps if
    that is not too long: the plain loop has no shorter last batch."""
    rows = options.batch * max(1, min(steps, MAX_TOKENS // (options.batch * options.context)))
    path = folder / "text.txt"
    path.write_bytes(draw_bytes(options.seed, options.context * (rows + 1)))
    return path
