"""The models of bench `precision` as jobs, and the plain loop on the rows of such a job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cluster.devices.inventory import local_inventory
from jobs.bench.harness.plain import PlainLoop
from jobs.bench.harness.sessions import SessionArm
from raytrain.models.mlp import row_loss

if TYPE_CHECKING:
    from jobs.bench.compute.precision import PrecisionOptions

CLASSES = 10
MAX_STEPS = 100_000


def _job(options: PrecisionOptions, *, batch: int) -> dict[str, Any]:
    threads = options.threads if isinstance(options.threads, int) else local_inventory().cpus
    return {
        "name": "bench-precision",
        "seed": options.seed,
        "loop": {"max_steps": MAX_STEPS, "global_batch_size": batch, "micro_batch_size": batch, "log_every": 0},
        "scale": {"workers": 1, "mode": "cpu", "threads": threads},
    }


def perceptron_job(options: PrecisionOptions, width: int) -> dict[str, Any]:
    """Three hidden layers of `width` on drawn features, and a head of ten classes."""
    draw = torch.Generator().manual_seed(options.seed)
    rows = 4 * options.batch
    data = {
        "x": torch.randn(rows, width, generator=draw),
        "labels": torch.randint(CLASSES, (rows,), generator=draw),
    }
    return {
        **_job(options, batch=options.batch),
        "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [width] * 3, "num_classes": CLASSES},
        "data": {"train": data, "eval_fraction": 0.0},
    }


def gpt_job(options: PrecisionOptions) -> dict[str, Any]:
    """A small GPT on drawn bytes, context 64, batch 12."""
    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(97, 123, (60_000,), generator=draw, dtype=torch.uint8)
    sizes = {"layers": options.gpt_layers, "heads": 4, "width": options.gpt_width, "context": 64}
    return {
        **_job(options, batch=12),
        "model": {"builder": "raytrain.models.gpt:gpt", **sizes},
        "data": {"train": bytes(tokens.tolist()), "eval_fraction": 0.0},
    }


class PlainArm:
    """The plain loop on a perceptron job's rows, in the job's order, with its weights."""

    def __init__(self, job: dict[str, Any], precision: str) -> None:
        arm = SessionArm(job, precision="fp32")  # its weights, rows and order; never trained
        session = arm.session
        dtype = torch.bfloat16 if precision == "bf16" else None
        self.losses: list[float] = []
        self._loop = PlainLoop(
            session.trainable.module,
            lambda model, batch: row_loss(model, batch).loss,
            _rows(arm),
            max_steps=MAX_STEPS,
            autocast=dtype,
        )

    def run(self, steps: int) -> float:
        """As `SessionArm.run`."""
        began = time.perf_counter()
        losses = self._loop.run(steps, log_every=1 << 62)
        loss = self._loop.last.item()
        self.losses += [*losses, loss]
        return time.perf_counter() - began


def _rows(arm: SessionArm) -> Iterator[dict[str, Tensor]]:
    split, seed, batch, epoch = (
        arm.session.source.train,
        arm.session.job.seed,
        arm.session.loader.batches.global_batch_size,
        0,
    )
    while True:
        order = split.order(seed, epoch)
        for begin in range(0, len(order), batch):
            yield split.gather(order[begin : begin + batch])
        epoch += 1
