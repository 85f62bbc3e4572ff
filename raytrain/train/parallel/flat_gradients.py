"""Gradients as views into flat buffers, and their reduction over the workers in a fixed order.

A plain list of buffers in registration order sums the same way in a fresh process and in an old one; DDP, which
rebuilds its buckets after its first backward, does not, and a resumed run of three workers would differ from the
unbroken one in its last bits. One pass over few large buffers also makes the norm, the clip and the unscaling cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raytrain.errors import RunError

BUCKET_BYTES = 64 * 2**20
#: On a CPU the norm goes through a buffer in pieces of this many elements: torch makes a float64 copy of what it takes
#: the norm of, and a copy that stays in the cache costs a tenth of one that does not.
NORM_PIECE = 2**18


class GradientBuffers:
    """Flat gradient buffers whose views are the parameters' `.grad`.

    Buffers are filled in registration order; a new one begins at `bucket_bytes` or where the dtype or the device
    changes. A parameter without a gradient in a step keeps zeros, never None.

    Args:
        parameters: the trainable parameters (each once).
        bucket_bytes: size at which a buffer is closed, in bytes.
        with_flag: room for one number beside the first buffer, which travels with it (`flag_shortage`).

    Attributes:
        buffers: the gradients. payloads: the same memory as it is summed, the word included.
        members: the parameters of each buffer, in order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, with_flag: bool = False
    ) -> None:
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its gradient, and that one's own numbers
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

    def _close(self, bucket: list[nn.Parameter]) -> None:
        size = sum(self.own(p).numel() for p in bucket)
        word = int(self._with_flag and not self.buffers)
        payload = torch.zeros(size + word, dtype=bucket[0].dtype, device=bucket[0].device)
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
        """Give the memory up, for good."""
        for parameter, *_ in self._views:
            parameter.grad = None
        for held in (self._views, self.buffers, self.payloads):
            held.clear()

    def own(self, parameter: nn.Parameter) -> Tensor:
        """What this process holds of a parameter: all of it."""
        return parameter

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """The view of a buffer as `parameter`'s gradient."""
        return view

    def zero_(self) -> None:
        """Zero all gradients and make sure that autograd will add into the buffers.

        Somebody's module may have set a `.grad` to None or to a tensor of its own; the views are put back.
        """
        for payload in self.payloads:
            payload.zero_()
        for parameter, grad, _ in self._views:
            if parameter.grad is not grad:
                parameter.grad = grad

    def check(self) -> None:
        """After backward: every gradient still lives in its buffer.

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
        """Sum of squares of all gradients, a float64 scalar on the device: the same number for any split into buffers
        up to float64 rounding."""
        pieces = [piece for flat in self.buffers for piece in _norm_pieces(flat)]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        if len(norms) == 1:
            return norms[0].square()
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()

    def mark_(self, bad: Tensor) -> None:
        """Where `bad` (bool scalar on the device), one gradient becomes NaN: after the sum over the workers it is
        everybody's, so that no further exchange is needed to agree."""
        first = self.buffers[0][:1]
        first.copy_(torch.where(bad, torch.full_like(first, torch.nan), first))

    def flag_shortage(self) -> None:
        """This worker had no memory for its passes: everybody hears it with the sum of the payloads."""
        self.payloads[0][-1:].fill_(1.0)

    def shortage_flagged(self) -> bool:
        """After the sum over the workers, on a CPU: whether any of them had no memory. Not for a GPU, which it would
        wait for."""
        return bool(self.payloads[0].numpy()[-1] != 0.0)

    def nonfinite(self, module: nn.Module) -> list[str]:
        """Names of the parameters whose gradients are not finite. Reads the device."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names[id(p)] for (p, *_), good in zip(self._views, self.finite(), strict=True) if not good]

    def finite(self) -> list[bool]:
        """Whether what this process holds of each parameter's gradient is finite. Reads the device."""
        return torch.stack([torch.isfinite(view).all() for *_, view in self._views]).tolist()

    def scale_(self, factor: Tensor) -> None:
        """Multiply all gradients by a device scalar (the clip coefficient)."""
        for flat in self.buffers:
            flat.mul_(factor.to(flat.dtype))


def _norm_pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """A buffer whole on a GPU, whose kernel casts as it reads; in pieces on a CPU."""
    return flat.split(NORM_PIECE) if flat.device.type == "cpu" else (flat,)
