"""The joint process group of one generation: all workers and all hosts, next to torch's default group.

Built without torch's global state, so that it can be aborted and replaced by the next generation's while the default
group lives: one `ProcessGroupGloo` or `ProcessGroupNCCL` on a `PrefixStore` with the generation's number. torchft's and
vLLM's stateless groups use the same technique.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.network import GLOO
from experts.transport.nccl import abort_nccl, exchange_pairs, nccl, with_index
from experts.transport.protocol import Aborted, Channel
from raytrain.errors import first_line
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.parallel.collectives import ABORT_REASON_TIMEOUT_S

HEADERS, ROWS, END = 0, 1, 2
"""Message tags: messages between two members stay in order within each tag."""
RENDEZVOUS_S = 60.0
"""Timeout until all members are connected with each other."""


class JointGroup:
    """A member's end of the joint group; implements `Transport`.

    Args:
        store: where the members find each other (`torch.distributed.Store`).
        name: prefix of the generation in the store, equal on all members.
        rank, size: of this member, and of the group; workers come first.
        workers: number of workers among the members.
        holders: ranks that own experts: those after the workers, or the workers where experts are colocated.
        device: of the rows; a CUDA device uses NCCL for them, and gloo for everything else. Without an index it is the
            current GPU of the calling thread.
        through_host: rows are copied to the host and sent over gloo, as members share a GPU.
        interface: network interface, such as "lo"; None takes those of the environment, else gloo and NCCL choose.
        timeout_s: of every call; `abort` reports a death long before.
        lost: polled until all members are connected: why the generation is over, None while it lives.
        watched: another thread calls `abort` with the reason when a member dies; if a call fails first, wait for that.
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
        through_host: bool = False,
        interface: str | None = None,
        timeout_s: float = 1800.0,
        watched: bool = False,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.workers, self.holders = rank, size, workers, holders
        self.device, self.through_host = with_index(device), through_host
        self.seconds = 0.0
        self.timeout = timedelta(seconds=timeout_s)
        self._aborted, self._watched = "", watched
        self._control = gloo(store, f"{name}/control", rank, size, interface=interface, timeout_s=timeout_s)
        self._others = [(rank + step) % size for step in range(1, size)]  # members start with different peers
        self._payload: dict[Channel, Any] = {}
        if uses_nccl(device) and not through_host:
            partners = [other for other in self._others if rank in holders or other in holders]
            for channel in (Channel.TO_HOLDERS, Channel.TO_WORKERS):
                self._payload[channel] = nccl(
                    store, f"{name}/{channel.value}", rank, size, device=self.device, interface=interface,
                    timeout_s=timeout_s, limit_s=RENDEZVOUS_S, partners=partners, lost=lost,
                )  # fmt: skip

    @property
    def groups(self) -> list[Any]:
        """The process groups of this member."""
        return [self._control, *self._payload.values()]

    def headers(self, rows: Tensor | None, size: int, *, dropped: Set[int] = frozenset()) -> list[list[int]]:
        """See `Transport`; `rows` on the CPU."""
        holds = self.rank in self.holders
        sends = [int(rank in self.holders and rows is not None) for rank in range(self.size)]
        receives = [int(rank < self.workers and holds and rank not in dropped) for rank in range(self.size)]
        sent = torch.empty((0, size), dtype=torch.int64) if rows is None else rows
        received = torch.empty((sum(receives), size), dtype=torch.int64)
        works = self._send_pairwise(sent, received, sends, receives, HEADERS)
        Exchange(self, works, sent, received, into=received).wait()
        return received.tolist()

    def exchange(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, channel: Channel,
        into: Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        """See `Transport`.

        Raises:
            ValueError: the tensors are on another device than the channel's.
        """
        device = "cpu" if channel is Channel.CONTROL else self.device.type
        for tensor in (send, send if into is None else into):
            if tensor.device.type != device:
                raise ValueError(
                    f"the channel {channel.value!r} of this group carries tensors on {device}, got {tensor.device}"
                )
        received = send.new_empty((sum(receive_counts), *send.shape[1:])) if into is None else into
        send, payload = send.contiguous(), self._payload.get(channel)
        if payload is None:
            staged = received if channel is Channel.CONTROL or not self.through_host else _on_host(received)
            if staged is not received:
                send = _on_host(send).copy_(send)  # waits for the device, like the copy of what arrives
            works = self._send_pairwise(send, staged, send_counts, receive_counts, ROWS)
            return Exchange(self, works, send, staged, into=received)
        incoming, outgoing = received.split(receive_counts), send.split(send_counts)
        incoming[self.rank].copy_(outgoing[self.rank])
        works = self._timed(lambda: exchange_pairs(payload, incoming, outgoing, others=self._others))
        return Exchange(self, works, send, received, into=received, on_device=True)

    def _send_pairwise(
        self, sent: Tensor, received: Tensor, send_counts: list[int], receive_counts: list[int], tag: int
    ) -> list[Any]:
        """An uneven all-to-all as one message for each pair of members that exchange any row.

        gloo's own all-to-all also sends empty messages and passes through a queue: a small exchange with two hosts took
        0.5 ms instead of 0.1 ms, one of 8 MB twice as long.
        """
        incoming = received.split(receive_counts)
        outgoing = sent.split(send_counts)
        incoming[self.rank].copy_(outgoing[self.rank])

        def start() -> list[Any]:
            control, others = self._control, self._others
            waits = [control.recv([incoming[rank]], rank, tag) for rank in others if incoming[rank].numel()]
            return waits + [control.send([outgoing[rank]], rank, tag) for rank in others if outgoing[rank].numel()]

        return self._timed(start)

    def all_reduce(self, vector: Tensor) -> None:
        """See `Transport`."""
        self._timed(lambda: self._control.allreduce([vector]).wait())

    def abort(self, reason: str = "the group was aborted") -> None:
        """See `Transport`: every waiting or later call of this member raises `Aborted` with the reason."""
        if not self._aborted:
            self.mark(reason)
            self._leave()

    def close(self) -> None:
        """Leave the group, in which nothing is under way: its calls are over on all members."""
        self.mark("the group was closed")
        abort_groups(list(self._payload.values()))  # torch would do so when the group is collected, without a limit

    def mark(self, reason: str) -> None:
        """Have every later call raise `Aborted` with the reason, the first one given; ends no waiting call."""
        self._aborted = self._aborted or reason

    def _leave(self) -> None:
        """End all waiting calls here, and close the connections, which wakes the members that wait for this one."""
        abort_groups(self.groups)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Add up the seconds. Torch raises a plain RuntimeError for every failure, a dead member's included.

        Raises:
            Aborted: the call failed. torch.OutOfMemoryError: the allocator failed here, so no member is lost; the group
                has been left, as the others would wait for this call.
        """
        began = time.perf_counter()
        try:
            if self._aborted:
                raise Aborted(self._aborted)
            return call()
        except RuntimeError as error:
            if is_out_of_memory(error, device=None):  # by its type: NCCL's own errors count as a loss
                self.abort(f"a member ran out of memory while it exchanged rows: {first_line(error)}")
                raise
            self._leave()
            raise Aborted(self._await_reason() or f"a member has exited: {first_line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - began

    def _await_reason(self) -> str:
        ends = time.monotonic() + (ABORT_REASON_TIMEOUT_S if self._watched else 0.0)
        while not self._aborted and time.monotonic() < ends:
            time.sleep(0.01)
        return self._aborted


class Exchange:
    """An exchange in flight; keeps the sent tensor alive until it has ended. What is received on the host is then
    copied `into` the rows on the device, if that is another tensor."""

    def __init__(
        self, group: JointGroup, works: list[Any], sent: Tensor, received: Tensor, *, into: Tensor,
        on_device: bool = False,
    ) -> None:  # fmt: skip
        self._group, self._works, self._sent, self._received = group, works, sent, received
        self._into, self._on_device = into, on_device

    def wait(self) -> Tensor:
        """Return the rows received, in the order of the ranks."""
        works, self._works = self._works, []
        if works:
            self._group._timed(lambda: self._finish(works))
        if self._into is not self._received:
            self._received = self._into.copy_(self._received)
        return self._into

    def _finish(self, works: list[Any]) -> None:
        for work in works:
            # gloo's messages do not use the group's timeout; given one, NCCL would wait for the device
            work.wait() if self._on_device else work.wait(self._group.timeout)


def _on_host(rows: Tensor) -> Tensor:
    return torch.empty_like(rows, device="cpu", pin_memory=rows.device.type == "cuda")


def uses_nccl(device: torch.device) -> bool:
    """Whether rows on this device are exchanged over NCCL (on ROCm, RCCL)."""
    return device.type == "cuda"


def gloo(store: Any, name: str, rank: int, size: int, *, interface: str | None, timeout_s: float) -> Any:
    """Create a gloo group under `name` in the store; blocks until all members are connected."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=min(RENDEZVOUS_S, timeout_s))
    interface = interface or os.environ.get(GLOO)
    if interface is not None:
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]  # pyright: ignore
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]  # pyright: ignore
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore
    group._set_default_timeout(timedelta(seconds=timeout_s))  # of the calls; the one above is of the rendezvous
    return group


def abort_groups(groups: Sequence[Any]) -> None:
    """End every waiting and every later call of this member in these process groups; callable from any thread.

    gloo's groups first: that is immediate, and releases the members and threads that wait on the CPU.
    """
    kind: type = dist.ProcessGroupGloo
    for group in groups:
        if isinstance(group, kind):
            _abort_gloo(group)
    abort_nccl([group for group in groups if not isinstance(group, kind)])


def _abort_gloo(group: Any) -> None:
    """gloo's own abort wakes no waiting call (torch 2.13) while the peer lives. A receive that times out, though, ends
    all of this member's calls in the group and closes its connections."""
    if group.size() > 1:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), END).wait(timedelta(milliseconds=1))
