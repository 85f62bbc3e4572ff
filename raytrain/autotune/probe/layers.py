"""Measures on the real model what half precision changes in a micro-batch: layer by layer, and with some in fp32.

Changes nothing that it measures. `raytrain.autotune.search.layers` decides from the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch import Tensor

from raytrain.autotune.probe.agreed import run_agreed
from raytrain.autotune.probe.state_guard import preserve_model
from raytrain.autotune.search.layers import LayerChange, choose_layers
from raytrain.autotune.search.precision import outside_band
from raytrain.errors import OutOfMemory, RunError
from raytrain.plan.choice import Resolved
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.precision.layers import LayerPrecision
from raytrain.train.precision.policy import PrecisionPolicy, policy_for
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch

MOST_LAYERS = 128
"""In a model with more layers each of its repeated blocks is measured as one."""


class LayerProbe:
    """Measures on one micro-batch, the same on every worker; rank 0's results are used by all. Collective.

    Args:
        step: whose trainable, gradients and workers are used, but not its policy.
    """

    def __init__(self, step: TrainingStep, layers: LayerPrecision, micro: MicroBatch, *, precision: str) -> None:
        self._step, self._layers, self._micro = step, layers, micro
        self._half, self._full = policy_for(precision), policy_for("fp32")
        self._generators = rng_state(step.device)
        self._reference: list[Tensor] = []
        self._loss = self._norm = math.nan

    def run(self, names: Sequence[str]) -> tuple[Resolved, list[LayerChange]]:
        """Each layer alone in half precision, then the model with more and more layers kept in fp32.

        Raises:
            OutOfMemory: a worker has no memory for a pass; all workers raise it.
            RunError: a pass in fp32 fails.
        """
        with preserve_model(self._step.trainable, self._step.device):
            try:
                return self._compare(names)
            except OutOfMemory as error:
                short = error
            finally:
                self._layers.keep([])
        raise short  # here, after the results of the passes have been discarded

    def _compare(self, names: Sequence[str]) -> tuple[Resolved, list[LayerChange]]:
        why = self._attempt(self._measure_reference)
        if why:
            raise RunError(f"the pass in fp32 that layers are compared with failed: {why}")
        changes = self._rank_zeros([self._alone(name) for name in names])
        return choose_layers(changes, self._refusal, precision=self._half.name), changes

    def _attempt(self, work: Callable[[], object]) -> str:
        """Why it failed on any worker, or ""; an out-of-memory is raised."""
        step = self._step
        outcome, reason = run_agreed(
            work,
            workers=step.workers,
            device=step.device,
            remote=step.trainable.remote,
            collective_passes=step.collective_passes,
        )
        if outcome == "out_of_memory":
            raise OutOfMemory(reason)
        return reason

    def _measure_reference(self) -> None:
        self._loss, self._norm = self._pass(self._full)
        self._reference = [flat.clone() for flat in self._step.gradients.buffers]

    def _alone(self, name: str) -> LayerChange:
        assert self._half.autocast_dtype is not None
        results: list[tuple[float, float]] = []
        with self._layers.alone_in(name, self._half.autocast_dtype):
            why = self._attempt(lambda: results.append(self._pass(self._full)))
        if why:  # such as an operation without a kernel in this dtype: a result
            return LayerChange(name, math.nan, math.nan, why)
        loss, _ = results[0]
        return LayerChange(name, abs(loss - self._loss) / max(abs(self._loss), 1e-12), self._difference())

    def _difference(self) -> float:
        """Norm of the difference between the gradient and that of fp32, relative to the norm of the latter."""
        pairs = zip(self._step.gradients.buffers, self._reference, strict=True)
        squares = sum(float((now - then).double().square().sum()) for now, then in pairs)
        return math.sqrt(squares) / max(self._norm, 1e-12)

    def _refusal(self, kept: list[str]) -> str:
        self._layers.keep(kept)
        results: list[tuple[float, float]] = []
        why = self._attempt(lambda: results.append(self._pass(self._half)))
        for loss, norm in results:
            why = why or outside_band(
                loss, norm, self._difference(), reference_loss=self._loss, reference_norm=self._norm
            )
        return self._step.workers.broadcast_object(why)

    def _pass(self, policy: PrecisionPolicy) -> tuple[float, float]:
        """(loss, gradient norm) of the micro-batch; the gradient stays in the step's buffers."""
        step, weight = self._step, max(1, self._micro.weight)
        set_rng_state(self._generators, step.device)  # the same dropout in every pass
        step.gradients.zero_()
        with policy.autocast(step.device):
            extra = {"num_items_in_batch": weight} if step.trainable.takes_global_count else {}
            output = step.trainable.loss(step.trainable.module, self._micro.batch, **extra)
        total = output.loss if output.aux is None else output.loss + output.aux
        total.backward()
        step.gradients.check()
        return float(total.detach()), float(step.gradients.sum_of_squares().sqrt())

    def _rank_zeros(self, changes: list[LayerChange]) -> list[LayerChange]:
        rows = self._step.workers.broadcast_object([asdict(change) for change in changes])
        return [LayerChange(**row) for row in rows]
