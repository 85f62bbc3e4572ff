"""Collectives over the workers: sums, integers, bytes and objects on replaceable process groups.

Also: two passes interleaved, one computing while the messages of the other are in transit.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.errors import StateLost, lost_in

#: Maximum seconds until every worker learns why a group was abandoned.
ABORT_REASON_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class WorkersGroup:
    """Process groups over the workers that can be abandoned and created again, unlike torch's default group."""

    payload: Any  # for device tensors
    flags: Any  # for CPU tensors
    lost: Callable[[], str | None]  # returns why the groups were abandoned; None while they are in use


class Workers:
    """Collectives over the workers of a training step; no-ops for a single worker.

    Device tensors use torch's default process group, CPU tensors a gloo group (the default one if it is gloo). Every
    method that communicates is a collective: all workers must call it, and it raises `CollectiveFailed` if one of them
    has died.
    """

    def __init__(self) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._payload: Any = None
        self._flags: Any = None
        if self.world_size > 1:
            self._payload = self._flags = dist.group.WORLD
            if dist.get_backend() != "gloo":
                self._flags = dist.new_group(backend="gloo")
        self._lost: Callable[[], str | None] | None = None
        self.wait_s = 0.0

    def use(self, group: WorkersGroup) -> None:
        """Run all later collectives on these process groups of the same workers."""
        self._payload, self._flags, self._lost = group.payload, group.flags, group.lost

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the workers in place, in the order given."""
        for tensor in tensors:
            self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place sum and return at once; the returned function waits (on a GPU, the stream waits)."""
        if self.world_size == 1:
            return lambda: None
        with self._collective():
            work = self._of(tensor).allreduce([tensor])
        return lambda: self._finished(work)

    def _finished(self, work: Any) -> None:
        with self._collective():
            work.wait()

    def all_reduce_ints(self, values: list[int]) -> list[int]:
        """Sum host integers over the workers without using the device."""
        return self.start_all_reduce_ints(values)()

    def start_all_reduce_ints(self, values: list[int]) -> Callable[[], list[int]]:
        """Start a sum of host integers and return at once; the returned function waits and returns the sums. Other
        collectives may run meanwhile, in the same order on every worker."""
        if self.world_size == 1:
            return lambda: values
        vector = torch.tensor(values, dtype=torch.int64)
        with self._collective():
            work = self._flags.allreduce([vector])

        def finish() -> list[int]:
            self._finished(work)
            # numpy shares the memory of a CPU tensor: this counts as no device read
            return [int(value) for value in vector.numpy()]

        return finish

    def all_gather_floats(self, values: list[float]) -> list[list[float]]:
        """Return each worker's host floats, by rank, on every worker."""
        if self.world_size == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._collective():
            self._flags.allgather([rows], [own]).wait()
        return [[float(value) for value in row.numpy()] for row in rows]

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return each worker's bytes, by rank, on every worker."""
        if self.world_size == 1:
            return [payload]
        sizes = [int(row[0]) for row in self.all_gather_floats([float(len(payload))])]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else own[:0]
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._collective():
            self._flags.allgather([rows], [own]).wait()
        return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return each worker's JSON value, by rank, on every worker."""
        return [json.loads(payload) for payload in self.all_gather_bytes(json.dumps(value).encode())]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's JSON value on every worker; the values of other ranks are ignored."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into the tensors of every worker, of any dtype and strides: their bytes are sent."""
        if self.world_size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._collective():
            for tensor in (one.detach() for one in tensors):
                # of an expanded tensor, the elements that exist
                own = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
                data = own.contiguous()
                self._of(tensor).broadcast([data.view(-1).view(torch.uint8)], options).wait()
                if data.data_ptr() != own.data_ptr():
                    own.copy_(data)

    def _of(self, tensor: Tensor) -> Any:
        return self._flags if tensor.device.type == "cpu" else self._payload

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Time a collective and translate its failure, which torch raises as a plain RuntimeError."""
        begin = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = self._why_lost()
            if reason is not None:
                raise StateLost(reason) from error
            raise lost_in(f"a collective of {self.world_size} workers", error) from error
        finally:
            self.wait_s += time.perf_counter() - begin

    def _why_lost(self) -> str | None:
        """Why the groups were abandoned. Waits, since a worker that learns it earlier may already have disconnected."""
        deadline = time.monotonic() + ABORT_REASON_TIMEOUT_S
        while self._lost is not None and time.monotonic() < deadline:
            reason = self._lost()
            if reason is not None:
                return reason
            time.sleep(0.01)
        return None


# ---------------------------------------------------------------- interleave


Made = TypeVar("Made")


class PassEnded(Exception):
    """The other pass failed, so this one must end too."""


class Interleaver:
    """Alternates two passes in one process. Only the pass that has the turn runs, so calls need not identify it. The
    turn belongs to a pass, not to a thread: on a GPU, autograd runs a backward pass in its own threads."""

    def __init__(self) -> None:
        self._going = [False, False]
        self._turn = 0
        self._failed = False
        self._wake: list[threading.Semaphore] = []
        self._thread: ThreadPoolExecutor | None = None

    def yield_turn(self) -> None:
        """Let the other pass run until it yields or ends; a no-op if there is none. Raises PassEnded: the other pass
        has failed."""
        mine, other = self._turn, 1 - self._turn
        if self._going[other]:
            self._turn = other
            self._wake[other].release()
            self._wake[mine].acquire()
        if self._failed:
            raise PassEnded("the other of two interleaved passes failed")

    def run_interleaved(self, first: Callable[[], Any], second: Callable[[], Made]) -> Made:
        """Run `first` in another thread and `second` in the caller's, alternating; `first` starts. Returns the result
        of `second`, after both have ended. Raises BaseException: the exception of the pass that failed first; the other
        pass ends at its next turn."""
        if self._thread is None:  # get_num_threads makes the new thread adopt torch's thread count
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="interleaved", initializer=torch.get_num_threads)
        self._going, self._turn, self._failed = [True, True], 0, False
        self._wake = [threading.Semaphore(1), threading.Semaphore(0)]
        running = self._thread.submit(self._run, 0, first)
        try:
            result = self._run(1, second)
        except PassEnded:
            running.result()
            raise
        except BaseException:
            wait([running])
            raise
        else:
            running.result()  # `first` may fail after `second` has ended
            return result
        finally:
            self._failed = False

    def _run(self, mine: int, work: Callable[[], Made]) -> Made:
        try:
            self._wake[mine].acquire()
            if self._failed:
                raise PassEnded("the other of two interleaved passes failed")
            return work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._going[mine], self._turn = False, 1 - mine
            self._wake[1 - mine].release()
