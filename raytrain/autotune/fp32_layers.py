"""`precision.fp32_layers: auto`: which layers must stay in fp32 under half precision, measured on the real model.

The method of mixed-precision searches by sensitivity (such as HAWQ: rank the layers, then cut): the rank comes from one
layer at a time in half precision, the cut from the complete model with the most sensitive layers in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.measurement import LOSS_TOLERANCE, NORM_BAND, outside_band
from raytrain.autotune.preserve import preserve_model
from raytrain.autotune.step_probe import run_agreed
from raytrain.config.messages import abbreviated
from raytrain.errors import OutOfMemory, RunError
from raytrain.plan.choice import Resolved
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.precision import PrecisionPolicy, layers_of, policy_for
from raytrain.train.session import Session
from raytrain.trainable import MicroBatch

MOST_LAYERS = 128
"""In a model with more layers each of its repeated blocks is measured as one."""
NAMED_AT_MOST = 6


@dataclass(frozen=True)
class LayerChange:
    """What one layer in half precision, all others in fp32, does to a micro-batch."""

    layer: str
    loss: float  # difference relative to fp32's; NaN where not finite
    gradient: float  # norm of the difference of the whole gradient, relative to fp32's norm
    error: str | None = None  # why it cannot be computed so

    @property
    def score(self) -> float:
        """The change relative to the tolerance of a complete model."""
        parts = (abs(self.loss) / LOSS_TOLERANCE, self.gradient / (1 - NORM_BAND[0]))
        return math.inf if self.error or any(math.isnan(part) for part in parts) else max(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; null for what is not finite."""
        return {key: None if value != value or value == math.inf else value for key, value in asdict(self).items()}


def choose_layers(changes: Sequence[LayerChange], refusal: Callable[[list[str]], str], *, precision: str) -> Resolved:
    """The fewest of the most sensitive layers that bring the loss into the gate's band when they stay in fp32;
    `refusal`: why the complete model with these layers in fp32 is outside the band, "" where it is inside."""
    touched = sorted((change for change in changes if change.score > 0), key=lambda change: -change.score)
    names = [change.layer for change in touched]
    first = refusal([])
    if not first:
        return Resolved([], f"all {len(names)} layers that {precision} changes are in the band in it")
    if last := refusal(names):
        return Resolved(names, f"with every layer in fp32 {last}: the deviation under {precision} is not in a layer")
    low, high = 0, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refusal(names[:middle]) else (low, middle)
    kept = abbreviated(names[:high], NAMED_AT_MOST)
    share = 1 - high / len(names)
    reason = f"with {kept} in fp32 the loss is in the band, {share:.0%} of {len(names)} layers in {precision}"
    return Resolved(names[:high], f"{reason}; with none {first}")


def measure_layers(session: Session, precision: str) -> tuple[Resolved, list[LayerChange]]:
    """Which layers must stay in fp32 under this half precision, measured on the first micro-batch of the global batch,
    the same on every worker. Its rows are halved until they fit in fp32, the reference. Changes nothing that it
    measures. Collective. Raises RunError: a pass in fp32 fails."""
    indices, _ = session.loader.global_batch(session.state.cursor)
    rows, why = session.loader.batches.micro_batch, ""
    while rows:
        micro = session.loader.first(indices[:rows])
        try:
            with preserve_model(session.trainable, session.device):
                return _compared(session, micro, precision)
        except OutOfMemory as error:
            rows, why = rows // 2, str(error)
    return Resolved([], f"not one row fits in fp32 to compare layers with ({why}): watch the loss"), []


def _compared(session: Session, micro: MicroBatch, precision: str) -> tuple[Resolved, list[LayerChange]]:
    """Each layer alone in half precision, then the model with more and more layers kept in fp32; rank 0's results are
    used by all. Raises OutOfMemory on all workers if one has no memory for a pass, and RunError as above."""
    trainable, step, layers = session.trainable, session.step, session.layers
    half, full, generators = policy_for(precision), policy_for("fp32"), rng_state(session.device)
    blocks = trainable.blocks if isinstance(trainable.blocks, str) else None
    assert half.autocast_dtype is not None, "a half precision"

    def one_pass(policy: PrecisionPolicy) -> tuple[str, float, float]:
        """(why it failed on any worker or "", loss, gradient norm); the gradient stays in the step's buffers."""
        found = [math.nan, math.nan]

        def work() -> None:
            set_rng_state(generators, step.device)  # the same dropout in every pass
            step.gradients.zero_()
            with policy.autocast(step.device):
                extra = {"num_items_in_batch": max(1, micro.weight)} if trainable.takes_global_count else {}
                output = trainable.loss(trainable.module, micro.batch, **extra)
            loss = output.loss if output.aux is None else output.loss + output.aux
            loss.backward()
            step.gradients.check()
            found[:] = float(loss.detach()), float(step.gradients.sum_of_squares().sqrt())

        outcome, reason = run_agreed(work, step)
        if outcome == "out_of_memory":
            raise OutOfMemory(reason)
        return reason, found[0], found[1]

    def difference() -> float:
        """Norm of the difference between the gradient and that of fp32, relative to the norm of the latter."""
        pairs = zip(step.gradients.buffers, reference, strict=True)
        squares = sum(float((now - then).double().square().sum()) for now, then in pairs)
        return math.sqrt(squares) / max(reference_norm, 1e-12)

    def refusal(kept: list[str]) -> str:
        layers.keep(kept)
        why, loss, norm = one_pass(half)
        why = why or outside_band((loss, norm), (reference_loss, reference_norm), difference())
        return step.workers.broadcast_object(why)

    try:
        why, reference_loss, reference_norm = one_pass(full)
        if why:
            raise RunError(f"the pass in fp32 that layers are compared with failed: {why}")
        reference, changes = [flat.clone() for flat in step.gradients.buffers], []
        for name in layers_of(trainable.module, blocks=blocks, most=MOST_LAYERS):
            with layers.alone_in(name, half.autocast_dtype):
                why, loss, _ = one_pass(full)
            if why:  # such as an operation without a kernel in this dtype: a result
                changes.append(LayerChange(name, math.nan, math.nan, why))
            else:
                off = abs(loss - reference_loss) / max(abs(reference_loss), 1e-12)
                changes.append(LayerChange(name, off, difference()))
        rows = step.workers.broadcast_object([asdict(change) for change in changes])
        changes = [LayerChange(**row) for row in rows]
        return choose_layers(changes, refusal, precision=precision), changes
    finally:
        layers.keep([])
