"""The workers of a step and what they tell one another: sums, flags, bytes; over groups that can be given up."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.errors import CollectiveFailed, StateLost, first_line

#: So long may the word that a group was given up take to every worker.
WORD_S = 3.0


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
        """From now on meet over these process groups of the same workers."""
        self._payload, self._flags, self._lost = group.payload, group.flags, group.lost

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the workers in place, in the order given."""
        for tensor in tensors:
            self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start a sum of a tensor in place and return at once; calling what comes back waits (a GPU's stream does)."""
        if self.world_size == 1:
            return lambda: None
        with self._together():
            work = self._of(tensor).allreduce([tensor])
        return lambda: self._finished(work)

    def _finished(self, work: Any) -> None:
        with self._together():
            work.wait()

    def all_reduce_ints(self, values: list[int]) -> list[int]:
        """Sum small host integers over the workers; never touches the device."""
        return self.start_all_reduce_ints(values)()

    def start_all_reduce_ints(self, values: list[int]) -> Callable[[], list[int]]:
        """Start a sum of host integers and return at once; calling what comes back waits for it.

        While it travels, other collectives may run, in the same order on every worker.
        """
        if self.world_size == 1:
            return lambda: values
        vector = torch.tensor(values, dtype=torch.int64)
        with self._together():
            work = self._flags.allreduce([vector])

        def finish() -> list[int]:
            self._finished(work)
            # numpy shares memory with a CPU tensor: no device read is made or counted
            return [int(value) for value in vector.numpy()]

        return finish

    def all_gather_floats(self, values: list[float]) -> list[list[float]]:
        """One row of host floats for each worker, on every worker."""
        if self.world_size == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._together():
            self._flags.allgather([rows], [own]).wait()
        return [[float(value) for value in row.numpy()] for row in rows]

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """One byte string for each worker, on every worker."""
        if self.world_size == 1:
            return [payload]
        sizes = [int(row[0]) for row in self.all_gather_floats([float(len(payload))])]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else own[:0]
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._together():
            self._flags.allgather([rows], [own]).wait()
        return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """One JSON value for each worker, on every worker."""
        return [json.loads(payload) for payload in self.all_gather_bytes(json.dumps(value).encode())]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON value on every worker; what the others pass is ignored."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values on every worker."""
        if self.world_size == 1:
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
            raise CollectiveFailed(f"a sum over {self.world_size} workers failed: {first_line(error)}") from error
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
