"""What holds on every device: each test runs on the CPU always, and on a GPU where torch sees one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from raytrain.accelerator import worker_device
from raytrain.data.rows.residency import TRANSFERS
from raytrain.plan.choice import Resolved
from raytrain.train.session import Session
from raytrain.train.state import LoopState

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("kind", DEVICES)


class Rows:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.train: list[dict[str, float]] = []

    def metrics(self, row: dict[str, float]) -> None:
        if row["kind"] == "train":
            self.train.append(row)

    def event(self, kind: str, **fields: object) -> None:
        pass


def train(session: Session, precision: str) -> list[float]:
    """The losses of a short run in one precision."""
    rows = Rows()
    session.prepare(precision)
    session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    return [row["loss"] for row in rows.train]


@pytest.mark.gpu
@on_each_device
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_trains_on_each_device(tiny_job: Callable[..., Session], kind: str, precision: str) -> None:
    losses = train(tiny_job(device=kind, steps=40), precision)
    assert len(losses) == 40 and all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.gpu
@on_each_device
def test_everything_is_on_the_workers_device_index_included(tiny_job: Callable[..., Session], kind: str) -> None:
    session = tiny_job(device=kind, steps=3)
    train(session, "fp32")
    wanted = worker_device(kind, local_rank=0)
    module = session.trainable.module
    states = [state for optimizer in session.optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *moments]
    assert tensors and {tensor.device for tensor in tensors if tensor.ndim} == {wanted}
    indices, _ = session.loader.global_batch(LoopState().cursor)
    assert {value.device for value in next(iter(session.loader.micro_batches(indices))).batch.values()} == {wanted}


@pytest.mark.gpu
@on_each_device
def test_resident_and_streamed_rows_give_equal_losses(tiny_job: Callable[..., Session], kind: str) -> None:
    resident = train(tiny_job(device=kind, steps=10, storage="resident"), "fp32")
    streamed = train(tiny_job(device=kind, steps=10, storage="stream"), "fp32")
    assert resident == streamed


@pytest.mark.gpu
@on_each_device
@pytest.mark.parametrize("storage", ["pinned", "partial"])
def test_rows_copied_ahead_give_equal_losses_and_no_copy_is_waited_for(
    tiny_job: Callable[..., Session], kind: str, storage: str
) -> None:
    resident = train(tiny_job(device=kind, steps=10, storage="resident"), "fp32")
    session = tiny_job(device=kind, steps=10, storage="stream")
    chosen = {"storage": Resolved(storage, "this test"), "resident_rows": Resolved(100, "this test")}
    session.job = replace(session.job, plan=replace(session.job.plan, **chosen))
    before = replace(TRANSFERS)
    ahead = train(session, "fp32")
    session.close()
    assert ahead == resident
    copies = TRANSFERS.since(before)
    if kind == "cuda":
        assert (session.loader.uploads is not None) and copies.tensors >= 10 and copies.blocking == 0
    else:
        assert copies.tensors == 0
