"""A multilayer perceptron for rows of features, for classification or regression."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.models.sizes import check_mlp
from raytrain.trainable import Batch, LossOutput, Trainable, accuracy, is_integer, need_keys

__all__ = ["mlp"]


class MLP(nn.Module):
    """Linear maps with GELU and dropout between them: x (B, ...) flattened -> (B, classes)."""

    def __init__(self, widths: Sequence[int], *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        y = as_input(x, next(self.parameters()).dtype).flatten(1)
        for layer in self.layers[:-1]:
            y = F.gelu(layer(y))
            y = F.dropout(y, self.dropout, self.training) if self.dropout else y
        return self.layers[-1](y)


def as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Features in the parameters' dtype; uint8 values (pixels) are scaled to [0, 1]."""
    return x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)


def row_loss(module: nn.Module, batch: Batch) -> LossOutput:
    """Loss of {"x", "labels"}: cross entropy for integer labels (B,), mean squared error for others.

    The module returns (B, classes). Accuracy is computed in evaluation, for classes.
    """
    need_keys(batch, "x", "labels")
    return supervised(module(batch["x"]), batch["labels"], training=module.training)


def supervised(outputs_BC: Tensor, labels: Tensor, *, training: bool) -> LossOutput:
    if outputs_BC.dtype in (torch.bfloat16, torch.float16):
        outputs_BC = outputs_BC.float()
    if not is_integer(labels):
        return LossOutput(F.mse_loss(outputs_BC.reshape(labels.shape), labels.to(outputs_BC.dtype)))
    if outputs_BC.shape[1] == 1:
        raise InputError(
            "model.num_classes", got="one output and whole-number labels", expected="the number of classes"
        )
    metrics = {} if training else {"accuracy": accuracy(outputs_BC.detach(), labels)}
    return LossOutput(F.cross_entropy(outputs_BC, labels.long()), metrics=metrics)


def mlp(
    *,
    hidden: Sequence[int] | int = (256, 256),
    num_features: int | None = None,
    num_classes: int | None = None,
    dropout: float = 0.0,
) -> Trainable:
    """Build an MLP on batches {"x": (B, ...), "labels": (B,)}.

    Args:
        hidden: widths of the hidden layers.
        num_features: numbers per row; default: the source's features.
        num_classes: outputs; default: the source's classes, or 1 for regression.
    Raises ValueError for sizes that cannot be built.

    Example:
        >>> import torch
        >>> from raytrain.models.mlp import mlp
        >>> trainable = mlp(hidden=[8], num_features=4, num_classes=3)
        >>> batch = {"x": torch.randn(5, 4), "labels": torch.tensor([0, 2, 1, 1, 0])}
        >>> trainable.module(batch["x"]).shape
        torch.Size([5, 3])
        >>> trainable.loss(trainable.module, batch).loss.shape
        torch.Size([])
    """
    widths = check_mlp(hidden=hidden, num_features=num_features, num_classes=num_classes, dropout=dropout)
    flops = 6.0 * sum(a * b for a, b in pairwise(widths))
    return Trainable(MLP(widths, dropout=dropout), row_loss, flops_per_sample=flops)
