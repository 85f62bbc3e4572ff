"""Gradients as views into flat buffers with a fixed order of summation.

Buffers in registration order sum the same way in a new process as in a long-running one. DDP rebuilds its buckets after
the first backward, so a resumed run of three workers would differ from an uninterrupted one in the last bits. A few
large buffers also make the norm, clipping and unscaling cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.train.parallel.squares import SquareSum, sum_of_squares

BUCKET_BYTES = 64 * 2**20


class GradientBuffers:
    """Flat gradient buffers whose views are the parameters' `.grad`.

    Buffers are filled in registration order; a new one starts at `bucket_bytes` and where the dtype or the device
    changes. A parameter without a gradient in a step keeps zeros, never None.

    Args:
        parameters: the trainable parameters (each once).
        bucket_bytes: size at which a buffer is closed, in bytes.
        with_flag: reserve one element next to the first buffer, reduced together with it (`flag_shortage`).

    Attributes:
        buffers: the gradients.
        payloads: the same memory as it is reduced, including the flag.
        members: the parameters of each buffer, in order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, with_flag: bool = False
    ) -> None:
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # (parameter, gradient, local view)
        self._with_flag = with_flag
        self.buffers: list[Tensor] = []
        self.payloads: list[Tensor] = []
        self.members: list[list[nn.Parameter]] = []
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            fits = not bucket or (
                parameter.dtype == bucket[0].dtype
                and parameter.device == bucket[0].device
                and size + self.own(parameter).nbytes <= bucket_bytes
            )
            if not fits:
                self._close(bucket)
                bucket, size = [], 0
            bucket.append(parameter)
            size += self.own(parameter).nbytes
        if bucket:
            self._close(bucket)
        self._squares = SquareSum([view for *_, view in self._views]) if self._views else None

    def _close(self, bucket: list[nn.Parameter]) -> None:
        size = sum(self.own(p).numel() for p in bucket)
        flag = int(self._with_flag and not self.buffers)
        payload = torch.zeros(size + flag, dtype=bucket[0].dtype, device=bucket[0].device)
        flat = payload[:size]
        self.buffers.append(flat)
        self.payloads.append(payload)
        self.members.append(bucket)
        start = 0
        for parameter in bucket:
            own = self.own(parameter)
            view = flat[start : start + own.numel()].view_as(own)
            start += own.numel()
            parameter.grad = grad = self.as_grad(parameter, view)
            self._views.append((parameter, grad, view))

    def release(self) -> None:
        """Free the memory for good; the buffers are unusable afterwards."""
        for parameter, *_ in self._views:
            parameter.grad = None
        self._squares = None
        for held in (self._views, self.buffers, self.payloads):
            held.clear()

    def own(self, parameter: nn.Parameter) -> Tensor:
        """This process's part of a parameter: here, all of it."""
        return parameter

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """Convert a view of a buffer to the gradient of `parameter`."""
        return view

    def unused(self) -> list[bool]:
        """For each parameter, whether it got no gradient in this step on this worker."""
        return [False] * len(self._views)

    def leave_out(self, unused: list[bool]) -> None:
        """Let optimizers leave out parameters, as a plain loop does those without a gradient, until `zero_`."""
        for (parameter, *_), without in zip(self._views, unused, strict=True):
            if without:
                parameter.grad = None

    def zero_(self) -> None:
        """Zero all gradients and make sure that autograd accumulates into the buffers.

        Restores the views where user code has set a `.grad` to None or to another tensor.
        """
        for payload in self.payloads:
            payload.zero_()
        for parameter, grad, _ in self._views:
            if parameter.grad is not grad:
                parameter.grad = grad

    def check(self) -> None:
        """Check, after backward, that every gradient is still a view of its buffer.

        Raises:
            RunError: a gradient was replaced during backward, so the reduction would miss it.
        """
        for parameter, grad, _ in self._views:
            if parameter.grad is not grad:
                raise RunError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was replaced during backward; "
                    "sparse gradients and hooks that assign .grad are not supported"
                )

    def sum_of_squares(self) -> Tensor:
        """Sum of squares of all gradients, a float64 scalar on the device. Independent, up to rounding, of the split
        into buffers."""
        if self._squares is None:
            raise RunError("there are no gradients to sum")
        return self._squares() if self.buffers[0].device.type == "cpu" else sum_of_squares(self.buffers)

    def mark_(self, bad: Tensor) -> None:
        """Set one gradient to NaN if `bad` (bool scalar on the device).

        The all-reduce spreads the NaN to all workers, so that they agree without another collective.
        """
        first = self.buffers[0][:1]
        first.copy_(torch.where(bad, torch.full_like(first, torch.nan), first))

    def flag_shortage(self) -> None:
        """Flag that this worker ran out of memory; the all-reduce of the payloads spreads the flag."""
        self.payloads[0][-1:].fill_(1.0)

    def shortage_flagged(self) -> bool:
        """After the all-reduce, whether any worker flagged a shortage. For CPU buffers only: reading a GPU's would wait
        for the device."""
        return bool(self.payloads[0].numpy()[-1] != 0.0)

    def nonfinite(self, module: nn.Module) -> list[str]:
        """Names of the parameters with non-finite gradients. Reads the device."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names[id(p)] for (p, *_), good in zip(self._views, self.finite(), strict=True) if not good]

    def finite(self) -> list[bool]:
        """For each parameter, whether this process's part of its gradient is finite. Reads the device."""
        return torch.stack([torch.isfinite(view).all() for *_, view in self._views]).tolist()

    def scale_(self, factor: Tensor) -> None:
        """Multiply all gradients by a device scalar (the clip coefficient)."""
        for flat in self.buffers:
            flat.mul_(factor.to(flat.dtype))
