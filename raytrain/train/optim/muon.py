"""Muon: momentum whose update is made orthogonal, for the matrices inside a network's blocks.

Method: K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024,
https://kellerjordan.github.io/posts/muon/), with the scale of J. Liu and others, "Muon is scalable for LLM training"
(2025, https://arxiv.org/abs/2502.16982), under which a learning rate and weight decay found for AdamW do as they are.
The same update as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which takes plain matrices, one by one, and must
read the device to skip a step; this one takes stacks of experts too, orthogonalises matrices of one shape together,
and skips on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from raytrain.train.optim.eager import Eager

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz step: steepest at zero, and singular values end between 0.7 and 1.2 (Jordan)."""
ITERATIONS = 5
RMS = 0.2
"""Of an update by AdamW, which an orthogonal matrix of A x B reaches times sqrt(max(A, B)) (Liu)."""
BATCH_ELEMENTS = 2**24
"""So many elements are orthogonalised together at most: what it takes beside the state is bounded."""


class Muon(Eager, torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay.

    Args:
        params: parameters or groups of them, each a matrix (A, B), or a stack (E, A, B) of E that are orthogonalised
            one by one. DTensors too: a sharded matrix is gathered for it, a stack sharded over E is not.
        lr: as AdamW's.

    Orthogonalises in bfloat16, and float64 in itself. Where `found_inf` is set (a scalar on the device), a step with
    anything but zero in it changes nothing.

    Raises:
        ValueError: a parameter of another shape.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon takes matrices and stacks of them, not a shape {tuple(parameter.shape)}")
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        assert closure is None, "the step that calls this has computed its gradients"
        skip = None if self.found_inf is None else self.found_inf != 0
        for group in self.param_groups:
            for parameters in _batches(group["params"]):
                self._update(parameters, skip, **{name: group[name] for name in ("lr", "weight_decay", "momentum")})
        return None

    def _update(
        self, parameters: list[nn.Parameter], skip: Tensor | None, *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        """Parameters whose matrices are all of one shape."""
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            gradient, buffer = _local(parameter.grad), _local(state["momentum_buffer"])
            moved = buffer.lerp(gradient, 1 - momentum)
            directions.append(_matrices(gradient.lerp(moved, momentum), parameter))
            buffer.copy_(moved if skip is None else torch.where(skip, buffer, moved))
        found = orthogonal(torch.cat(directions)).split([len(matrices) for matrices in directions])
        rate, decay = RMS * math.sqrt(max(parameters[0].shape[-2:])) * lr, 1 - lr * weight_decay
        for parameter, update in zip(parameters, found, strict=True):
            own = _local(parameter)
            changed = own.mul(decay).sub_(_own_part(update, parameter).to(own.dtype), alpha=rate)
            own.copy_(changed if skip is None else torch.where(skip, own, changed))


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, A, B) -> (N, A, B): each as near to its nearest orthogonal matrix as five Newton-Schulz steps bring it.

    Its singular values end between about 0.7 and 1.2; a matrix of zeros stays one. Returns bfloat16, float64 for
    float64.
    """
    x = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those with a gradient, by the shape of their matrices, in the order given."""
    open_: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        batch = open_.setdefault((parameter.shape[-2:], parameter.dtype, parameter.device), [])
        if batch and sum(one.numel() for one in batch) + parameter.numel() > BATCH_ELEMENTS:
            yield list(batch)
            batch.clear()
        batch.append(parameter)
    yield from open_.values()


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor is all here."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _matrices(local: Tensor, parameter: Tensor) -> Tensor:
    """(N, A, B): the whole matrices of which `local` is this process's part, or its own ones of a stack."""
    if parameter.ndim == 3:
        return local
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        local = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **shape).full_tensor()
    return local[None]


def _own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `_matrices`, without a message."""
    if parameter.ndim == 3:
        return update
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(update[0], mesh, placements, src_data_rank=None).to_local()
    return update[0]
