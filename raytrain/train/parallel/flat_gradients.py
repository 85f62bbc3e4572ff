"""Gradients as views into flat buffers with a fixed order of summation, and their sums of squares for the clip norm.

`reduction.py` sums them over workers; expert hosts keep theirs in the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.errors import RunError

#: Longest row; a longer one is divided.
ROW = 2**12
#: Elements that a CPU converts to float64 at a time, a multiple of `ROW`. They fit in the cache: converting a large
#: buffer at once costs twice as much as the sum.
PIECE = 2**16
#: Rows whose float64 squares are summed at a time: torch divides a longer sum among its threads.
SUMMED_ROWS = 2**14
#: A smaller sum is computed in float64 throughout: squares that float32 cannot hold could be a noticeable part of it.
SMALLEST = 1e-18


class SquareSum:
    """The sum of squares of contiguous tensors of a CPU, at least one, whose values change, in their memory. Those in
    float32 are summed with a relative error of about 1e-7, all others with that of float64."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        in_rows = [one.detach() for one in gradients if one.dtype == torch.float32]
        self._rows = [view for one in _joined(in_rows) for view in _views(one)]
        self._exact = in_rows
        self._others = [one.detach().view(-1) for one in gradients if one.dtype != torch.float32]
        counts = [view.shape[:-1].numel() for view in self._rows]
        self._norms = torch.empty(sum(counts))
        self._on_host = np.zeros(())
        self._total = torch.from_numpy(self._on_host)  # the same memory: no step reads a tensor
        outs = self._norms.split(counts) if counts else ()
        self._outs = [out.view(view.shape[:-1]) for out, view in zip(outs, self._rows, strict=True)]

    def __call__(self) -> Tensor:
        sums = [_exact_sum(one) for one in self._others]
        if self._exact:
            sums.append(self._sum_of_rows())
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _sum_of_rows(self) -> Tensor:
        for view, out in zip(self._rows, self._outs, strict=True):
            torch.linalg.vector_norm(view, dim=-1, out=out)
        squares = self._norms.double().square_()
        sums = [part.sum() for part in squares.split(SUMMED_ROWS)]
        found = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
        self._total.copy_(found)
        if SMALLEST < float(self._on_host) < torch.inf:
            return found
        return torch.stack([_exact_sum(one.view(-1)) for one in self._exact]).sum()


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all gradients, a float64 scalar on the device of the first; see `SquareSum`."""
    return SquareSum(gradients)() if gradients[0].device.type == "cpu" else sum_on_device(gradients)


def sum_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """As `sum_of_squares` on a GPU. It makes no views: for the tensors of GPT-2 they took a host half a millisecond."""
    with torch.no_grad():
        return _squares(gradients).sum()


def _joined(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor as (rows, length of a row); neighbours in memory with rows of equal length are one, to call torch
    less often."""
    found: list[Tensor] = []
    for gradient in gradients:
        if not gradient.numel():
            continue
        row = gradient.shape[-1] if gradient.ndim else 1
        row = ROW if row % ROW == 0 else row
        view = gradient.view(-1, row)
        last = found[-1] if found else None
        # not long rows: the order of their parts, and so the last bit, would depend on what lies side by side
        if (
            last is not None
            and last.shape[1] == row <= ROW
            and last.data_ptr() + last.nbytes == view.data_ptr()
            and last.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        ):
            found[-1] = last.as_strided((last.shape[0] + view.shape[0], row), (row, 1))
        else:
            found.append(view)
    return found


def _views(rows: Tensor) -> list[Tensor]:
    """Views whose last dimension is what is summed at a time: the rows, or parts of long ones."""
    count, length = rows.shape
    if length <= ROW:
        return [rows]
    parts = length // ROW
    begin = rows.storage_offset()
    return [
        rows.as_strided((count, parts, ROW), (length, ROW, 1)),
        rows.as_strided((count, length - parts * ROW), (length, 1), begin + parts * ROW),
    ]


