"""The process of one arm of bench `peers`.

Each peer is used as its documentation shows, without extra work: no logger, no checkpoint, no progress bar. All use the
model, the batches, the optimizer and the learning rates of the plain loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from jobs.bench.harness.processes import connect, receive
from jobs.bench.harness.sessions import PlainLoop, gpt_loop, language_loss
from jobs.bench.loop_arms import LOG_EVERY


class BlockTimer:
    """Times blocks of steps in another library's loop: call `begin` before the first step, `end_step` after each step.

    Attributes:
        over: there are no more blocks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = self._number = 0
        self._losses: list[float] = []
        self.over = False

    def begin(self) -> None:
        """Wait until the bench asks for a block."""
        self._left = receive(self._connection)["steps"]
        self.over = not self._left
        self._losses, self._began, self._cpu = [], time.perf_counter(), time.process_time()

    def end_step(self, loss: Tensor) -> None:
        """Count a step; at the end of a block, send the answer and wait for the next block."""
        self._number += 1
        self._left -= 1
        if self._number == 1 or self._number % LOG_EVERY == 0:
            self._losses.append(loss.item())
        if self._left == 0:
            seconds, cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu
            self._connection.send({"seconds": seconds, "cpu_s": cpu_s, "losses": self._losses})
            self.begin()


def accelerate(loop: PlainLoop, timer: BlockTimer) -> None:
    """Accelerate's loop."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True, mixed_precision="no")
    schedule = LambdaLR(loop.optimizer, lambda done: loop.factor(done + 1))
    model, optimizer, scheduler = accelerator.prepare(loop.model, loop.optimizer, schedule)
    timer.begin()
    while not timer.over:
        optimizer.zero_grad()
        loss = language_loss(model, next(loop.batches))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        timer.end_step(loss.detach())


def lightning(loop: PlainLoop, timer: BlockTimer) -> None:
    """Lightning's loop."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return language_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            schedule = LambdaLR(loop.optimizer, lambda done: loop.factor(done + 1))
            return {"optimizer": loop.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class EndSteps(L.Callback):
        def on_train_start(self, *_about: Any) -> None:
            timer.begin()

        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_about: Any) -> None:
            timer.end_step(outputs["loss"])
            trainer.should_stop = timer.over

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return loop.batches

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, callbacks=[EndSteps()], min_steps=None, **off
    )
    trainer.fit(Module(), train_dataloaders=Batches())


def main(settings: dict[str, Any], rank: int) -> None:
    """Run the loop of one arm until the bench sends zero steps."""
    torch.set_num_threads(settings["threads"])
    loop = gpt_loop(settings, clip="torch", rank=0, world_size=1)
    timer = BlockTimer(connect(arm=settings["arm"], rank=rank))
    {"accelerate": accelerate, "lightning": lightning}[settings["arm"]](loop, timer)
