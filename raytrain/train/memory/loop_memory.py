"""Steps and evaluations that are taken again in smaller micro-batches where a worker had no memory for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

from raytrain.errors import RunError
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.micro_batch import MicroBatchSize
from raytrain.train.memory.oom import StepDropped
from raytrain.train.memory.undo import Undo
from raytrain.train.state import Reporter
from raytrain.train.step import TrainingStep

Made = TypeVar("Made")


class LoopMemory:
    """The loop's side of it; every worker does the same at the same moment.

    Args:
        step, feed: the loop's.
        sizing: what is in force; the feed follows it.
        reporter: told of each change.
    """

    def __init__(self, step: TrainingStep, loader: BatchLoader, *, sizing: MicroBatchSize, reporter: Reporter) -> None:
        self._loader, self._sizing, self._reporter = loader, sizing, reporter
        self._undo = Undo(step.trainable.module, step.device)
        self._use()

    def taken(self, work: Callable[[], Made], *, step: int, evaluation: bool = False) -> Made:
        """What `work` returns, which computes with the feed's micro-batches: again, with half of them, as often as it
        is dropped; generators and buffers are as before each time.

        Raises:
            RunError: there was no memory for a single row.
        """
        tries = 0
        while True:
            self._undo.take()
            began = time.perf_counter()
            try:
                return work()
            except StepDropped as error:
                dropped = StepDropped(error.shortages)  # without the traceback, which holds what the passes held
            tries += 1
            if tries > 1:  # half was too much as well: somebody's own code may hold what the passes left, in a cycle
                gc.collect()
            self._smaller(dropped, step=step, evaluation=evaluation, seconds=time.perf_counter() - began)

    def _smaller(self, dropped: StepDropped, *, step: int, evaluation: bool, seconds: float) -> None:
        exact = self._undo.put_back()
        before = self._sizing.now
        now = self._sizing.after_shortage()
        where = f"the evaluation after step {step}" if evaluation else f"step {step}"
        if now is None:
            raise RunError(
                f"out of memory in {where} with loop.micro_batch_size 1: {dropped}; there is nothing smaller to "
                "compute. A smaller model or shorter samples (model.*), loop.activation_checkpointing: true, "
                "precision.dtype: bf16 or data.storage: stream need less memory"
            )
        self._use()
        wait = self._sizing.wait
        self._reporter.event(
            "out_of_memory",
            step=step,
            during="evaluation" if evaluation else "step",
            who=[shortage.who for shortage in dropped.shortages],
            shortages=[shortage.to_json() for shortage in dropped.shortages],
            micro_batch_size_before=before,
            micro_batch_size=now,
            grow_after=wait,
            seconds=seconds,
            equal="within rounding" if exact or evaluation else "in distribution only",
            reason=f"{dropped}; {where} is taken again with micro-batches of {now} instead of {before}",
        )

    def _use(self) -> None:
        """The size in force, of rows and of a budget of tokens: of long rows the budget alone decides how many."""
        self._loader.micro_batch = self._sizing.now
        self._loader.batches.budget_part = (self._sizing.now, self._sizing.planned)

    def clean(self, *, step: int) -> None:
        """A step was taken: it may be time to try a larger size again."""
        before = self._sizing.now
        wait = self._sizing.wait
        now = self._sizing.after_clean_step()
        if now is None:
            return
        self._use()
        self._reporter.event(
            "decision",
            what="micro_batch_size",
            value=now,
            before=before,
            step=step,
            reason=f"{wait} steps without an out-of-memory (loop.grow_after): micro-batches of {now} again",
        )
