"""The plain loop of bench `precision`, on the rows of a job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness.plain import PlainLoop
from jobs.bench.harness.sessions import SessionArm
from raytrain.models.mlp import row_loss


class PlainArm:
    """The plain loop on a perceptron job's rows, in the job's order, with its weights."""

    def __init__(self, job: dict[str, Any], precision: str) -> None:
        arm = SessionArm(job, precision="fp32")  # for its weights, rows and order; never trained
        session = arm.session
        dtype = torch.bfloat16 if precision == "bf16" else None
        self.losses: list[float] = []
        self._loop = PlainLoop(
            session.trainable.module,
            lambda model, batch: row_loss(model, batch).loss,
            _rows(arm),
            max_steps=job["loop"]["max_steps"],
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
