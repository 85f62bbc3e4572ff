"""A process group with the rules of NCCL on CPU tensors, over gloo: what hangs with NCCL fails here after seconds.

The rules are those of `ProcessGroupNCCL` of torch 2.13 (ProcessGroupNCCL.cpp, torch/csrc/cuda/nccl.cpp):

- A communicator is created by its first call, which must be a collective of all members, made while they meet; each of
  them must use it from the device it was created for, which has an index if it is a GPU.
- Two members are connected by their first message, which must be sent while they meet. All of them are connected for an
  algorithm by the first collective that uses it: a broadcast uses rings, a sum what is fastest for its size and type.
- `alltoall_base` and the other collectives need every member; a message of zero bytes is a message too.
- Between `_start_coalescing` and `_end_coalescing`, sends and receives become one call. It needs the members named in
  it only, and ends when all of them have arrived: nothing is buffered. Until its end the thread that began it can make
  no call of any communicator.
- A communicator runs one call at a time, in the order in which they were made. Making one waits for nothing.
- `abort` ends all calls, and lets every later one fail.

`install` puts it in place of `torch.distributed.ProcessGroupNCCL` in this process, and makes a CPU count as a device
that needs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import experts.hosts.generation
import experts.transport
from experts.transport import gloo

CALL_S = 20.0
"""Longest duration of one call; a hang becomes an error then."""
MADE: list[NcclStandIn] = []
"""All groups of this process, for tests to look at."""


def install(*, call_s: float = CALL_S) -> None:
    """From now on, groups of this process exchange rows over the stand-in."""
    NcclStandIn.call_s = call_s
    dist.ProcessGroupNCCL = NcclStandIn  # type: ignore[attr-defined]
    experts.transport.uses_nccl = experts.hosts.generation.uses_nccl = lambda _device: True


OPEN = threading.local()
"""`depth`: how many groups of sends and receives the thread has open, of any communicator."""


def algorithm(tensor: Tensor) -> str:
    """Of a sum, as NCCL may choose it where a node has switches that add; they do not add float64."""
    size = tensor.numel() * tensor.element_size()
    if size <= 2**14:
        return "tree"
    return "switches" if size <= 2**22 and tensor.dtype != torch.float64 else "ring"


def open_groups() -> int:
    """Of this thread."""
    return getattr(OPEN, "depth", 0)


def meeting() -> bool:
    """Whether this is the thread in which members meet, whose wait is limited."""
    return threading.current_thread().name == "nccl"


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(blocking=None)


class NcclStandIn:
    """See the module. Implements the calls of `ProcessGroupNCCL` that this project uses."""

    Options = Options
    call_s = CALL_S

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size, self.options = store, rank, size, options
        self.error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        self.interface = os.environ.get("NCCL_SOCKET_IFNAME")
        self.device: torch.device | None = None
        self.aborted = False
        self.calls: list[str] = []
        self._inner: Any = None
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="nccl-stream")
        self._group: list[tuple[str, Tensor, int]] | None = None
        self.connected: set[int] = set()
        self.algorithms: set[str] = set()
        self._making = threading.Lock()
        MADE.append(self)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _create(self, device: torch.device) -> None:
        """Creates the communicator: all members have to."""
        if not meeting():
            raise RuntimeError("the communicator would be created here, lazily, while another member may be gone")
        if device.type != "cpu" and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, got {device}")
        self.device = device
        self._inner = gloo(self._store, "inner", self._rank, self._size, interface="lo", timeout_s=self.call_s)

    # -- calls --------------------------------------------------------------------------------

    def alltoall_base(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int], _options: Any
    ) -> Work:
        """Of all members, also where it has no row for anybody."""
        self._check(received, sent)

        def run() -> None:
            self._arrive()
            options = dist.AllToAllOptions()
            self._inner.alltoall_base(received, sent, receive_counts, send_counts, options).wait()

        return self._make("alltoall", run)

    def allreduce(self, tensors: list[Tensor], *_options: Any) -> Work:
        if self.device is None:
            self._create(tensors[0].device)
        self._check(*tensors)
        for tensor in tensors:
            self._use(algorithm(tensor))
        return self._make("allreduce", lambda: self._inner.allreduce(tensors).wait())

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        self._check(*tensors)
        self._use("ring")
        return self._make("broadcast", lambda: self._inner.broadcast(tensors, options).wait())

    def _use(self, algorithm: str) -> None:
        if meeting():
            self.algorithms.add(algorithm)
        elif algorithm not in self.algorithms:
            raise RuntimeError(f"the members would connect for {algorithm} here, lazily, while one may be late or gone")

    def _start_coalescing(self) -> None:
        assert self._group is None, "a call of this communicator is being made in another thread"
        self._group = []
        OPEN.depth = open_groups() + 1

    def send(self, tensors: list[Tensor], rank: int, _tag: int) -> None:
        self._add("send", tensors, rank)

    def recv(self, tensors: list[Tensor], rank: int, _tag: int) -> None:
        self._add("recv", tensors, rank)

    def _add(self, kind: str, tensors: list[Tensor], rank: int) -> None:
        self._check(*tensors)
        assert self._group is not None, f"a {kind} outside a group would create a communicator of the two, lazily"
        assert rank != self._rank
        if meeting():
            self.connected.add(rank)
        elif rank not in self.connected:
            raise RuntimeError(f"{self._rank} and {rank} would connect here, lazily, while one may be gone")
        self._group.extend((kind, tensor, rank) for tensor in tensors)

    def _end_coalescing(self) -> Work:
        group, self._group = self._group, None
        OPEN.depth = open_groups() - 1
        assert group, "a group without a message"

        def run() -> None:
            calls = [getattr(self._inner, kind)([tensor], rank, 0) for kind, tensor, rank in group]
            for call in calls:
                call.wait(timedelta(seconds=self.call_s))

        return self._make("pairs", run)

    def abort(self) -> None:
        """Ends the waiting calls."""
        self.aborted = True
        inner: Any = self._inner
        if inner is not None and self._size > 1:
            try:  # a receive that times out ends all calls of gloo's group
                inner.recv([torch.empty(1)], (self._rank + 1) % self._size, 9).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return

    # -- rules --------------------------------------------------------------------------------

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if self.device is None:
                raise RuntimeError("the communicator would be created here, by a call that not all members make")
            if tensor.device.type != self.device.type:
                raise RuntimeError(f"no backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise RuntimeError("Tensors must be contiguous")

    def _make(self, kind: str, run: Callable[[], None]) -> Work:
        if open_groups():
            raise RuntimeError("this thread has an open group: the call would never begin")
        if not self._making.acquire(blocking=False):
            raise RuntimeError("two threads make calls of one communicator at the same time")
        try:
            if self.aborted:
                raise RuntimeError(f"NCCL communicator was aborted on rank {self._rank}")
            self.calls.append(kind)
            return Work(self._stream.submit(run))
        finally:
            self._making.release()

    def _arrive(self) -> None:
        """Wait for all members: gloo would let two continue that have no rows for a third."""
        self._inner.barrier(dist.BarrierOptions()).wait()


class Work:
    """A call that was made."""

    def __init__(self, running: Future[None]) -> None:
        self._running = running

    def wait(self, *_timeout: Any) -> None:
        """Until it has run: the CPU reads the rows right away, where a GPU's stream would wait."""
        self._running.result()
