"""A small convolutional network for images, without batch statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.models.mlp import as_input, row_loss
from raytrain.models.sizes import check_cnn, check_count_list
from raytrain.trainable import Trainable

__all__ = ["cnn"]


class CNN(nn.Module):
    """Stages of 3 x 3 convolution, ReLU and 2 x 2 pooling, then one linear map.

    Batch statistics are left out so that a step does not depend on how its batch is split.
    """

    def __init__(self, channels: Sequence[int], image: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        depth, height, width = image
        self.image, self.dropout = image, dropout
        self.stages = nn.ModuleList(
            nn.Conv2d(a, b, kernel_size=3, padding=1) for a, b in zip([depth, *channels], channels, strict=False)
        )
        shrunk = (height >> len(channels)) * (width >> len(channels))
        self.head = nn.Linear(shrunk * ([depth, *channels][-1]), classes)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W), (B, H, W) or (B, C*H*W), bytes or floats -> (B, classes)."""
        y = as_input(x, self.head.weight.dtype).reshape(-1, *self.image)
        for stage in self.stages:
            y = F.max_pool2d(F.relu(stage(y)), 2)
        y = y.flatten(1)
        return self.head(F.dropout(y, self.dropout, self.training) if self.dropout else y)


def cnn(
    *,
    channels: Sequence[int] | int = (32, 64),
    image_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    dropout: float = 0.0,
) -> Trainable:
    """Build a CNN on batches {"x": images, "labels": (B,)}.

    Args:
        channels: output channels of each stage.
        image_shape: [H, W] or [C, H, W]; default: the source's shape.
        num_classes: outputs; default: the source's classes, or 1 for regression.
    Raises ValueError for sizes that cannot be built.

    Example:
        >>> import torch
        >>> from raytrain.models.cnn import cnn
        >>> trainable = cnn(channels=[8, 16], image_shape=[28, 28], num_classes=10)
        >>> trainable.module(torch.zeros(5, 28, 28, dtype=torch.uint8)).shape
        torch.Size([5, 10])
        >>> round(trainable.flops_per_sample)
        1740480
    """
    image = check_cnn(channels=channels, image_shape=image_shape, num_classes=num_classes, dropout=dropout)
    module = CNN(check_count_list("channels", channels), image, num_classes or 1, dropout)
    # 6 FLOPs per weight and position that it is applied to.
    _, height, width = module.image
    total = 6.0 * module.head.weight.numel()
    for number, stage in enumerate(module.stages):
        total += 6.0 * stage.get_parameter("weight").numel() * (height >> number) * (width >> number)
    return Trainable(module, row_loss, flops_per_sample=total)
