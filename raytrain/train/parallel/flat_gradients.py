"""Gradients as views into flat buffers with a fixed order of summation.

Buffers in registration order sum the same way in a new process as in a long-running one. DDP rebuilds its buckets after
the first backward, so a resumed run of three workers would differ from an uninterrupted one in the last bits. A few
large buffers also make the norm, clipping and unscaling cheap.

Autograd is faster where a parameter has no gradient yet: it hands its own tensor over instead of adding to zeros. These
are taken into the buffers, a buffer at a time as soon as it is complete, so that hardly more than one buffer of them
exists at once, nothing of a captured graph's memory is kept, and gradients that share memory (torch hands out such ones
for `a.view(-1) + b.view(-1)`) are added up separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.train.parallel.squares import SquareSum, sum_of_squares

BUCKET_BYTES = 64 * 2**20
DENSE = "sparse gradients and hooks that assign .grad are not supported"
FLAGS = 3
"""Elements beside the first buffer that are reduced together with it: out of memory, an unused parameter, and a loss
that is a mean over another weight than the loader's."""


class OwnHook(partial[None]):
    """A hook of the product on an accumulated gradient, as opposed to a user's."""


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
        takes: take autograd's gradients over: between `attach` and `take`, `.grad` is autograd's. Where a user's hook
            looks at accumulated gradients, autograd adds to zeroed views, as without it.

    Attributes:
        buffers: the gradients.
        payloads: the same memory as it is reduced, including the flags.
        members: the parameters of each buffer, in order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, with_flags: bool = False,
        takes: bool = False,
    ) -> None:  # fmt: skip
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # (parameter, gradient, its memory as real rows)
        self._versions: list[int] = []
        self._flags = FLAGS if with_flags else 0
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
        self._takes, self._taking = takes, False
        self._filled = [False] * len(self._views)
        ends = [0, *accumulate(map(len, self.members))]
        self._places = [range(begin, end) for begin, end in pairwise(ends)]  # of each buffer, its parameters
        self._missing = [set[int]() for _ in self.members]  # of each, those whose gradient has not arrived
        if takes and len(self.members) > 1:  # a single buffer is complete when the pass is over
            own = weakref.ref(self)  # a strong reference in the parameters' hooks would keep the buffers alive
            for number, places in enumerate(self._places):
                for at in places:
                    self._views[at][0].register_post_accumulate_grad_hook(OwnHook(_on_arrival, own, number, at))

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
        self._squares, self._takes, self._taking = None, False, False
        for held in (self._views, self.buffers, self.payloads):
            held.clear()

    def own(self, parameter: nn.Parameter) -> Tensor:
        """This process's part of a parameter: here, all of it."""
        return parameter

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """Convert a view of a buffer to the gradient of `parameter`."""
        return view

    def zero_(self) -> None:
        """Drop all gradients and make sure that autograd accumulates into the buffers."""
        self._taking = self._takes and not any(_watched(parameter) for parameter, *_ in self._views)
        self._filled = [False] * len(self._views)
        if self._taking:  # what is taken overwrites the rest
            for parameter, *_ in self._views:
                parameter.grad = None
            self.payloads[0][self.buffers[0].numel() :].zero_()
            return
        for payload in self.payloads:
            payload.zero_()
        self.attach()
        self._versions = [grad._version for _, grad, _ in self._views]

    def attach(self) -> None:
        """Make autograd accumulate into the buffers, also where a forward has called `zero_grad`, whose part of the
        step's gradient is not complete before the last micro-batch. Called before each backward."""
        self._missing = [set(places) for places in self._places]
        if self._taking:
            self._take(range(len(self._views)))  # of a backward that forward has called
        for parameter, grad, _ in self._views:
            wanted = None if self._taking else grad
            if parameter.grad is not wanted:
                parameter.grad = wanted

    def arrived(self, bucket: int, at: int) -> None:
        """Take a buffer's gradients when the last of them has arrived. A second part of a gradient in the same backward
        is then added to the view."""
        missing = self._missing[bucket] if self._taking else set[int]()
        if at in missing:
            missing.remove(at)
            if not missing:
                self._take(self._places[bucket])

    def take(self) -> None:
        """Take what autograd has left after a backward; what no pass has reached becomes zero."""
        if self._taking:
            self._take(range(len(self._views)))
            without = [grad for (_, grad, _), filled in zip(self._views, self._filled, strict=True) if not filled]
            if without:
                torch._foreach_zero_(without)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def _take(self, places: Iterable[int]) -> None:
        first: list[tuple[Tensor, Tensor]] = []  # (view, gradient)
        later: list[tuple[Tensor, Tensor]] = []
        for at in places:
            parameter, grad, _ = self._views[at]
            new = parameter.grad
            if new is None or new is grad:
                continue
            if new.layout is not torch.strided:
                raise RunError(f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient; {DENSE}")
            (later if self._filled[at] else first).append((grad, new))
            parameter.grad, self._filled[at] = grad, True
        if first:
            torch._foreach_copy_([view for view, _ in first], [new for _, new in first])  # pyright: ignore[reportPrivateImportUsage]
        if later:
            torch._foreach_add_([view for view, _ in later], [new for _, new in later])  # pyright: ignore[reportPrivateImportUsage]

    def unused(self) -> list[bool]:
        """For each parameter, whether no backward since `zero_` has reached it here. Reads no device value."""
        if self._taking:
            found = zip(self._views, self._filled, strict=True)
            return [not filled and (one.grad is None or one.grad is grad) for (one, grad, _), filled in found]
        return [grad._version == before for (_, grad, _), before in zip(self._views, self._versions, strict=True)]

    def leave_out(self, unused: Sequence[bool]) -> None:
        """Hide these gradients from the optimizer until the next `zero_`: like a plain loop's None, not like zeros,
        which weight decay and momentum would move."""
        for (parameter, *_), without in zip(self._views, unused, strict=True):
            if without:
                parameter.grad = None

    def check(self) -> None:
        """Check, after the passes, that every gradient is a view of its buffer.

        Raises:
            RunError: a gradient is sparse, or was replaced during backward, so the reduction would miss it.
        """
        self.take()
        for parameter, grad, _ in self._views:
            if parameter.grad is None and self._taking:
                parameter.grad = grad
            elif parameter.grad is not grad:
                raise RunError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was replaced during backward; "
                    f"{DENSE}"
                )

    def sum_of_squares(self) -> Tensor:
        """Sum of squares of all gradients, a float64 scalar on the device. Independent, up to rounding, of the split
        into buffers."""
        if self._squares is None:
            raise RunError("there are no gradients to sum")
        return self._squares() if self.buffers[0].device.type == "cpu" else sum_of_squares(self.buffers)

    def mark_(self, loss: Tensor) -> None:
        """Make one gradient NaN where `loss` (a scalar on the device) is not finite.

        The all-reduce spreads the NaN to all workers, so that they agree without another collective.
        """
        self.buffers[0][:1].add_(loss * 0.0)

    def flag(self, flags: Sequence[bool]) -> None:
        """Raise these `FLAGS` on this worker; the all-reduce of the payloads spreads them."""
        for at, raised in enumerate(flags, -FLAGS):
            if raised:
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
        for dtype in {flat.dtype for flat in self.buffers}:
            same = [flat for flat in self.buffers if flat.dtype is dtype]
            own = factor.to(dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(same, own)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType, reportCallIssue]


def _watched(parameter: nn.Parameter) -> bool:
    """Whether a user's hook looks at its accumulated gradient."""
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(isinstance(hook, OwnHook) for hook in hooks.values())  # type: ignore[union-attr]


def _on_arrival(buffers: weakref.ref[GradientBuffers], bucket: int, at: int, _: nn.Parameter) -> None:
    alive = buffers()
    if alive is not None:
        alive.arrived(bucket, at)


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions from the outermost to the innermost in memory: 0, 2, 3, 1 for channels_last."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
