"""Whether a model computes the same loss and gradient of some rows as a whole and in two halves, tried on real rows.

A loss that compares rows (InfoNCE, CLIP), batch statistics, a counter in forward or a mean over something else than
raytrain weighs by makes what is trained depend on micro-batches and workers.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from raytrain.data.rows.contract import Batch
from raytrain.train.memory.retry import SavedState
from raytrain.trainable import LossOutput, Trainable

GRADIENT = 1e-3
"""Of the norm of a gradient: in fp32, sums of another order differ by less than a tenth of it."""
LOSS, SMALL_LOSS = 1e-4, 0.1
"""Of the loss; for one near zero, what cancels may be larger than the loss itself."""
SMALL_GRADIENT = 1e-4
"""Gradients below this norm may be rounding only."""

WHOLE = "loop.micro_batch_size whole computes each global batch in one pass of one worker"


@dataclass(frozen=True)
class Passes:
    """What passes over some rows gave.

    Attributes:
        loss: with auxiliary losses, combined as a step combines micro-batches.
        gradients: float64, of each parameter that requires one.
        largest: the largest norm of the gradient on the way.
        drew: whether a random generator was used.
    """

    loss: float
    gradients: list[Tensor]
    largest: float
    drew: bool

    def differs(self, other: Passes) -> bool:
        """Whether loss or gradient differ by more than rounding."""
        loss = LOSS * max(abs(self.loss), abs(other.loss), SMALL_LOSS)
        return abs(self.loss - other.loss) > loss or self.gradient_gap(other) > GRADIENT

    def gradient_gap(self, other: Passes, *, times: float = 1.0) -> float:
        """The distance to `times` the gradient of `other`, relative to their norms."""
        gap = norm([one - times * two for one, two in zip(self.gradients, other.gradients, strict=True)])
        return gap / max(self.largest, other.largest, SMALL_GRADIENT)


def norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them together."""
    return math.sqrt(sum(float(tensor.abs().square().sum()) for tensor in tensors))


def combined_shares(trainable: Trainable, outputs: Sequence[tuple[LossOutput, int]]) -> list[float]:
    """What the loss of each micro-batch of a step is multiplied by; the integers are the batches' weights."""
    if trainable.takes_global_count:
        return [1.0] * len(outputs)
    total = sum(weight for _, weight in outputs)
    return [weight / total for _, weight in outputs]


def split_changes(
    trainable: Trainable, whole: Batch, halves: Sequence[Batch], *, weigh: Callable[[Batch], int],
    synchronized: bool = False,
) -> str | None:  # fmt: skip
    """How far loss and gradient of some rows change where they are split in halves, and why, as a sentence; None where
    they do not, or where random numbers leave it open.

    The module is on the CPU in the mode of training; its weights, buffers, modes and all generators are unchanged.

    Args:
        whole, halves: the same rows as one batch and as two of equal size.
        weigh: the weight of a batch.
        synchronized: batch norms share their statistics between workers, so that they are left out.
    """
    weights = [weigh(half) for half in halves]
    if not all(weights):
        return None
    module = trainable.module
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]

    def compared() -> tuple[Passes, Passes]:
        return _run(trainable, [(whole, sum(weights))]), _run(trainable, list(zip(halves, weights, strict=True)))

    with _without_dropout(module), _in_eval(norms if synchronized else []):
        one, two = compared()
        if not math.isfinite(one.loss + two.loss) or not one.differs(two):
            return None
        again = _run(trainable, [(whole, sum(weights))])
        if one.drew or two.drew:
            return None
        if one.differs(again):
            return (
                f"two passes over the same rows from the same state differ: a loss of {one.loss:.6g} and of "
                f"{again.loss:.6g}; forward depends on how often it was called (a counter, or a random generator of "
                f"its own), and so on micro-batches and workers; {WHOLE}, so that it is called once a step"
            )
        why = "what forward computes from several rows, or its mean over something else than the weight of a batch"
        if one.gradient_gap(two, times=2.0) < GRADIENT and abs(one.loss - 2 * two.loss) <= LOSS * abs(one.loss):
            why = "the loss looks like a sum over the rows, where a mean is expected"
        elif norms and not synchronized:
            with _in_eval(norms):
                others = compared()
            only = not others[0].differs(others[1])
            why = "batch norms take their statistics from a micro-batch"
            why += "" if only else ", which is not the only cause"
    return (
        f"how a global batch is split changes what is trained: {one.loss:.6g} is the loss of {_rows(whole)} rows as a "
        f"whole, {two.loss:.6g} of their halves together, and the gradients differ by {one.gradient_gap(two):.2%} "
        f"({why}); {WHOLE}"
    )


def _rows(batch: Batch) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim)


def _run(trainable: Trainable, batches: Sequence[tuple[Batch, int]]) -> Passes:
    """Forward and backward of these batches as one step; what they change is put back."""
    module = trainable.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    saved = SavedState(module, torch.device("cpu"))
    saved.take()
    before = _generators()
    total = sum(weight for _, weight in batches)
    counted = {"num_items_in_batch": total} if trainable.takes_global_count else {}
    outputs = [(trainable.loss(module, batch, **counted), weight) for batch, weight in batches]
    loss, largest = 0.0, 0.0
    for parameter in parameters:
        parameter.grad = None
    for (output, _), share in zip(outputs, combined_shares(trainable, outputs), strict=True):
        value = (output.loss if output.aux is None else output.loss + output.aux) * share
        value.backward()
        loss += float(value.detach())
        largest = max(largest, norm([p.grad for p in parameters if p.grad is not None]))
    zero = torch.zeros(())
    gradients = [zero if p.grad is None else _wide(p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    drew = before != _generators()
    saved.restore()
    return Passes(loss, gradients, largest, drew)


def _wide(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _generators() -> tuple[Any, ...]:
    arrays: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), arrays[1].tobytes(), arrays[2]


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Dropout modules in eval mode, and the rates that other modules keep as numbers (`dropout`, `drop_prob`) at 0."""
    rates = [
        (part, name, value) for part in module.modules() for name, value in vars(part).items()
        if "drop" in name and isinstance(value, float)
    ]  # fmt: skip
    with _in_eval([part for part in module.modules() if isinstance(part, _DropoutNd)]):
        try:
            for part, name, _ in rates:
                setattr(part, name, 0.0)
            yield
        finally:
            for part, name, value in rates:
                setattr(part, name, value)


@contextlib.contextmanager
def _in_eval(parts: Sequence[nn.Module]) -> Iterator[None]:
    modes = [(part, part.training) for part in parts]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training
