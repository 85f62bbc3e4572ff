"""What a loss is a mean over, read from the operation that computed it.

A plain model returns a mean, and only its author knows over what: labels shifted inside, classes with weights, labels
other than 255, pixels under a mask. A step in several micro-batches must weigh each mean with its own count. torch
keeps that count in the autograd graph: the sum of class weights of an `nll_loss`, the elements of a `mean`, the divisor
of a `sum() / count`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytrain.trainable import IGNORED_LABEL, Batch, LossOutput

MEAN, SUM = 1, 2
"""Numbers of the reductions in torch's loss functions."""
MOST_NODES = 64
PASSED_THROUGH = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze",
                  "Clone", "Alias", "Expand")  # fmt: skip
"""Operations on a mean after which it is a mean over the same things, or a sum of means."""
ROUNDING = 1e-5
"""Relative difference of two sums of the same class weights."""
NAMED = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMarginLoss")
"""Losses with a reduction of their own; all but the first average over the elements of their input."""


class CountedLabels(NamedTuple):
    """The labels of a batch as the loader has counted them; taken before forward, which may write into them."""

    labels: Any
    version: int

    @classmethod
    def of(cls, batch: Batch) -> CountedLabels:
        labels = batch.get("labels")
        return cls(labels, labels._version if isinstance(labels, Tensor) else 0)

    def are(self, target: Tensor) -> bool:
        labels = self.labels
        if not isinstance(labels, Tensor) or labels._version != self.version:
            return False
        return target.data_ptr() == labels.data_ptr() and target.numel() == labels.numel()


def told_weight(output: LossOutput, counted: CountedLabels, *, read: bool) -> float | None:
    """What `output.loss` is a mean over; None where nothing says so, or where it is the labels other than -100; NaN
    where it cannot be told: a sum of means over different counts, or compiled code.

    Means over different things in one loss tell nothing, but a loss function of torch's counts for more than a plain
    `mean` or quotient beside it, such as a penalty; and these tell nothing beside something unknown. May read the
    device, where only its values tell the weight. `read`: look at the graph where the model has not returned a weight.
    """
    if output.weight is not None:
        return float(output.weight)
    if read and output.loss.grad_fn is None and torch.is_grad_enabled():
        return 0.0  # a constant, for no rows
    named: list[float] = []
    plain: list[float] = []
    unknown = hidden = False
    for kind, node in _reductions(output.loss) if read else ():
        if kind == "":
            unknown, hidden = True, hidden or node.name().startswith("CompiledFunction")
        elif kind == "Zero":
            plain.append(0.0)
        elif kind == "Mean":
            plain.append(float(node._saved_self_sym_numel))
        elif kind == "Div":
            # The count in `sum() / count`; a sum of nothing over `count.clamp(min=1)` is a mean over nothing.
            count = float(node._saved_other)
            plain.append(0.0 if count == 1.0 and float(output.loss.detach()) == 0.0 else count)
        elif kind.startswith("NllLoss"):
            ignored = node._saved_ignore_index % 2**64 == IGNORED_LABEL % 2**64
            if ignored and node._saved_weight is None and counted.are(node._saved_target):
                return None
            named.append(float(node._saved_total_weight))
        else:
            named.append(float(node._saved_self.numel()))
    found = named or plain
    if not found or (unknown and not named):
        return math.nan if hidden else None
    return found[0] if max(found) - min(found) <= ROUNDING * max(found) else math.nan


@contextlib.contextmanager
def graph_alone() -> Iterator[None]:
    """Context of a forward whose graph tells the weight, without the activations that backward would need."""

    def scalars(saved: Tensor) -> Tensor:
        return saved if saved.ndim == 0 else torch.empty_like(saved, device="meta")

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(scalars, lambda saved: saved):
        yield


def silence(output: LossOutput) -> None:
    """Make the gradients of a mean over nothing zero, as they are in a mean over the whole batch; they are NaN."""
    root = output.loss.grad_fn
    for node in [] if root is None else [root, *(node for kind, node in _reductions(output.loss) if kind)]:
        node.register_hook(lambda found, _: tuple(None if one is None else torch.zeros_like(one) for one in found))


def _reductions(loss: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield (kind, node) of the means that a loss is the sum of; kind "" for a part that is something else."""
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(MOST_NODES):
        if not nodes:
            return
        node = nodes.pop()
        if node is None:  # a constant
            continue
        kind, inner = _kind(node), [below for below, _ in node.next_functions]
        scalars = _scalars_in(node, inner) if kind in ("Mean", "Sum") else None
        if kind == "Mul" and inner[1:] == [None] and _is_zero(node._saved_other):  # x.sum() * 0, for no rows
            yield "Zero", node
        elif scalars is not None:  # of losses that are scalars already
            nodes += scalars
        elif _is_mean(node) or (kind == "Div" and inner[1:] in ([], [None]) and _is_sum(inner[0])):
            yield kind, node
        elif kind in PASSED_THROUGH:
            nodes += inner
        else:
            yield "", node


def _is_zero(factor: Any) -> bool:
    """Whether it is the number 0, which torch keeps on the CPU; values on a device are not read."""
    return isinstance(factor, Tensor) and factor.ndim == 0 and factor.device.type == "cpu" and float(factor) == 0.0


def _kind(node: Any) -> str:
    return "" if node is None else node.name().partition("Backward")[0]


def _scalars_in(node: Any, inner: list[Any]) -> list[Any] | None:
    """What a mean or sum of a scalar, or of stacked scalars, is computed from; None for one over several elements."""
    sizes = tuple(node._saved_self_sym_sizes)
    if _kind(inner[0]) == "Stack":
        parts = [below for below, _ in inner[0].next_functions]
        return parts if sizes == (len(parts),) else None
    below = inner[0]
    while _kind(below) in PASSED_THROUGH:
        below = below.next_functions[0][0]
    # over one row of losses it has no mean below it
    return inner if _is_mean(below) and all(size == 1 for size in sizes) else None


def _is_mean(node: Any) -> bool:
    kind = _kind(node)
    return kind == "Mean" or (kind.startswith(NAMED) and node._saved_reduction == MEAN)


def _is_sum(node: Any) -> bool:
    """Whether a numerator is a sum over elements, perhaps of several sums, times constants."""
    kind = _kind(node)
    if kind.startswith(NAMED):
        return node._saved_reduction == SUM
    inner = [] if node is None else [below for below, _ in node.next_functions if below is not None]
    return kind == "Sum" or (kind in PASSED_THROUGH and bool(inner) and all(map(_is_sum, inner)))
