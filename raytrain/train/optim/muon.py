"""The Muon optimizer: momentum with orthogonalised updates, for the matrices inside a network's blocks.

Method: K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024,
https://kellerjordan.github.io/posts/muon/), with the scale of J. Liu and others, "Muon is scalable for LLM training"
(2025, https://arxiv.org/abs/2502.16982), which makes a learning rate and weight decay tuned for AdamW fit unchanged.
The update is that of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. torch's class takes plain matrices one by one
and must read the device to skip a step; this one also takes stacks of experts, orthogonalises matrices of equal shape
together, and skips on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from raytrain.train.optim.eager import Eager

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz step: steepest at zero; singular values end in 0.7 to 1.2 (Jordan)."""
ITERATIONS = 5
RMS = 0.2
"""RMS of an AdamW update; an orthogonal A x B matrix scaled by this times sqrt(max(A, B)) matches it (Liu)."""
BATCH_ELEMENTS = 2**24
"""Maximum elements orthogonalised together; bounds the temporary memory."""


class Muon(Eager, torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay.

    Orthogonalises in bfloat16; float64 parameters in float64. If `found_inf` (a scalar on the device) is set and not
    zero, a step changes nothing.

    Args:
        params: parameters or groups of them. Each is a matrix (A, B), or a stack (E, A, B) of E matrices that are
            orthogonalised separately. DTensors are supported: a sharded matrix is gathered, a stack sharded over E is
            not.
        lr: learning rate, on the scale of AdamW's.

    Raises:
        ValueError: a parameter has another number of dimensions.
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
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported: gradients are computed before"
        skip = None if self.found_inf is None else self.found_inf != 0
        for group in self.param_groups:
            for parameters in _batches(group["params"]):
                self._update(parameters, skip, **{name: group[name] for name in ("lr", "weight_decay", "momentum")})
        return None

    def _update(
        self, parameters: list[nn.Parameter], skip: Tensor | None, *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        """Update parameters whose matrices have equal shapes."""
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            gradient, buffer = _local(parameter.grad), _local(state["momentum_buffer"])
            moved = buffer.lerp(gradient, 1 - momentum)
            matrices = _matrices(gradient.lerp(moved, momentum), parameter)
            directions.append(_format_of_products(matrices))  # at once: it halves the bytes that are kept
            buffer.copy_(moved if skip is None else torch.where(skip, buffer, moved))
            del moved, matrices
        sizes = [len(matrices) for matrices in directions]
        found = orthogonal(_joined(directions)).split(sizes)
        rate, decay = RMS * math.sqrt(max(parameters[0].shape[-2:])) * lr, 1 - lr * weight_decay
        for parameter, update in zip(parameters, found, strict=True):
            own = _local(parameter)
            changed = own.mul(decay).sub_(_own_part(update, parameter).to(own.dtype), alpha=rate)
            own.copy_(changed if skip is None else torch.where(skip, own, changed))


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix of each (N, A, B) -> (N, A, B), by five Newton-Schulz steps.

    Singular values end between about 0.7 and 1.2; a zero matrix stays zero. Returns bfloat16, or float64 for float64.
    """
    x = _format_of_products(matrices)
    del matrices  # the copy that an optimizer hands over is freed by the first iteration
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _format_of_products(matrices: Tensor) -> Tensor:
    return matrices if matrices.dtype == torch.float64 else matrices.bfloat16()


def _joined(parts: list[Tensor]) -> Tensor:
    """All matrices in one tensor; empties the list, so that they do not exist twice for longer than needed."""
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    parts.clear()
    return joined


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters with a gradient in batches of equal matrix shape, in the given order."""
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
    """This process's part of a DTensor; any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _matrices(local: Tensor, parameter: Tensor) -> Tensor:
    """Return (N, A, B): the full matrix of which `local` is a part, or this process's matrices of a stack."""
    if parameter.ndim == 3:
        return local
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        local = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **shape).full_tensor()
    return local[None]


def _own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `_matrices`, without communication."""
    if parameter.ndim == 3:
        return update
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(update[0], mesh, placements, src_data_rank=None).to_local()
    return update[0]
