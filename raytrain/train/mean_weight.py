"""What a loss is a mean over, read from the operation that computed it.

A plain model returns a mean, and only its author knows over what: labels shifted inside, classes with weights, labels
other than 255, pixels under a mask. A step in several micro-batches must weigh each mean with its own count. torch
keeps that count in the autograd graph: the sum of class weights of an `nll_loss`, the elements of a `mean`, the divisor
of a `sum() / count`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raytrain.trainable import IGNORED_LABEL, LossOutput

MEAN = 1
"""Number of the reduction "mean" in torch's loss functions."""
MOST_NODES = 64
PASSED_THROUGH = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze",
                  "Clone", "Alias", "Expand")  # fmt: skip
"""Operations on a mean after which it is a mean over the same things, or a sum of means."""
ELEMENTWISE = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMarginLoss")
"""Losses whose mean is over the elements of their input."""


def told_weight(output: LossOutput, labels: Any, *, read: bool) -> float | None:
    """What `output.loss` is a mean over; None where nothing says so, or where it is the labels other than -100.

    Means over different things in one loss tell nothing, nor does a plain `mean` or quotient beside something unknown.
    May read the device, where only its values tell the weight.

    Args:
        read: whether to look at the graph where the model has not returned a weight.
    """
    if output.weight is not None:
        return float(output.weight)
    found: set[float] = set()
    plain = unknown = False
    for kind, node in _reductions(output.loss) if read else ():
        weight = _weight_of(kind, node, labels)
        if kind == "":
            unknown = True
        elif weight is None:
            return None
        else:
            found.add(weight)
            plain |= kind.startswith(("Mean", "SumDiv"))
    return None if len(found) != 1 or (plain and unknown) else found.pop()


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
        if kind.startswith(("NllLoss", "Mean", *ELEMENTWISE)):
            yield kind, node
        elif kind == "Div" and _kind(inner[0]) == "Sum" and inner[1:] in ([], [None]):
            yield "SumDiv", node
        elif kind in PASSED_THROUGH:
            nodes += inner
        else:
            yield "", node


def _kind(node: Any) -> str:
    return "" if node is None else node.name().partition("Backward")[0]


def _weight_of(kind: str, node: Any, labels: Any) -> float | None:
    """The weight of one mean; None for the labels other than -100, and for a sum."""
    if kind == "":
        return None
    if kind.startswith("Mean"):
        return float(node._saved_self_sym_numel)
    if kind == "SumDiv":
        return float(node._saved_other)
    if node._saved_reduction != MEAN:
        return None
    if kind.startswith("NllLoss"):
        return None if _counts_labels(node, labels) else float(node._saved_total_weight)
    return float(node._saved_self.numel())


def _counts_labels(node: Any, labels: Any) -> bool:
    """Whether an `nll_loss` averages over exactly the given labels other than -100, which the loader has counted."""
    target = node._saved_target
    ignored = node._saved_ignore_index % 2**64 == IGNORED_LABEL % 2**64
    same = isinstance(labels, Tensor) and target.data_ptr() == labels.data_ptr() and target.numel() == labels.numel()
    return ignored and node._saved_weight is None and same