def _exact_sum(flat: Tensor) -> Tensor:
    converted = torch.empty(min(PIECE, flat.numel()), dtype=torch.float64)
    sums = []
    for piece in flat.split(PIECE):
        numbers = piece if piece.dtype == torch.float64 else converted[: piece.numel()].copy_(piece)
        whole = piece.numel() // ROW * ROW
        if whole:
            sums.append(torch.linalg.vector_norm(numbers[:whole].view(-1, ROW), dim=1).square().sum())
        if whole < piece.numel():
            sums.append(torch.linalg.vector_norm(numbers[whole:]).square())
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def squares_of_each(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """The sum of squares of each group of tensors on one device, at least one in each; see `SquareSum`. One read."""
    if not groups or groups[0][0].device.type == "cpu":
        return [sum_of_squares(group).item() for group in groups]
    return _in_few_kernels(groups)


def _in_few_kernels(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    squares = iter(_squares([one.detach() for group in groups for one in group]).tolist())
    return [sum(next(squares) for _ in group) for group in groups]


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor, in few kernels, which convert to float64 while they read, and sum in an order that depends on its
    size and alignment only."""
    norms = torch._foreach_norm(list(tensors), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square()


# ---------------------------------------------------------------- flat gradients


BUCKET_BYTES = 64 * 2**20
FLAGS = 3
"""Elements beside the first buffer that are reduced together with it: out of memory, an unused parameter, and a loss
that is a mean over another weight than the loader's."""


class GradientBuffers:
    """Flat gradient buffers whose views are the parameters' `.grad`.

    Buffers are filled in registration order; a new one starts at `bucket_bytes` and where the dtype or the device
    changes. A gradient has the strides of its parameter, as fused optimizers walk through the memory of both alike, and
    a complex one lies in a buffer of real numbers. A parameter without a gradient in a step keeps zeros; `leave_out`
    takes them away from the optimizer.

    Args:
        parameters: the trainable parameters (each once), whose elements fill their memory in some order of dimensions.
        bucket_bytes: size at which a buffer is closed, in bytes.
        with_flags: reserve `FLAGS` elements next to the first buffer, reduced together with it (`flag`).
    """

    several = False  # whether the step has several passes

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, with_flags: bool = False
    ) -> None:
        self._views: list[tuple[nn.Parameter, Any, Tensor]] = []  # (parameter, gradient, its memory as real rows)
        self._versions: list[int] = []
        self._flags = FLAGS if with_flags else 0
        self.buffers: list[Tensor] = []  # the gradients
        self.payloads: list[Tensor] = []  # the same memory as it is reduced, including the flags
        self.members: list[list[nn.Parameter]] = []  # the parameters of each buffer, in order
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
        on_cpu = bool(self.buffers) and self.buffers[0].device.type == "cpu"
        self._squares = SquareSum([view for *_, view in self._views]) if on_cpu else None

    def _close(self, bucket: list[nn.Parameter]) -> None:
        owned = [self.own(parameter).detach() for parameter in bucket]
        parts = [own.numel() * (2 if own.is_complex() else 1) for own in owned]
        size, flags = sum(parts), 0 if self.buffers else self._flags
        payload = torch.zeros(size + flags, dtype=owned[0].dtype.to_real(), device=bucket[0].device)
        flat = payload[:size]
        self.buffers.append(flat)
        self.payloads.append(payload)
        self.members.append(bucket)
        for parameter, own, piece in zip(bucket, owned, flat.split(parts), strict=True):
            order = memory_order(own)
            flat_view = torch.view_as_complex(piece.view(-1, 2)) if own.is_complex() else piece
            # `.data` has a version counter of its own, which only what is accumulated into this gradient raises
            view = flat_view.as_strided(own.shape, own.stride(), flat_view.storage_offset()).data
            parameter.grad = grad = self.as_grad(parameter, view)
            sizes = [own.shape[dim] for dim in order]
            if own.is_complex():
                sizes = [*sizes[:-1], 2 * (sizes[-1] if sizes else 1)]
            self._views.append((parameter, grad, piece.view(sizes)))

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

    def zero_(self) -> None:
        """Zero all gradients and make sure that autograd accumulates into the buffers."""
        for payload in self.payloads:
            payload.zero_()
        self.attach()
        self._versions = [grad._version for _, grad, _ in self._views]

    def attach(self) -> None:
        """Make autograd accumulate into the buffers, also where a forward has called `zero_grad`, whose part of the
        step's gradient is not complete before the last micro-batch."""
        for parameter, grad, _ in self._views:
            if grad is not None and parameter.grad is not grad:
                parameter.grad = grad

    def take(self) -> None:
        """Called after each backward: here, autograd has added to the buffers."""

    def unused(self) -> list[bool]:
        """For each parameter, whether no backward since `zero_` has reached it here. Reads no device value."""
        return [grad._version == before for (_, grad, _), before in zip(self._views, self._versions, strict=True)]

    def leave_out(self, unused: Sequence[bool]) -> None:
        """Hide these gradients from the optimizer until the next `zero_`: like a plain loop's None, not like zeros,
        which weight decay and momentum would move."""
        for (parameter, *_), without in zip(self._views, unused, strict=True):
            if without:
                parameter.grad = None

    def check(self) -> None:
        """Check, after backward, that every gradient is still a view of its buffer. Raises RunError: a gradient was
        replaced during backward, so the reduction would miss it."""
        self.take()
        for parameter, grad, _ in self._views:
            if parameter.grad is not grad:
                raise RunError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was replaced during backward; "
                    "sparse gradients and hooks that assign .grad are not supported"
                )

    def sum_of_squares(self) -> Tensor:
        """Sum of squares of all gradients, a float64 scalar on the device. Independent, up to rounding, of the split
        into buffers."""
        if not self.buffers:
            raise RunError("there are no gradients to sum")
        return self._squares() if self._squares is not None else sum_of_squares(self.buffers)

    def mark_(self, loss: Tensor) -> None:
        """Make one gradient NaN where `loss` (a scalar on the device) is not finite: the all-reduce spreads it to all
        workers, so that they agree without another collective."""
        first = next((flat for flat in self.buffers if flat.numel()), None)
        if first is not None:
            first.view(-1)[:1].add_(loss * 0.0)

    def flag(self, flags: Sequence[bool]) -> None:
        """Raise these `FLAGS` on this worker; the all-reduce of the payloads spreads them."""
        for at, raised in enumerate(flags, -FLAGS):
            if raised and self.payloads:
                self.payloads[0][at].fill_(1.0)

    def flagged(self) -> list[bool]:
        """After the all-reduce, which flags any worker has raised. For CPU buffers only: reading a GPU's would wait for
        the device."""
        return [bool(value) for value in self.payloads[0].numpy()[-FLAGS:]]

    def nonfinite(self, module: nn.Module) -> list[str]:
        """Names of the parameters with non-finite gradients. Reads the device."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names[id(p)] for (p, *_), good in zip(self._views, self.finite(), strict=True) if not good]

    def finite(self) -> list[bool]:
        """For each parameter, whether this process's part of its gradient is finite. Reads the device."""
        return torch.stack([torch.isfinite(view).all() for *_, view in self._views]).tolist()

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply all gradients by a device scalar (the clip coefficient) or a number."""
        # not by the fused optimizers' `grad_scale`: they divide, which rounds differently, and others do not take it
        for dtype in {flat.dtype for flat in self.buffers}:
            same = [flat for flat in self.buffers if flat.dtype is dtype]
            own = factor.to(dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(same, own)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType, reportCallIssue]


class HeldGradients(GradientBuffers):
    """The gradients of a single worker, which nothing sums: autograd's own tensors, without flat buffers.

    Autograd hands its tensor over where a parameter has no gradient, and later passes of a step add to it. On a CPU,
    forward and backward of a small GPT took 18.0 and 33.3 ms so; where autograd adds to zeroed views, 18.9 and 34.0;
    copied into flat buffers after each backward, 19.0 and 34.3.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(())
        self._empty = [(parameter, None, parameter.detach().new_empty(0)) for parameter in parameters]
        self._orders = [memory_order(parameter) for parameter, *_ in self._empty]
        watched = [parameter for parameter, *_ in self._empty if parameter._post_accumulate_grad_hooks]
        self._last_hooks = [one.register_post_accumulate_grad_hook(_refuse_taken) for one in watched]
        self.zero_()

    def zero_(self) -> None:
        self._views, self.buffers = list(self._empty), []
        for parameter, *_ in self._views:
            parameter.grad = None

    def release(self) -> None:
        super().release()
        while self._last_hooks:
            self._last_hooks.pop().remove()

    def take(self) -> None:
        """Note what autograd has left, each in memory of its own.

        Two may lie in the same memory, such as of `a.view(-1) + b.view(-1)`, which the clip would scale twice, or be
        parts of a larger one, which they would keep.
        """
        seen: set[int] = set()
        for at, (parameter, held, _) in enumerate(self._views):
            new = parameter.grad
            if new is None or new is held:
                continue
            if new.layout is not torch.strided:
                parameter.grad = new = new.to_dense()
            memory = new.untyped_storage()
            shared = memory._cdata in seen or memory.nbytes() > new.nbytes or new.is_conj() or new.is_neg()
            # the next pass of a captured graph overwrites what it has returned
            if shared or new.stride() != parameter.stride() or (self.several and new.is_cuda):
                parameter.grad = new = torch.empty_like(parameter).copy_(new).detach()
            seen.add(new.untyped_storage()._cdata)
            self._views[at] = (parameter, new, in_rows(new.detach() if new.requires_grad else new, self._orders[at]))
        self.buffers = [rows for _, grad, rows in self._views if grad is not None]

    def unused(self) -> list[bool]:
        return [parameter.grad is None for parameter, *_ in self._views]

    def sum_of_squares(self) -> Tensor:
        rows = self.buffers or [empty for *_, empty in self._empty]  # a worker may have no rows
        return sum_of_squares(rows)


def _refuse_taken(parameter: nn.Parameter) -> None:
    if parameter.grad is None:
        raise RunError(
            f"a hook has taken away the gradient of a parameter of shape {tuple(parameter.shape)}, such as one that "
            "steps an optimizer of its own in backward: it would also act in passes that are only measured; remove it, "
            "and choose the optimizer by optim.name"
        )


def in_rows(tensor: Tensor, order: list[int]) -> Tensor:
    """A view of all of a tensor's memory as contiguous rows of real numbers; `order` as `memory_order`."""
    rows = tensor if order == sorted(order) else tensor.permute(order)
    return torch.view_as_real(rows).view(*rows.shape[:-1], -1) if rows.is_complex() else rows


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions from the outermost to the innermost in memory: 0, 2, 3, 1 for channels_last."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
