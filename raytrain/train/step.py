"""One optimizer step: micro-batches, one reduction, one agreement, one commit.

    zero -> for each micro-batch: forward, scaled backward (no communication between the workers)
         -> all-reduce the gradients buffer by buffer (if a worker ran out of memory, all drop the step)
         -> unscale, float64 sum of squares, agree (norm and skip are the same on every worker)
         -> clip by that norm, optimizer step (or skip, on the device), loss scale, commit

The loss is normalised by the *global* weight of the step (samples or tokens), so that one worker with four
micro-batches, two with two and four with one compute the same step. Nothing here reads a device value, except for an
optimizer that cannot skip on the device.

Where the passes of a model wait for other processes, two micro-batches can be in flight: the backward of one and the
forward of the next are interleaved at each such wait. Forward and backward passes each still run in the order of the
micro-batches, so that gradients and random draws are the same to the last bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raytrain.data.loading.checks import DeviceGuard
from raytrain.train.optim.build import Schedule, takes_skip_on_device
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import FlatReduction, Reduction
from raytrain.train.precision.policy import LossScale, PrecisionPolicy
from raytrain.trainable import Batch, GlobalStep, LocalStep, LossOutput, MicroBatch, Trainable, in_eval


@dataclass(frozen=True)
class StepOutput:
    """The result of a step, all of it still on the device (float64 scalars).

    Attributes:
        loss: this worker's share of the global mean loss, without auxiliary losses; the sum over workers is the mean.
        aux_loss: likewise for the auxiliary losses.
        norm: global gradient norm before clipping.
        skip: True where the step was dropped for a non-finite gradient.
        lr: the learning rate used (a host number).
        compute_s, communication_s: host seconds inside forward/backward/optimizer, and waiting for other processes.
        flags: the sums of the workers' flags (host numbers).
    """

    loss: Tensor
    aux_loss: Tensor
    norm: Tensor
    skip: Tensor
    lr: float
    compute_s: float
    communication_s: float
    flags: list[int]


def _total(output: LossOutput) -> Tensor:
    return output.loss if output.aux is None else output.loss + output.aux


def default_agreement(workers: Workers, local: LocalStep) -> GlobalStep:
    """The agreement of a model without remote parts: only the counts (tokens per expert) are still to be summed."""
    if local.counts is not None:
        workers.all_reduce([local.counts])
    return GlobalStep(norm=local.sum_of_squares.sqrt(), skip=local.nonfinite, counts=local.counts)


class TrainingStep:
    """Runs optimizer steps; holds everything that is constant from step to step.

    Args:
        trainable: the model with its loss; its module is on the device in the master dtype.
        optimizers: torch optimizers over the module's parameters.
        policy: precision of forward and backward.
        scale: the loss scale (enabled for fp16 only); there is no other.
        workers: the group to reduce over.
        schedule: learning rate by step.
        max_grad_norm: clip threshold; None or 0 leaves gradients as they are.
        inflight: micro-batches in flight, 2 only where the trainable has an interleaver.
        reduction: how gradients are summed; None = passes without communication, then all-reduces of flat buffers.
        filler: for workers that communicate inside their passes: makes the batch for passes in which this worker has
            no rows of its own; its results have no effect.
        without_rows: a context around such passes of a training step.
    """

    def __init__(
        self,
        trainable: Trainable,
        *,
        optimizers: list[torch.optim.Optimizer],
        policy: PrecisionPolicy,
        scale: LossScale,
        workers: Workers,
        schedule: Schedule,
        max_grad_norm: float | None,
        device: torch.device,
        inflight: int = 1,
        reduction: Reduction | None = None,
        filler: Callable[[], Batch] | None = None,
        without_rows: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.trainable = trainable
        self.optimizers = optimizers
        self.policy = policy
        self.scale = scale
        self.workers = workers
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm or None
        self.device = device
        self.inflight = inflight
        self.reduction = reduction or FlatReduction(trainable, workers=workers, device=device)
        self.gradients = self.reduction.gradients
        self.remote_nonfinite: tuple[str, ...] = ()
        self.filler, self._without_rows = filler, without_rows
        self.device_guard = DeviceGuard(trainable.module, device)
        self.skips_on_device = all(takes_skip_on_device(optimizer) for optimizer in optimizers)

    def forward(self, batch: Batch, *, global_weight: int, idle: bool = False) -> LossOutput:
        """Loss of one micro-batch under the run's precision; `idle`: it has no rows of this worker."""
        with self.reduction.forward_pass(idle=idle), self.policy.autocast(self.device):
            if self.trainable.takes_global_count:
                return self.trainable.loss(self.trainable.module, batch, num_items_in_batch=global_weight)
            return self.trainable.loss(self.trainable.module, batch)

    def backward(
        self, micro_batches: Iterable[MicroBatch], *, global_weight: int, passes: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Accumulate gradients of this worker's micro-batches; returns its shares of the loss and auxiliary loss.

        Args:
            passes: of the worker that has most; where passes are collective, every worker takes part in as many.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        aux_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.gradients.zero_()
        totals = self._forwards(micro_batches, loss_sum, aux_sum, global_weight=global_weight, passes=passes)
        if self.inflight == 2:
            self._interleave(totals)
        else:
            for total in totals:
                total.backward()
        self.gradients.check()
        return loss_sum, aux_sum

    def _forwards(
        self, micro_batches: Iterable[MicroBatch], loss_sum: Tensor, aux_sum: Tensor, *, global_weight: int, passes: int
    ) -> Iterator[Tensor]:
        """Run the forward of each pass on demand and yield the loss for its backward; adds to the sums in place."""
        for micro in micro_batches:
            if micro.weight == 0:  # nothing to average over: its mean is NaN, and so is NaN times 0
                continue
            passes -= 1
            output = self.forward(micro.batch, global_weight=global_weight)
            share = 1.0 if self.trainable.takes_global_count else micro.weight / global_weight
            total = _total(output) if share == 1.0 else _total(output) * share
            loss_sum += output.loss.detach().double() * share
            if output.aux is not None:
                aux_sum += output.aux.detach().double() * share
            if micro.last and not self.collective_passes:
                self.reduction.last_pass()
            yield self.scale.scale(total)
        for _ in range(passes if self.collective_passes else 0):
            # eval mode until its backward ends, which may recompute blocks: draws, counts and statistics stay as they
            # are
            mode = in_eval(self.trainable.module) if self.filler is not None else contextlib.nullcontext()
            with mode, self._without_rows():
                yield self.idle()

    @property
    def collective_passes(self) -> bool:
        """Whether processes communicate inside a pass, so that every worker takes part in the same number of them."""
        return self.trainable.remote.distributed or self.filler is not None

    def _interleave(self, totals: Iterator[Tensor]) -> None:
        """Run the backward of each pass interleaved with the forward of the next."""
        interleaver = self.trainable.remote.interleaver
        assert interleaver is not None, "a plan allows two micro-batches in flight only where passes can be interleaved"
        total = next(totals, None)
        while total is not None:
            total = interleaver.run_interleaved(partial(self._backward_in_thread, total), partial(next, totals, None))

    def _backward_in_thread(self, total: Tensor) -> None:
        if self.device.type == "cuda":  # a new thread starts with device 0
            torch.cuda.set_device(self.device)
        total.backward()

    def idle(self) -> Tensor:
        """Take part in a micro-batch of other workers, in eval mode with a filler; a zero to call backward on."""
        if self.trainable.remote.distributed:
            with self.policy.autocast(self.device):
                return self.trainable.remote.idle()
        assert self.filler is not None
        return _total(self.forward(self.filler(), global_weight=1, idle=True)) * 0.0

    def run(
        self,
        micro_batches: Iterable[MicroBatch],
        *,
        global_weight: int,
        step: int,
        passes: int = 0,
        flags: Callable[[], list[int]] = list,
    ) -> StepOutput:
        """Run optimizer step number `step` (1-based); the workers' `flags` are summed with it. Collective.

        Raises:
            StepDropped: a worker ran out of memory in its passes. No worker has committed anything.
            DevicePlacementError: a parameter or buffer is no longer on the device; the message names it.
        """
        begin, waited = time.perf_counter(), self._waited()
        with self.device_guard.guarded():
            work = partial(self.backward, micro_batches, global_weight=global_weight, passes=passes)
            (loss, aux), summed = self.reduction.passed(work, flags=flags)
        self.scale.unscale_(self.gradients.buffers)
        squares = self.reduction.sum_of_squares()
        counts = self.trainable.counts() if self.trainable.counts is not None else None
        local = LocalStep(
            step=step,
            sum_of_squares=squares,
            nonfinite=~torch.isfinite(squares),
            counts=counts,
            lr=self.schedule.at(step),
            inverse_scale=self.scale.inverse if self.scale.enabled else None,
        )
        agreed = self.trainable.agree(local) if self.trainable.agree else default_agreement(self.workers, local)
        self.remote_nonfinite = agreed.nonfinite
        lr = self.commit(agreed, step=step)
        waited = self._waited() - waited
        return StepOutput(
            loss=loss,
            aux_loss=aux,
            norm=agreed.norm,
            skip=agreed.skip,
            lr=lr,
            compute_s=time.perf_counter() - begin - waited,
            communication_s=waited,
            flags=summed,
        )

    def _waited(self) -> float:
        """Host seconds spent waiting for other processes so far."""
        return self.workers.wait_s + self.trainable.remote.waited_s()

    def commit(self, agreed: GlobalStep, *, step: int) -> float:
        """Clip by the agreed norm, step the optimizers unless skipped, call the trainable's hooks. Returns the lr."""
        lr = self.update(agreed, step=step)
        self.scale.update(agreed.skip)
        if self.trainable.commit is not None:
            self.trainable.commit(agreed)
        if self.trainable.between_steps is not None:
            self.trainable.between_steps(step)
        return lr

    def update(self, agreed: GlobalStep, *, step: int) -> float:
        """The part of a commit that computes: clip, and step the optimizers unless skipped. Returns the lr."""
        if self.max_grad_norm is not None:
            coefficient = (self.max_grad_norm / (agreed.norm + 1e-6)).clamp(max=1.0)
            # gradients of a skipped step are not scaled, so that the nonfinite ones can be named
            self.gradients.scale_(torch.where(agreed.skip, torch.ones_like(coefficient), coefficient))
        lr = self.schedule.apply(self.optimizers, step)
        if self.skips_on_device:
            found = agreed.skip.to(torch.float32)
            for optimizer in self.optimizers:
                optimizer.found_inf, optimizer.grad_scale = found, None  # pyright: ignore[reportAttributeAccessIssue]
        elif bool(agreed.skip):  # a device read: this optimizer cannot skip on the device
            return lr
        for optimizer in self.optimizers:
            optimizer.step()
        return lr
