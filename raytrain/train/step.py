"""One optimizer step (micro-batches, one reduction, one agreement, one commit), and one evaluation.

`raytrain.train.loop` calls `TrainingStep.run` for each step and `evaluate` at each evaluation; both are collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.telemetry.processes import WORK
from raytrain.accelerator import make_current
from raytrain.checkpoint.snapshot import before_update
from raytrain.data.prepare import DeviceGuard
from raytrain.errors import InputError, RunError
from raytrain.train.mean_weight import CountedLabels, graph_alone, silence, told_weight
from raytrain.train.memory.device import Shortage, StepDropped, release_cached
from raytrain.train.optim import Schedule, takes_skip_on_device
from raytrain.train.parallel.buffers import ForwardChanges
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import Passed, Reduction
from raytrain.train.precision import LossScale, PrecisionPolicy
from raytrain.trainable import Batch, GlobalStep, LocalStep, LossOutput, MicroBatch, Trainable, in_eval

MetricSums = dict[str, tuple[Tensor, float]]


@dataclass(frozen=True)
class StepOutput:
    """The result of a step, all of it still on the device (float64 scalars).

    Attributes:
        loss: this worker's share of the global mean loss, without auxiliary losses; the sum over workers is the mean.
        communication_s: host seconds of waiting for other processes.
        metrics: `LossOutput.metrics` of this worker's micro-batches: name -> (weighted sum, its weight on the host).
    """

    loss: Tensor
    aux_loss: Tensor  # likewise for the auxiliary losses
    norm: Tensor  # global gradient norm before clipping
    skip: Tensor  # True where the step was dropped for a non-finite gradient
    lr: float  # the learning rate used (a host number)
    communication_s: float
    flags: list[int]  # the sums of the workers' flags (host numbers)
    metrics: MetricSums = field(default_factory=dict)


def add_metrics(sums: MetricSums, output: LossOutput, weight: float) -> None:
    """Add what a loss has told besides itself; nothing is read from the device. Raises InputError: a metric that is not
    one number."""
    for name, value in output.metrics.items() if weight else ():  # the mean over nothing is NaN
        own = torch.as_tensor(value).detach()
        if own.numel() != 1:
            raise InputError(
                "model.builder", got=f"the metric '{name}' of shape {tuple(own.shape)}",
                expected="one number for a batch, as a mean over it",
            )  # fmt: skip
        total, of = sums.get(name, (0.0, 0.0))
        sums[name] = own.reshape(()).double() * weight + total, of + weight


def _total(output: LossOutput) -> Tensor:
    return output.loss if output.aux is None else output.loss + output.aux


class TrainingStep:
    """Runs optimizer steps; holds everything that is constant from step to step.

    Args:
        trainable: its module is on the device in the master dtype.
        scale: the loss scale (enabled for fp16 only); there is no other.
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
        self.reduction = reduction or Reduction(trainable, workers=workers, device=device)
        self.gradients = self.reduction.gradients
        self.remote_nonfinite: tuple[str, ...] = ()
        self.filler, self._without_rows = filler, without_rows
        self.device_guard = DeviceGuard(trainable.module, device)
        self.changes = ForwardChanges(trainable.module, workers)
        self.skips_on_device = all(takes_skip_on_device(optimizer) for optimizer in optimizers)
        self._frozen = [one for one in trainable.module.named_parameters() if not one[1].requires_grad]
        self._reads_weight = trainable.reads_weight and trainable.weight is None and not trainable.takes_global_count
        self.weight_unit: float | None = None
        """What a loss is a mean over, for each row or label that the loader counts; of the run's first micro-batch on
        the first worker that has one. Kept in checkpoints, as its rounding must be the same after a resume."""
        self.tells_weight = False
        """Whether a loss has told what it is a mean over, so that evaluations ask it too."""
        self.weight_unknown = False
        """Whether a loss was a mean over something that could not be told, so that it counts by rows or labels."""
        self.metric_names: tuple[str, ...] = ()
        """The metrics of losses that every worker knows of (`raytrain.train.loop`)."""
        self._agreeing = self._looked = False
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._passed, self._metrics = Passed(self._zero, self._zero), MetricSums()

    def forward(self, batch: Batch, *, global_weight: int, idle: bool = False) -> LossOutput:
        """Loss of one micro-batch under the run's precision; `idle`: it has no rows of this worker."""
        with self.reduction.forward_pass(idle=idle), self.policy.autocast(self.device):
            if self.trainable.takes_global_count:
                return self.trainable.loss(self.trainable.module, batch, num_items_in_batch=global_weight)
            return self.trainable.loss(self.trainable.module, batch)

    def backward(self, micro_batches: Iterable[MicroBatch], *, global_weight: int, passes: int = 0) -> Passed:
        """Accumulate gradients of this worker's micro-batches. `passes`: of the worker that has most; where passes are
        collective, every worker takes part in as many. Raises RunError: the model has unfrozen a parameter."""
        self._passed, self._metrics = Passed(self._zero, self._zero), {}
        self.gradients.zero_()
        totals = self._forwards(micro_batches, global_weight=global_weight, passes=passes)
        if self.inflight == 2:  # the backward of each pass is interleaved with the forward of the next
            interleaver = self.trainable.remote.interleaver
            assert interleaver is not None, "a plan allows two micro-batches in flight only with an interleaver"
            total = next(totals, None)
            while total is not None:
                behind, ahead = partial(self._backward_in_thread, total), partial(next, totals, None)
                total = interleaver.run_interleaved(behind, ahead)
        else:
            for total in totals:
                self._backward(total)
        self.gradients.check()
        # no optimizer has a parameter that was frozen at the start and is trained now
        for name, parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise RunError(
                    f"{name} was frozen at the start (requires_grad=False) and has been unfrozen by the model; the "
                    "optimizer has only parameters that require a gradient at the start: build the model with "
                    "requires_grad=True for it and freeze it in forward until it joins, or train it in a run of its "
                    "own with model.init_from"
                )
        return self._passed

    def _forwards(self, micro_batches: Iterable[MicroBatch], *, global_weight: int, passes: int) -> Iterator[Tensor]:
        """Run the forward of each pass on demand and yield the loss for its backward; adds to `_passed`."""
        ran = 0
        for micro in micro_batches:
            if micro.weight == 0:  # nothing to average over: its mean is NaN, and so is NaN times 0
                continue
            ran += 1
            labels = CountedLabels.of(micro.batch)
            before = None if self._looked else self.gradients.unused()
            output = self.forward(micro.batch, global_weight=global_weight)
            if before is not None:
                self._looked = True
                split = ran > 1 or not micro.last or self.workers.world_size > 1
                if split and self.gradients.unused() != before:
                    raise RunError(
                        "forward calls backward: gradients that it leaves are of a micro-batch of one worker, and would"
                        " be added up over all of them; add that loss to the one it returns, or set"
                        " loop.micro_batch_size whole"
                    )
            alone = micro.last and ran == 1 and self.workers.world_size == 1 and self.weight_unit is not None
            weight = micro.weight if alone else self.weigh(output, micro.weight, labels)
            share = 1.0 if self.trainable.takes_global_count else weight / global_weight
            self._add(output, weight, share, told=weight != micro.weight)
            total = _total(output) if share == 1.0 else _total(output) * share
            if not (weight or total.requires_grad or self.collective_passes):  # a constant, for no rows
                continue
            if micro.last and not self.collective_passes:
                self.reduction.last_pass()
            self.gradients.several = ran > 1 or not micro.last
            yield self.scale.scale(total)
        for _ in range(passes - ran if self.collective_passes else 0):
            # eval mode until its backward ends, which may recompute blocks: draws, counts and statistics stay as they
            # are
            mode = in_eval(self.trainable.module) if self.filler is not None else contextlib.nullcontext()
            with self._without_rows(), mode:
                yield self.idle()

    def weigh(self, output: LossOutput, counted: int, labels: CountedLabels) -> float:
        """What a loss is a mean over, in the loader's unit. `counted`: the weight that the loader has counted.
        `labels`: of the batch, from before its forward."""
        if self.trainable.takes_global_count or not (self._reads_weight or output.weight is not None):
            return counted
        told = told_weight(output, labels, read=self._reads_weight)
        if told is not None and math.isnan(told):
            self.weight_unknown, told = True, None
        self.tells_weight |= told is not None
        self._agree_unit(1.0 if told is None else told / counted)
        if told == 0.0:
            silence(output)
        unit = self.weight_unit or 1.0
        return counted if told is None or told == unit * counted else told / unit

    def _agree_unit(self, own: float) -> None:
        """Agree on `weight_unit` in the first passes: that of the first worker with one. A collective in the first step
        of a run of several workers, and in no other. Where passes are collective themselves, the unit stays 1: a worker
        that has run out of memory in one could not take part."""
        if self.weight_unit is None and self._agreeing:
            self._agreeing = False
            found = (value for (value,) in self.workers.all_gather_floats([own]) if value)
            self.weight_unit = next(found, None)

    def _add(self, output: LossOutput, weight: float, share: float, *, told: bool) -> None:
        loss, aux, before, ever = self._passed
        if weight:  # the mean over nothing is NaN
            loss = self._sum(loss, output.loss, share)
        if output.aux is not None:
            aux = self._sum(aux, output.aux, share)
        self._passed = Passed(loss, aux, before + weight, ever or told)
        add_metrics(self._metrics, output, weight)

    def _sum(self, total: Tensor, value: Tensor, share: float) -> Tensor:
        """`total` and a share of `value`, in as few kernels as that takes: small models wait for the host."""
        own = value.detach().double()
        if share != 1.0 or own.dtype == value.dtype:  # a copy: the next pass of a captured graph overwrites `value`
            own = own * share
        return own if total is self._zero else total + own

    @property
    def collective_passes(self) -> bool:
        """Whether processes communicate inside a pass, so that every worker takes part in the same number of them."""
        return self.trainable.remote.distributed or self.filler is not None

    def _backward_in_thread(self, total: Tensor) -> None:
        make_current(self.device)  # a new thread starts with device 0
        self._backward(total)

    def _backward(self, total: Tensor) -> None:
        self.gradients.attach()
        total.backward()
        self.gradients.take()

    def idle(self) -> Tensor:
        """Take part in a micro-batch of other workers, in eval mode with a filler; a zero to call backward on."""
        if self.filler is not None:
            with self.changes.not_counted():
                return _total(self.forward(self.filler(), global_weight=1, idle=True)) * 0.0
        with self.policy.autocast(self.device):
            return self.trainable.remote.idle()

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
            RunError: the losses of the whole step are means over nothing; the model has unfrozen a parameter.
        """
        waited = self.workers.wait_s + self.trainable.remote.waited_s()
        self._agreeing = self._reads_weight and not self.collective_passes
        with self.device_guard.guarded():
            work = partial(self._agreeing_backward, micro_batches, global_weight=global_weight, passes=passes)
            self.changes.before_passes()
            passed, summed, weight = self.reduction.passed(work, flags=flags)
            self.changes.after_passes()
        loss, aux, inverse = passed.loss, passed.aux, self.scale.inverse if self.scale.enabled else None
        if inverse is not None:
            self.gradients.scale_(inverse)
        if weight is not None:
            if weight <= 0:
                raise RunError(
                    f"step {step}: the losses of its micro-batches are means over nothing (every label is ignored, or "
                    "has a class weight of 0); fix data.source"
                )
            factor = global_weight / weight  # from the loader's weight to the one that the losses have told
            self.gradients.scale_(factor)
            loss, aux = loss * factor, aux * factor
            inverse = factor * (torch.ones((), device=self.device) if inverse is None else inverse)
        squares = self.reduction.sum_of_squares()
        counts = self.trainable.counts() if self.trainable.counts is not None else None
        local = LocalStep(
            step=step,
            sum_of_squares=squares,
            nonfinite=(squares - squares) != 0.0,  # as not isfinite, in two kernels instead of five
            counts=counts,
            lr=self.schedule.at(step),
            inverse_scale=inverse,
        )
        if self.trainable.agree:
            agreed = self.trainable.agree(local)
        else:  # without remote parts only the counts (tokens per expert) are still to be summed
            self.workers.all_reduce([] if counts is None else [counts])
            agreed = GlobalStep(norm=squares.sqrt(), skip=local.nonfinite, counts=counts)
        self.remote_nonfinite = agreed.nonfinite
        lr = self.update(agreed, step=step)
        self.scale.update(agreed.skip)
        if self.trainable.commit is not None:
            self.trainable.commit(agreed)
        if self.trainable.between_steps is not None:
            self.trainable.between_steps(step)
        return StepOutput(
            loss=loss,
            aux_loss=aux,
            norm=agreed.norm,
            skip=agreed.skip,
            lr=lr,
            communication_s=self.workers.wait_s + self.trainable.remote.waited_s() - waited,
            flags=summed,
            metrics=self._metrics,
        )

    def _agreeing_backward(self, *micro_batches: Iterable[MicroBatch], global_weight: int, passes: int) -> Passed:
        """`backward`, after which every worker has taken part in `_agree_unit`, whatever happened in its passes."""
        try:
            return self.backward(*micro_batches, global_weight=global_weight, passes=passes)
        finally:
            self._agree_unit(0.0)
            self._agreeing = False

    def update(self, agreed: GlobalStep, *, step: int) -> float:
        """Clip by the agreed norm, and step the optimizers unless skipped. Returns the lr."""
        lr = self.schedule.apply(self.optimizers, step)
        self.step_optimizers(agreed)
        return lr

    def step_optimizers(self, agreed: GlobalStep) -> None:
        """Clip by the agreed norm, and step the optimizers with their learning rates as they are, unless skipped."""
        before_update()
        if self.max_grad_norm is not None:
            coefficient = (self.max_grad_norm / (agreed.norm + 1e-6)).clamp(max=1.0)
            # gradients of a skipped step are not scaled, so that the nonfinite ones can be named
            self.gradients.scale_(coefficient.masked_fill_(agreed.skip, 1.0))
        if self.skips_on_device:
            found = agreed.skip.to(torch.float32)
            for optimizer in self.optimizers:
                optimizer.found_inf, optimizer.grad_scale = found, None  # pyright: ignore[reportAttributeAccessIssue]
        elif bool(agreed.skip):  # a device read: this optimizer cannot skip on the device
            return
        for optimizer in self.optimizers:
            optimizer.step()


# ---------------------------------------------------------------- evaluation


def evaluate(
    step: TrainingStep, batches: Iterable[MicroBatch], *, workers: Workers, passes: int = 0,
    clear_every: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean loss and metrics over all workers' batches, each weighted by its samples or tokens.

    Dropout is off, no gradient is kept, and no random number is drawn by the loop; a router's counters do not advance
    (modules count in training mode only). A failing batch raises; none is skipped.

    Args:
        passes: as in `TrainingStep.backward`.
        clear_every: after this many batches cached memory is released, which other processes on the device may need.

    Returns:
        {"loss": ..., "accuracy": ... where the model reports one, ...} as host floats; one device read. Raises
        StepDropped: a worker ran out of memory.
    """
    result = step.reduction.run_or_shortage(lambda: _scored(step, batches, passes=passes, clear_every=clear_every))
    rows = workers.all_gather_object(None if isinstance(result, Shortage) else list(result))
    if None in rows:
        raise step.reduction.dropped(result)
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["loss"]
    assert not isinstance(result, Shortage)
    shortages = step.trainable.remote.shortages()
    if shortages:
        step.trainable.remote.discard()
        raise StepDropped(shortages)
    zero = torch.zeros((), dtype=torch.float64, device=step.device)
    pairs = [result.get(name, (zero, 0.0)) for name in names]
    weights = torch.tensor([of for _, of in pairs], dtype=torch.float64, device=step.device)
    sums = torch.cat([torch.stack([total.to(zero) for total, _ in pairs]), weights])
    workers.all_reduce([sums])
    values = iter(sums.tolist())
    totals = dict(zip(names, values, strict=False))
    return {name: total / of if of else math.nan for (name, total), of in zip(totals.items(), values, strict=True)}


def _scored(step: TrainingStep, batches: Iterable[MicroBatch], *, passes: int, clear_every: int | None) -> MetricSums:
    """This worker's sums of loss and metrics, on the device, and their weights."""
    module = step.trainable.module
    total = MetricSums()
    with in_eval(module), torch.no_grad():
        for number, micro in enumerate(batches, 1):
            if clear_every and number % clear_every == 0:
                release_cached(step.device)
            if micro.weight == 0:
                continue
            passes -= 1
            labels = CountedLabels.of(micro.batch)
            graph = step.tells_weight and not step.collective_passes
            with graph_alone() if graph else contextlib.nullcontext():
                output = step.forward(micro.batch, global_weight=micro.weight)
            share = step.weigh(output, micro.weight, labels)
            add_metrics(total, replace(output, metrics={**output.metrics, "loss": output.loss}), share)
            WORK.add()
        for _ in range(passes if step.collective_passes else 0):
            step.idle()
    return total
