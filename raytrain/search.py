"""Decisions from measurements, pure: numbers in, `Resolved` out. Measuring is `probe.py`'s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from raytrain.plan_values import Resolved

#: A lower precision must win by this share of the time, or it is not worth its rounding.
WORTHWHILE_GAIN = 0.03
#: Numeric gate on one batch: relative difference of the loss, and band of the gradient-norm ratio, against fp32.
LOSS_TOLERANCE = 0.02
NORM_BAND = (0.8, 1.25)


@dataclass(frozen=True)
class PrecisionTrial:
    """One precision measured on the real model: forward and backward of one micro-batch.

    Attributes:
        precision: value of `precision.dtype`.
        seconds: the slowest worker's median.
        loss, grad_norm: on the same batch; NaN where not finite.
        error: why it could not be run at all, or None.
    """

    precision: str
    seconds: float
    loss: float
    grad_norm: float
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def choose_precision(trials: list[PrecisionTrial], *, reference: str = "fp32") -> Resolved:
    """The fastest precision that passes the numeric gate and beats the reference by more than noise.

    Args:
        trials: one for each candidate, the reference among them.
        reference: what is kept where nothing better is shown.
    """
    base = next(trial for trial in trials if trial.precision == reference)
    best, notes = base, []
    for trial in trials:
        if trial is base:
            continue
        ratio = base.seconds / trial.seconds if trial.error is None else 0.0
        refusal = _gate(trial, base)
        if refusal:
            notes.append(f"{trial.precision} refused: {refusal}")
        elif ratio < 1 + WORTHWHILE_GAIN:
            notes.append(f"{trial.precision} measured {ratio:.2f} times as fast as {reference}")
        else:
            best = min(best, trial, key=lambda one: one.seconds)
            notes.append(
                f"{trial.precision} measured {ratio:.2f} times as fast as {reference}, loss and gradient norm agree"
            )
    return Resolved(best.precision, "; ".join(notes) or f"nothing but {reference} to compare")


def choose_inflight(seconds: dict[int, float]) -> Resolved:
    """Two micro-batches in flight where they are faster than one by more than noise.

    Args:
        seconds: by micro-batches in flight, of the same passes.
    """
    ratio = seconds[1] / seconds[2]
    chosen = 2 if ratio >= 1 + WORTHWHILE_GAIN else 1
    return Resolved(chosen, f"2 micro-batches in flight measured {ratio:.2f} times as fast as 1")


def _gate(trial: PrecisionTrial, base: PrecisionTrial) -> str:
    if trial.error is not None:
        return trial.error
    if not (trial.loss == trial.loss and trial.grad_norm == trial.grad_norm):
        return "its loss or gradient is not finite"
    if abs(trial.loss - base.loss) > LOSS_TOLERANCE * abs(base.loss):
        return f"its loss {trial.loss:.6g} is not the reference's {base.loss:.6g}"
    if base.grad_norm > 0 and not NORM_BAND[0] <= trial.grad_norm / base.grad_norm <= NORM_BAND[1]:
        return f"its gradient norm is {trial.grad_norm / base.grad_norm:.3g} times the reference's"
    return ""
