"""Gradients of sharded parameters: each worker's rows of them, in flat buffers as those of whole ones are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytrain.train.parallel.flat_gradients import GradientBuffers


class ShardGradients(GradientBuffers):
    """FSDP2 adds what it reduces into a `.grad` that is there: these are, from before the first backward on."""

    def own(self, parameter: nn.Parameter) -> Tensor:
        """This worker's rows of it."""
        return local(parameter)

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """The view as a gradient of the whole parameter."""
        return like(parameter, view)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor: its rows of a sharded one, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, own: Tensor) -> Tensor:
    """`own`, this worker's rows, as a tensor sharded as `whole` is, sharing memory; itself where that is not sharded.
    No communication."""
    if not isinstance(whole, DTensor):
        return own
    return DTensor.from_local(
        own, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
