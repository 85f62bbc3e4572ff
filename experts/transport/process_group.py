"""The joint process group of one generation: all workers and all hosts, beside torch's default group.

Built statelessly, so that it can be aborted and followed by the next generation while the default group lives: one
`ProcessGroupGloo` or `ProcessGroupNCCL` on a `PrefixStore` of the generation's number. The technique is that of
torchft's and vLLM's stateless groups.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experts.transport.protocol import Aborted
from raytrain.train.parallel.collectives import WORD_S

HEADERS, ROWS, END = 0, 1, 2
"""Tags: what is between two members stays in order for each of them."""
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
        self.timeout = timedelta(seconds=timeout_s)
        self._aborted, self._watched = "", watched
        self._control = gloo(store, f"{name}/control", rank, size, interface=interface, timeout_s=timeout_s)
        self._payload = None
        if device.type == "cuda":
            self._payload = nccl(store, f"{name}/payload", rank, size, timeout_s=timeout_s)

    def headers(self, rows: Tensor | None, words: int, *, out: Set[int] = frozenset()) -> list[list[int]]:
        """One int64 row from each worker that is not `out` to each holder; `rows` (holders, words) on the CPU, None on
        a mere host and on a worker that is out."""
        holds = self.rank in self.holders
        sends = [int(rank in self.holders and rows is not None) for rank in range(self.size)]
        receives = [int(rank < self.workers and holds and rank not in out) for rank in range(self.size)]
        sent = torch.empty((0, words), dtype=torch.int64) if rows is None else rows
        received = torch.empty((sum(receives), words), dtype=torch.int64)
        Exchange(self, self._between_pairs(sent, received, sends, receives, HEADERS), sent, received).wait()
        return received.tolist()

    def exchange(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, into: Tensor | None = None
    ) -> Exchange:
        """Start an uneven all-to-all over the first dimension."""
        received = send.new_empty((sum(receive_counts), *send.shape[1:])) if into is None else into
        send = send.contiguous()
        if send.device.type == "cpu":
            works = self._between_pairs(send, received, send_counts, receive_counts, ROWS)
            return Exchange(self, works, send, received)
        payload: Any = self._payload
        work = self._timed(
            lambda: payload.alltoall_base(received, send, receive_counts, send_counts, dist.AllToAllOptions())
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

        def start() -> list[Any]:
            control = self._control
            waits = [control.recv([coming[rank]], rank, tag) for rank in others if coming[rank].numel()]
            return waits + [control.send([going[rank]], rank, tag) for rank in others if going[rank].numel()]

        return self._timed(start)

    def all_reduce(self, vector: Tensor) -> None:
        """Sum a CPU vector over all members, in place."""
        self._timed(lambda: self._control.allreduce([vector]).wait())

    def abort(self, reason: str = "the group was aborted") -> None:
        """From another thread: every call of this member that waits, or comes later, raises `Aborted`."""
        if self._aborted:
            return
        self._aborted = reason
        self._leave()

    def _leave(self) -> None:
        """End all that waits here; the connections close, so that those hear of it who wait for this member."""
        for group in (self._control, self._payload):
            if group is not None:
                give_up(group)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Torch raises a plain RuntimeError for a member that is gone, as for anything."""
        began = time.perf_counter()
        try:
            if self._aborted:
                raise Aborted(self._aborted)
            return call()
        except RuntimeError as error:
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
        self._group, self._works, self._sent, self._received = group, works, sent, received

    def wait(self) -> Tensor:
        """The rows received, in the order of the ranks."""
        works, self._works = self._works, []
        if works:
            self._group._timed(lambda: self._finish(works))
        return self._received

    def _finish(self, works: list[Any]) -> None:
        for work in works:
            # gloo's messages do not know the group's time limit; with one, NCCL would wait for the device
            work.wait(self._group.timeout) if self._received.device.type == "cpu" else work.wait()


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
    """End every call of this member that waits in a process group, from any thread, and every later one.

    gloo's own abort wakes nobody (torch 2.13): a call waits on for a peer that lives. But a receive that runs out of
    time ends all that the member has under way in the group, and closes its connections.
    """
    kind: type = dist.ProcessGroupGloo
    if not isinstance(group, kind):
        group.abort()
    elif group.size() > 1:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), END).wait(timedelta(milliseconds=1))
