"""The joint process group of one generation: all workers and all hosts, beside torch's default group.

Built statelessly, so that it can be aborted and followed by the next generation while the default group lives: one
`ProcessGroupGloo` or `ProcessGroupNCCL` on a `PrefixStore` of the generation's number. The technique is that of
torchft's and vLLM's stateless groups.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experts.transport.protocol import Aborted
from raytrain.gradients import WORD_S, wait_for

MEET_S = 60.0
"""So long may it take all members to connect with each other."""


class JointGroup:
    """A member's end of the joint group; implements `Transport`.

    Args:
        store: where the members find each other (`torch.distributed.Store`).
        name: prefix of the generation in the store, the same for all members.
        rank, size: this member's; workers first.
        workers: how many of the members are workers.
        holders: ranks that own experts: those after the workers, or the workers where experts are colocated.
        device: where payloads live; a CUDA device uses NCCL for them, and gloo for headers and votes.
        interface: network interface for gloo, such as "lo"; None lets gloo choose.
        timeout_s: of every call; a death is told by `abort` long before.
        watched: somebody calls `abort` with the reason when a member dies; it is waited for where a call fails first.
    """

    def __init__(
        self,
        store: Any,
        *,
        name: str,
        rank: int,
        size: int,
        workers: int,
        holders: list[int],
        device: torch.device,
        interface: str | None = None,
        timeout_s: float = 1800.0,
        watched: bool = False,
    ) -> None:
        self.rank, self.size, self.workers, self.holders = rank, size, workers, holders
        self.device = device
        self.seconds = 0.0
        self._aborted, self._watched = "", watched
        self._control = gloo(store, f"{name}/control", rank, size, interface=interface, timeout_s=timeout_s)
        self._payload = self._control
        if device.type == "cuda":
            self._payload = nccl(store, f"{name}/payload", rank, size, timeout_s=timeout_s)

    def headers(self, rows: Tensor | None, words: int) -> list[list[int]]:
        """One int64 row from each worker to each holder; `rows` (holders, words) on the CPU, None on a mere host."""
        sends = [int(rank in self.holders and rows is not None) for rank in range(self.size)]
        holds = self.rank in self.holders
        receives = [int(rank < self.workers and holds) for rank in range(self.size)]
        sent = torch.empty((0, words), dtype=torch.int64) if rows is None else rows
        received = torch.empty((sum(receives), words), dtype=torch.int64)
        options = dist.AllToAllOptions()
        self._call(lambda: self._control.alltoall_base(received, sent, receives, sends, options))
        return received.tolist()

    def exchange(self, send: Tensor, send_counts: list[int], receive_counts: list[int]) -> Exchange:
        """Start an uneven all-to-all over the first dimension."""
        group = self._payload if send.device.type != "cpu" else self._control
        received = send.new_empty((sum(receive_counts), *send.shape[1:]))
        send = send.contiguous()
        began = time.perf_counter()
        work = self._named(
            lambda: group.alltoall_base(received, send, receive_counts, send_counts, dist.AllToAllOptions())
        )
        self.seconds += time.perf_counter() - began
        return Exchange(self, work, send, received)

    def sum_(self, vector: Tensor) -> None:
        """Sum a CPU vector over all members, in place."""
        self._call(lambda: self._control.allreduce([vector]))

    def abort(self, reason: str = "the group was aborted") -> None:
        """From another thread: every call of this member that waits, or comes later, raises `Aborted`."""
        if self._aborted:
            return
        self._aborted = reason
        for group in {id(group): group for group in (self._control, self._payload)}.values():
            give_up(group)

    def _call(self, start: Callable[[], Any], *, on_device: bool = False) -> None:
        began = time.perf_counter()
        try:
            self._named(lambda: start().wait() if on_device else wait_for(start(), lambda: bool(self._aborted)))
        finally:
            self.seconds += time.perf_counter() - began

    def _named(self, call: Callable[[], Any]) -> Any:
        """Torch raises a plain RuntimeError for a member that is gone, as any operation does."""
        if self._aborted:
            raise Aborted(self._aborted)
        try:
            return call()
        except RuntimeError as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Aborted(self._word() or f"a member is gone: {first}") from error

    def _word(self) -> str:
        ends = time.monotonic() + (WORD_S if self._watched else 0.0)
        while not self._aborted and time.monotonic() < ends:
            time.sleep(0.01)
        return self._aborted


class Exchange:
    """Rows under way; keeps what is sent alive until they have arrived."""

    def __init__(self, group: JointGroup, work: Any, sent: Tensor, received: Tensor) -> None:
        self._group, self._work, self._sent, self._received = group, work, sent, received

    def wait(self) -> Tensor:
        """The rows received, in the order of the ranks."""
        if self._work is not None:
            work, self._work = self._work, None
            self._group._call(lambda: work, on_device=self._received.device.type != "cpu")
        return self._received


def gloo(store: Any, name: str, rank: int, size: int, *, interface: str | None, timeout_s: float) -> Any:
    """A gloo group of its own under `name` in the store; blocks until all members are there."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=min(MEET_S, timeout_s))
    if interface is not None:
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]  # pyright: ignore
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]  # pyright: ignore
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore
    group._set_default_timeout(timedelta(seconds=timeout_s))  # of the calls; above, of coming together
    return group


def nccl(store: Any, name: str, rank: int, size: int, *, timeout_s: float) -> Any:
    """The same for device tensors."""
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore


def give_up(group: Any) -> None:
    """End a process group in which calls may wait, from any thread.

    NCCL's abort ends them. Those of gloo end by `wait_for`, but their threads wait on inside (torch 2.13), and freeing
    the group would wait for them: it is kept for the life of the process.
    """
    if isinstance(group, dist.ProcessGroupGloo):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    else:
        group.abort()
