"""Gradients as views into flat buffers, and their reduction over the workers in a fixed order.

A plain list of buffers in registration order sums the same way in a fresh process and in an old one; DDP, which
rebuilds its buckets after its first backward, does not, and a resumed run of three workers would differ from the
unbroken one in its last bits. One pass over few large buffers also makes the norm, the clip and the unscaling cheap.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.errors import CollectiveFailed, RunError, StateLost, first_line

BUCKET_BYTES = 64 * 2**20
#: On a CPU the norm goes through a buffer in pieces of this many elements: torch makes a float64 copy of what it takes
#: the norm of, and a copy that stays in the cache costs a tenth of one that does not.
NORM_PIECE = 2**18
#: So long may the word that a group was given up take to every worker.
WORD_S = 3.0


class GradientBuffers:
    """Flat gradient buffers whose views are the parameters' `.grad`.

    Buffers are filled in registration order; a new one begins at `bucket_bytes` or where the dtype or the device
    changes. A parameter without a gradient in a step keeps zeros, never None.

    Args:
        parameters: the trainable parameters (each once).
        bucket_bytes: size at which a buffer is closed, in bytes.
        with_word: room for one number beside the first buffer, which travels with it (`say_short`).

    Attributes:
        buffers: the gradients. payloads: the same memory as it is summed, the word included.
        members: the parameters of each buffer, in order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, with_word: bool = False
    ) -> None:
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its gradient, and that one's own numbers
        self._with_word = with_word
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
        word = int(self._with_word and not self.buffers)
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

    def say_short(self) -> None:
        """This worker had no memory for its passes: everybody hears it with the sum of the payloads."""
        self.payloads[0][-1:].fill_(1.0)

    def some_were_short(self) -> bool:
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


@dataclass(frozen=True)
class WorkersGroup:
    """Process groups over the workers that can be given up and made anew, which torch's default group cannot.

    Attributes:
        payload, flags: for tensors of the device, and for CPU tensors.
        lost: why they are given up, None while they are not.
    """

    payload: Any
    flags: Any
    lost: Callable[[], str | None]


class Workers:
    """The workers as one training step sees them: sums over the group, and nothing at all for a single worker.

    Uses torch's default process group for device tensors and a gloo group for CPU flags (the same one where the
    default is gloo). Runs in every worker process; each call is a collective that all workers make, and raises
    `CollectiveFailed` where one of them is gone.
    """

    def __init__(self) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._payload: Any = None
        self._flags: Any = None
        if self.world > 1:
            self._payload = self._flags = dist.group.WORLD
            if dist.get_backend() != "gloo":
                self._flags = dist.new_group(backend="gloo")
        self._lost: Callable[[], str | None] | None = None
        self.wait_s = 0.0

    def use(self, group: WorkersGroup) -> None:
        """From now on meet over these process groups of the same workers."""
        self._payload, self._flags, self._lost = group.payload, group.flags, group.lost

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the workers in place, in the order given."""
        for tensor in tensors:
            self.begin_sum(tensor)()

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start a sum of a tensor in place and return at once; calling what comes back waits (a GPU's stream does)."""
        if self.world == 1:
            return lambda: None
        with self._together():
            work = self._of(tensor).allreduce([tensor])
        return lambda: self._finished(work)

    def _finished(self, work: Any) -> None:
        with self._together():
            work.wait()

    def sum_flags(self, values: list[int]) -> list[int]:
        """Sum small host integers over the workers; never touches the device."""
        return self.begin_sum_flags(values)()

    def begin_sum_flags(self, values: list[int]) -> Callable[[], list[int]]:
        """Start a sum of host integers and return at once; calling what comes back waits for it.

        While it travels, other collectives may run, in the same order on every worker.
        """
        if self.world == 1:
            return lambda: values
        vector = torch.tensor(values, dtype=torch.int64)
        with self._together():
            work = self._flags.allreduce([vector])

        def finish() -> list[int]:
            self._finished(work)
            # numpy shares memory with a CPU tensor: no device read is made or counted
            return [int(value) for value in vector.numpy()]

        return finish

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """One row of host floats for each worker, on every worker."""
        if self.world == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        with self._together():
            self._flags.allgather([rows], [own]).wait()
        return [[float(value) for value in row.numpy()] for row in rows]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """One byte string for each worker, on every worker (used for small records: RNG states, names)."""
        if self.world == 1:
            return [payload]
        sizes = [int(row[0]) for row in self.gather_floats([float(len(payload))])]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else own[:0]
        rows = [torch.empty_like(own) for _ in range(self.world)]
        with self._together():
            self._flags.allgather([rows], [own]).wait()
        return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values on every worker."""
        if self.world == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._together():
            for tensor in tensors:
                self._of(tensor).broadcast([tensor.detach()], options).wait()

    def _of(self, tensor: Tensor) -> Any:
        return self._flags if tensor.device.type == "cpu" else self._payload

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Times a collective and names its failure: torch raises a plain RuntimeError, as any operation does."""
        begin = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = self._why_lost()
            if reason is not None:
                raise StateLost(reason) from error
            raise CollectiveFailed(f"a sum over {self.world} workers failed: {first_line(error)}") from error
        finally:
            self.wait_s += time.perf_counter() - begin

    def _why_lost(self) -> str | None:
        """Another worker may hear of the end first and close its side: this one's own word of it is waited for."""
        ends = time.monotonic() + WORD_S
        while self._lost is not None and time.monotonic() < ends:
            reason = self._lost()
            if reason is not None:
                return reason
            time.sleep(0.01)
        return None

    def close(self) -> None:
        """Forget the groups (torch destroys its own)."""
        self._payload = self._flags = None
