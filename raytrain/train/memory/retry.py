"""Retries a step or an evaluation in smaller micro-batches after an out-of-memory error, and grows them back
after clean steps.

The global batch, its order and the gradient do not change, only the number of micro-batches that compute them.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain.accelerator import gpu_module, on_gpu
from raytrain.errors import RunError
from raytrain.plan.batch import halved
from raytrain.train.memory.device import StepDropped
from raytrain.train.placing import may_change

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader
    from raytrain.train.parallel.buffers import ForwardChanges
    from raytrain.train.state import Reporter
    from raytrain.train.step import TrainingStep

Result = TypeVar("Result")

#: After this many steps in a row without a draw from numpy's or Python's generator, their states are no longer saved.
QUIET_STEPS = 3

NOT_SPLIT = (
    "loop.micro_batch_size whole forbids to split the global batch: lower loop.global_batch_size, set "
    "loop.activation_checkpointing, or set a smaller loop.micro_batch_size, which changes what a loss over the whole "
    "batch is computed from"
)


class MicroBatchSize:
    """The current micro-batch size; a pure function of the calls, so equal in all processes with equal calls.

    It grows back through the sizes it left, one at a time, each after `grow_after` clean steps. Each repeated failure
    of a size doubles the wait before it is tried again, until the size has worked for as many steps as that wait.

    Args:
        planned: rows of a micro-batch at the start of the run; also the maximum. The current size is `now`.
        grow_after: clean steps before the next larger size is tried; None never grows.
        whole: it must not be split (`loop.micro_batch_size: whole`).
    """

    def __init__(self, planned: int, *, grow_after: int | None, whole: bool = False) -> None:
        self.planned = self.now = planned
        self.whole = whole
        self._grow_after = grow_after
        self._left: list[int] = []
        self._failures: dict[int, int] = {}
        self._clean = 0

    def after_shortage(self) -> int | None:
        """Switch to the next smaller size and return it; None if there is none."""
        if self.now == 1 or self.whole:
            return None
        self._failures[self.now] = self._failures.get(self.now, 0) + 1
        self._left.append(self.now)
        self.now, self._clean = halved(self.now), 0
        return self.now

    def after_clean_step(self) -> int | None:
        """Count a clean step; if it is time to grow, switch to the next larger size and return it, else None."""
        if self._grow_after is None:
            return None
        self._clean += 1
        if self._clean >= self._wait_for(self.now):
            self._failures.pop(self.now, None)
        if self.wait is None or self._clean < self.wait:
            return None
        self.now, self._clean = self._left.pop(), 0
        return self.now

    @property
    def wait(self) -> int | None:
        """Clean steps required before the next larger size; None if the size cannot grow."""
        return self._wait_for(self._left[-1]) if self._grow_after is not None and self._left else None

    def _wait_for(self, size: int) -> int:
        return (self._grow_after or 0) * 2 ** max(0, self._failures.get(size, 0) - 1)


class ShortageRetry:
    """Runs the loop's steps and evaluations, and retries those that were dropped; every worker does the same. The
    loader follows the `sizing`; `forget` frees what is kept for the size before."""

    def __init__(
        self, step: TrainingStep, loader: BatchLoader, *, sizing: MicroBatchSize, reporter: Reporter,
        forget: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._loader, self._sizing, self._reporter, self._forget = loader, sizing, reporter, forget
        self._saved = SavedState(step.trainable.module, step.device, step.changes)
        self._apply_size()

    def run(self, work: Callable[[], Result], *, step: int, evaluation: bool = False) -> Result:
        """Return the result of `work`, which computes with the loader's micro-batches. While it raises `StepDropped`,
        generators and buffers are restored and it runs again with half the size. Raises RunError: there was no memory
        for a single row."""
        tries = 0
        while True:
            self._saved.take()
            began = time.perf_counter()
            try:
                return work()
            except StepDropped as error:
                dropped = StepDropped(error.shortages)  # without the traceback, which keeps activations alive
            tries += 1
            if tries > 1:  # half was too much as well: user code may hold activations in a reference cycle
                gc.collect()
            self._shrink(dropped, step=step, evaluation=evaluation, seconds=time.perf_counter() - began)

    def _shrink(self, dropped: StepDropped, *, step: int, evaluation: bool, seconds: float) -> None:
        exact = self._saved.restore()
        before = self._sizing.now
        now = self._sizing.after_shortage()
        where = f"the evaluation after step {step}" if evaluation else f"step {step}"
        if now is None and evaluation and self._loader.eval_times > 1:  # passes of several micro-batches' rows
            before, now, self._loader.eval_times = self._loader.eval_times, 1, 1
        if now is None and self._sizing.whole:
            raise RunError(f"out of memory in {where}: {dropped}; {NOT_SPLIT}")
        if now is None:
            raise RunError(
                f"out of memory in {where} with loop.micro_batch_size 1: {dropped}; there is nothing smaller to compute"
            )
        self._apply_size()
        self._reporter.event(
            "out_of_memory",
            step=step,
            during="evaluation" if evaluation else "step",
            who=[shortage.who for shortage in dropped.shortages],
            shortages=[shortage.to_json() for shortage in dropped.shortages],
            micro_batch_size_before=before,
            micro_batch_size=now,
            grow_after=self._sizing.wait,
            seconds=seconds,
            equal="within rounding" if exact or evaluation else "in distribution only",
            reason=f"{dropped}; {where} is retried with micro-batches of {now} instead of {before}",
        )

    def _apply_size(self) -> None:
        """Set the loader's rows of a micro-batch, and its part of a token budget: long rows are limited by that."""
        self._forget()  # also that of a search
        self._loader.batches.micro_batch = self._sizing.now
        self._loader.batches.budget_part = (self._sizing.now, self._sizing.planned)

    def after_step(self, step: int) -> None:
        """Count a step without a shortage; it may be time to try a larger size again."""
        before, wait = self._sizing.now, self._sizing.wait
        now = self._sizing.after_clean_step()
        if now is None:
            return
        self._apply_size()
        self._reporter.event(
            "decision",
            what="micro_batch_size",
            value=now,
            before=before,
            step=step,
            reason=f"{wait} steps without an out-of-memory (loop.grow_after): micro-batches of {now} again",
        )


class SavedState:
    """What passes change besides gradients: a module's buffers, the parameters that forward changes, and the random
    generators; saved and restored.

    The copies of buffers stay in memory. A counter that a user's module keeps in a plain attribute is not seen. Reading
    the states of numpy's and Python's generators takes 100 microseconds: after `QUIET_STEPS` steps that left them alone
    they are no longer saved, until a restore finds them changed. `changes` knows the parameters that forward changes,
    after a step; until then, and without it, those that it may change are copied, to host memory.
    """

    def __init__(self, module: nn.Module, device: torch.device, changes: ForwardChanges | None = None) -> None:
        self._device, self._module, self._changes = device, module, changes
        self._moving: list[tuple[nn.Parameter, Tensor]] = []
        self._tables = [part._buffers for part in module.modules() if part._buffers]
        self._batch_norm = any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules())
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._torch: list[Tensor] = []
        self._host: tuple[Any, Any] | None = None
        self._quiet = 0

    @torch.no_grad()
    def take(self) -> None:
        """Save the state before the passes; no device read."""
        held = [(table, leaf, tensor) for table in self._tables for leaf, tensor in table.items() if tensor is not None]
        buffers = [tensor for _, _, tensor in held]
        if len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers)):
            if buffers:
                torch._foreach_copy_(self._copies, buffers)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._copies = [buffer.clone() for buffer in buffers]
        known = None if self._changes is None or not self._changes.learnt else self._changes.changed()
        if known is None:
            self._moving = [(one, one.detach().to("cpu", copy=True)) for one in may_change(self._module)]
        elif len(known) == len(self._moving) and all(map(is_, known, (one for one, _ in self._moving))):
            for parameter, copy in self._moving:
                copy.copy_(parameter)
        else:
            self._moving = [(one, one.detach().clone()) for one in known]
        self._slots, self._buffers = [(table, leaf) for table, leaf, _ in held], buffers
        self._torch = self._torch_states()
        if self._quiet < QUIET_STEPS:
            now = _host_states()
            self._quiet = self._quiet + 1 if _same_host(now, self._host) else 0
            self._host = now

    @torch.no_grad()
    def restore(self) -> bool:
        """Restore the state after passes that do not count. Returns whether running them again in smaller parts gives
        the same result up to rounding: not where random numbers were drawn, nor where a batch norm computes its
        statistics."""
        for (table, leaf), buffer, copy in zip(self._slots, self._buffers, self._copies, strict=True):
            buffer.copy_(copy)
            table[leaf] = buffer
        for parameter, copy in self._moving:
            if not torch.equal(parameter.cpu(), copy.cpu()):
                parameter.copy_(copy)
        quiet = all(map(torch.equal, self._torch, self._torch_states()))
        torch.set_rng_state(self._torch[0])
        for state in self._torch[1:]:
            gpu_module(self._device).set_rng_state(state, self._device)
        if self._host is not None and not _same_host(self._host, _host_states()):
            quiet = False
            if self._quiet < QUIET_STEPS:
                np.random.set_state(self._host[0])
                random.setstate(self._host[1])
            self._quiet = 0
        return quiet and not self._batch_norm

    def _torch_states(self) -> list[Tensor]:
        own = [gpu_module(self._device).get_rng_state(self._device)] if on_gpu(self._device) else []
        return [torch.get_rng_state(), *own]


def _host_states() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _same_host(one: tuple[Any, Any], other: tuple[Any, Any] | None) -> bool:
    return other is not None and one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))
