"""Whether a model computes the same loss and gradient of some rows as a whole and in two halves, tried on real rows.

A loss that compares rows (InfoNCE, CLIP), batch statistics, a counter in forward or a mean over something else than
raytrain weighs by makes what is trained depend on micro-batches and workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from raytrain.data.rows.contract import Batch
from raytrain.data.rows.residency import rebuild, tensors_of
from raytrain.train.mean_weight import CountedLabels, silence, told_weight
from raytrain.train.memory.retry import SavedState
from raytrain.trainable import LossOutput, Trainable

LOSS, GRADIENT = 1e-4, 1e-3
"""Relative differences that fp32 does not reach by summing in another order, by a factor of ten or more."""
SMALL_LOSS, SMALL_GRADIENT = 0.1, 1e-4
"""Below these, what cancels may be larger than the result: differences are relative to these instead."""
WHOLE = "loop.micro_batch_size whole computes each global batch in one pass of one worker"
RETURNED = 'return what the loss is a mean over as "weight" beside it'


class Passes(NamedTuple):
    """Passes over some rows: the loss, the gradients (float64), their largest norm on the way, and whether random
    numbers were drawn."""

    loss: float
    gradients: list[Tensor]
    largest: float
    drew: bool

    def gaps(self, other: Passes, *, times: float = 1.0) -> tuple[float, float]:
        """Relative distances of loss and gradient to `times` those of `other`."""
        loss = abs(self.loss - times * other.loss) / max(abs(self.loss), abs(other.loss), SMALL_LOSS)
        apart = norm([one - times * two for one, two in zip(self.gradients, other.gradients, strict=True)])
        return loss, apart / max(self.largest, other.largest, SMALL_GRADIENT)

    def equals(self, other: Passes, *, times: float = 1.0) -> bool:
        loss, gradient = self.gaps(other, times=times)
        return loss <= LOSS and gradient <= GRADIENT


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.abs().square().sum()) for tensor in tensors))


def combined_shares(trainable: Trainable, outputs: Sequence[tuple[LossOutput, int, CountedLabels]]) -> list[float]:
    """What the loss of each micro-batch of a step is multiplied by, as in `raytrain.train.step`; given with the weight
    and the labels of its batch, before any backward."""
    if trainable.takes_global_count:
        return [1.0] * len(outputs)
    read = trainable.reads_weight and trainable.weight is None
    found = [(told_weight(output, labels, read=read), weight) for output, weight, labels in outputs]
    weights = [weight if told is None else told for told, weight in found]
    for (output, *_), weight in zip(outputs, weights, strict=True):
        if not weight:
            silence(output)
    return [weight / sum(weights) for weight in weights]


def split_changes(
    trainable: Trainable, batch: Batch, *, rows: int, weigh: Callable[[Batch, int], int], synchronized: bool = False
) -> str | None:
    """How far loss and gradient change where these rows are split in halves, and why, as a sentence; None where they do
    not, or where that cannot be told: random numbers were drawn, or the batch cannot be cut by rows.

    Args:
        trainable: on the CPU, in the mode of training; afterwards without dropout, and of no further use.
        rows: of the batch, an even number; `weigh` gives the weight of a batch of so many rows.
        synchronized: batch norms share their statistics between workers, so that they are left out.
    """
    norms = [part for part in trainable.module.modules() if isinstance(part, _BatchNorm) and part.training]
    # dropout ends, also where a module keeps its rate as a number (`dropout`, `drop_prob`)
    for part in trainable.module.modules():
        part.training = part.training and not isinstance(part, _DropoutNd)
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    for part in norms if synchronized else ():
        part.training = False
    if not all(value.ndim and len(value) == rows for _, value in tensors_of(batch, "")):
        return None
    halves = [_cut(batch, rows, slice(0, rows // 2)), _cut(batch, rows, slice(rows // 2, rows))]
    parts = [(half, weigh(half, rows // 2)) for half in halves]
    whole = [(batch, sum(weight for _, weight in parts))]
    if not all(weight for _, weight in parts):
        return None
    one, two = _run(trainable, whole), _run(trainable, parts)
    if not math.isfinite(one.loss + two.loss) or one.drew or two.drew or one.equals(two):
        return None
    again = _run(trainable, whole)
    if not one.equals(again):
        return (
            f"two passes over the same rows from the same state differ, with a loss of {one.loss:.6g} and of "
            f"{again.loss:.6g}: forward depends on how often it was called (a counter, or a random generator of its "
            f"own), and so on micro-batches and workers; {WHOLE}, so that it is called once a step"
        )
    why = f"what forward computes from several rows, or a mean over something else than its rows or labels: {RETURNED}"
    if one.equals(two, times=2.0):
        why = "the loss looks like a sum over the rows, where a mean is expected"
    elif norms and not synchronized:
        for part in norms:
            part.training = False
        only = _run(trainable, whole).equals(_run(trainable, parts))
        why = "batch norms take their statistics from a micro-batch" + ("" if only else f", and {why}")
    return (
        f"how a global batch is split changes what is trained: {one.loss:.6g} is the loss of {rows} rows as a whole, "
        f"{two.loss:.6g} of their halves together, and the gradients differ by {one.gaps(two)[1]:.2%} ({why}); {WHOLE}"
    )


def _run(trainable: Trainable, batches: Sequence[tuple[Batch, int]]) -> Passes:
    """Forward and backward of these batches as one step; what they change is put back."""
    module = trainable.module
    saved, before = SavedState(module, torch.device("cpu")), _generators()
    saved.take()
    counted = {"num_items_in_batch": sum(weight for _, weight in batches)} if trainable.takes_global_count else {}
    labels = [CountedLabels.of(batch) for batch, _ in batches]
    outputs = [
        (trainable.loss(module, batch, **counted), weight, held)
        for (batch, weight), held in zip(batches, labels, strict=True)
    ]
    module.zero_grad()
    loss, largest = 0.0, 0.0
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients: list[Tensor] = []
    for (output, *_), share in zip(outputs, combined_shares(trainable, outputs), strict=True):
        value = (output.loss if output.aux is None else output.loss + output.aux) * share
        value.backward()
        loss += float(value.detach()) if share else 0.0
        gradients = [torch.zeros(()) if p.grad is None else _wide(p.grad) for p in parameters]
        largest = max(largest, norm(gradients))
    drew = before != _generators()
    saved.restore()
    return Passes(loss, gradients, largest, drew)


def _wide(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64, copy=True)


def _generators() -> tuple[Any, ...]:
    arrays: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), arrays[1].tobytes(), arrays[2]


def _cut(value: Any, rows: int, part: slice) -> Any:
    """Some rows of every tensor in a batch, and of every list with an entry a row."""
    if isinstance(value, Tensor) or (isinstance(value, list) and len(value) == rows):
        return value[part]
    return rebuild(value, lambda inner: _cut(inner, rows, part))
