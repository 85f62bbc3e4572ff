"""The joint process group of one generation: all workers and all hosts, beside torch's default group.

Built statelessly, so that it can be aborted and followed by the next generation while the default group lives: one
`ProcessGroupGloo` or `ProcessGroupNCCL` on a `PrefixStore` of the generation's number. The technique is that of
torchft's and vLLM's stateless groups.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experts.transport.protocol import Aborted
from raytrain.gradients import WORD_S

HEADERS, ROWS = 0, 1
"""Tags: what is between two members stays in order for each of them."""


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
        self.timeout = timedelta(seconds=timeout_s)
        self._aborted, self._watched = "", watched
        self._under_way: weakref.WeakSet[Exchange] = weakref.WeakSet()
        control = gloo(store, f"{name}/control", rank, size, interface=interface, timeout_s=timeout_s)
        payload = None
        if device.type == "cuda":
            payload = nccl(store, f"{name}/payload", rank, size, timeout_s=timeout_s)
        self._groups: tuple[Any, Any] | None = (control, payload)

    def headers(self, rows: Tensor | None, words: int) -> list[list[int]]:
        """One int64 row from each worker to each holder; `rows` (holders, words) on the CPU, None on a mere host."""
        holds = self.rank in self.holders
        sends = [int(rank in self.holders and rows is not None) for rank in range(self.size)]
        receives = [int(rank < self.workers and holds) for rank in range(self.size)]
        sent = torch.empty((0, words), dtype=torch.int64) if rows is None else rows
        received = torch.empty((sum(receives), words), dtype=torch.int64)
        Exchange(self, self._between_pairs(sent, received, sends, receives, HEADERS), sent, received).wait()
        return received.tolist()

    def exchange(self, send: Tensor, send_counts: list[int], receive_counts: list[int]) -> Exchange:
        """Start an uneven all-to-all over the first dimension."""
        received = send.new_empty((sum(receive_counts), *send.shape[1:]))
        send = send.contiguous()
        if send.device.type == "cpu":
            works = self._between_pairs(send, received, send_counts, receive_counts, ROWS)
            return Exchange(self, works, send, received)
        work = self._timed(
            lambda _, payload: payload.alltoall_base(
                received, send, receive_counts, send_counts, dist.AllToAllOptions()
            )
        )
        return Exchange(self, [work], send, received)

    def _between_pairs(
        self, sent: Tensor, received: Tensor, send_counts: list[int], receive_counts: list[int], tag: int
    ) -> list[Any]:
        """An uneven all-to-all as one message from each member to each that it has something for.

        gloo's own sends an empty message to everybody else too, and passes through a queue: one small exchange with two
        hosts took 0.5 ms instead of 0.1, one of 8 MB twice as long.
        """
        coming = received.split(receive_counts)
        going = sent.split(send_counts)
        coming[self.rank].copy_(going[self.rank])
        others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not everybody to the same one first

        def start(control: Any, _payload: Any) -> list[Any]:
            waits = [control.recv([coming[rank]], rank, tag) for rank in others if coming[rank].numel()]
            return waits + [control.send([going[rank]], rank, tag) for rank in others if going[rank].numel()]

        return self._timed(start)

    def sum_(self, vector: Tensor) -> None:
        """Sum a CPU vector over all members, in place."""
        self._timed(lambda control, _: control.allreduce([vector]).wait())

    def abort(self, reason: str = "the group was aborted") -> None:
        """From another thread: every call of this member that waits, or comes later, raises `Aborted`."""
        if self._aborted:
            return
        self._aborted = reason
        self._leave()

    def _leave(self) -> None:
        """Let go of the groups and of all that is under way.

        gloo's own `abort` wakes nobody (torch 2.13). What does is that the connections close, here and at the other
        ends: whoever waits for this member hears of it, leaves in turn, and so everybody does.
        """
        groups, self._groups = self._groups, None
        if groups is not None and groups[1] is not None:
            groups[1].abort()
        for exchange in list(self._under_way):
            exchange.forget()

    def _timed(self, call: Callable[[Any, Any], Any]) -> Any:
        """`call(control, payload)`; torch raises a plain RuntimeError for a member that is gone, as for anything."""
        began = time.perf_counter()
        groups = self._groups
        try:
            if groups is None:
                raise Aborted(self._aborted or "a member is gone")
            return call(*groups)
        except RuntimeError as error:
            groups = None
            traceback.clear_frames(error.__traceback__)  # which hold the connections as well
            self._leave()
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Aborted(self._word() or f"a member is gone: {first}") from error
        finally:
            self.seconds += time.perf_counter() - began

    def _word(self) -> str:
        ends = time.monotonic() + (WORD_S if self._watched else 0.0)
        while not self._aborted and time.monotonic() < ends:
            time.sleep(0.01)
        return self._aborted


class Exchange:
    """Rows under way; keeps what is sent alive until they have arrived."""

    def __init__(self, group: JointGroup, works: list[Any], sent: Tensor, received: Tensor) -> None:
        self._group, self._sent, self._received = group, sent, received
        self._works: list[Any] | None = works
        self._done = False
        group._under_way.add(self)

    def forget(self) -> None:
        """It will not arrive any more."""
        self._works = None

    def wait(self) -> Tensor:
        """The rows received, in the order of the ranks."""
        if not self._done:
            self._group._timed(self._finish)
            self._done = True
        return self._received

    def _finish(self, *_groups: Any) -> None:
        while self._works:
            work = self._works.pop()
            # gloo's messages do not know the group's time limit; with one, NCCL would wait for the device
            work.wait(self._group.timeout) if self._received.device.type == "cpu" else work.wait()
            del work
        if self._works is None:
            raise RuntimeError("the group was left meanwhile")


def gloo(store: Any, name: str, rank: int, size: int, *, interface: str | None, timeout_s: float) -> Any:
    """A gloo group of its own under `name` in the store; blocks until all members are there."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    if interface is not None:
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]  # pyright: ignore
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]  # pyright: ignore
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore


def nccl(store: Any, name: str, rank: int, size: int, *, timeout_s: float) -> Any:
    """The same for device tensors."""
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore
