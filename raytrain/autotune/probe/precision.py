"""Times the precisions that a job may use on the real model, and notes the loss and gradient norm of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raytrain.autotune.probe.agreed import run_agreed
from raytrain.autotune.probe.arms import BUDGET_S, TimedArm, timed_arms
from raytrain.autotune.search.precision import PrecisionTrial, has_winner
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.precision.policy import PrecisionPolicy, policy_for
from raytrain.trainable import MicroBatch, Trainable

MIN_ROUNDS = 3
MAX_ROUNDS = 12


def compare_precisions(
    trainable: Trainable,
    micro: MicroBatch,
    *,
    candidates: list[str],
    gradients: GradientBuffers,
    workers: Workers,
    device: torch.device,
    budget_s: float = BUDGET_S,
) -> list[PrecisionTrial]:
    """Time forward and backward of one micro-batch in each precision; changes nothing. Collective.

    Every worker returns the same trials: the slowest worker's median, rank 0's loss and gradient norm. A precision that
    fails, because memory runs out or an operation has no kernel in this dtype, is a trial with an error.
    """
    passes = [_Pass(trainable, micro, policy_for(name), gradients, device) for name in candidates]
    times = timed_arms(
        [TimedArm(one.run, before=gradients.zero_, values=one.values) for one in passes],
        trainable=trainable,
        workers=workers,
        device=device,
        min_rounds=MIN_ROUNDS,
        max_rounds=MAX_ROUNDS,
        budget_s=budget_s,
        clear=has_winner,
        attempt=lambda work: run_agreed(work, workers=workers, device=device, remote=trainable.remote)[1],
    )
    trials = []
    for name, time in zip(candidates, times, strict=True):
        loss, grad_norm = time.values or (0.0, 0.0)
        rounds = () if time.error else tuple(time.round_s)
        trials.append(PrecisionTrial(name, time.median_s, loss, grad_norm, error=time.error or None, rounds=rounds))
    return trials


class _Pass:
    """Forward and backward of one micro-batch in a precision."""

    def __init__(
        self, trainable: Trainable, micro: MicroBatch, policy: PrecisionPolicy, gradients: GradientBuffers,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._trainable, self._micro, self._policy = trainable, micro, policy
        self._gradients, self._device = gradients, device
        self._loss: Tensor | None = None

    def run(self) -> None:
        with self._policy.autocast(self._device):
            call: Callable[..., object] = self._trainable.loss
            extra = {"num_items_in_batch": self._micro.weight} if self._trainable.takes_global_count else {}
            output = call(self._trainable.module, self._micro.batch, **extra)
        loss: Tensor = output.loss if output.aux is None else output.loss + output.aux  # type: ignore[attr-defined]
        loss.backward()
        self._gradients.check()
        self._loss = loss.detach()

    def values(self) -> tuple[float, float]:
        """(loss, gradient norm)"""
        assert self._loss is not None, "read after the pass"
        return float(self._loss), float(self._gradients.sum_of_squares().sqrt())
