"""The joint process group of workers and expert hosts, next to torch's default group, and the protocol spoken in it.

A generation is one set of members that have met. Every operation begins with a header; NCCL communicators are connected
and ended within a limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.network import GLOO, join_network
from raytrain.errors import RunError, StateLost, first_line
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.parallel.collectives import ABORT_REASON_TIMEOUT_S

# ---------------------------------------------------------------- protocol

MAGIC = 0x4558_5052_5401
FIELDS = ("magic", "generation", "version", "step", "op", "layer", "micro_batch", "dtype", "width")
HEADER_SIZE = len(FIELDS)
"""Int64 words of a header without its counts."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of the payload; the header holds the index."""


class Channel(Enum):
    """Over which connections an exchange goes. The caller names it, the same on every member.

    It cannot be read off a tensor: a member without rows may hold an empty tensor on another device than the members
    that have rows, and the two sides would wait for each other on different connections.
    """

    CONTROL = "control"  # tensors on the CPU, over gloo
    TO_HOLDERS = "to holders"  # on the group's device: over NCCL on a GPU, over gloo on a CPU
    TO_WORKERS = "to workers"  # the same, by a communicator of its own: results return while other rows are sent


class Op(IntEnum):
    """An operation of all members."""

    SETUP = 1  # rank 0 sends the hosts an `ExpertSetup`; uint8 JSON
    FILL = 2  # rank 0 sends the initial weights
    FORWARD = 3  # rows there and back; the host keeps what backward needs
    RESERVE = 4  # the same, for a pass that will be recomputed: the host keeps nothing
    RECOMPUTE = 5  # the recomputation: the host keeps what backward needs
    EVALUATE = 6  # rows there and back, without gradients
    BACKWARD = 7  # gradients of the rows there and back
    VOTE = 8  # one sum over all members, then everybody commits or skips
    DISCARD = 9  # forget gradients and what was kept for backward
    SAVE = 10  # hosts take a snapshot in memory
    FETCH = 11  # hosts send the weights of their experts to rank 0
    END = 12  # the hosts leave the generation
    DROP_OUT = 13  # in place of any other: a worker without memory takes no part until DISCARD, which this implies
    SHORTAGES = 14  # one sum over all members: which holders of experts ran out of memory
    PASSES_DONE = 15  # where experts are colocated: a worker has finished its passes, and learns who dropped out


ROW_OPERATIONS = {Op.FORWARD, Op.RESERVE, Op.RECOMPUTE, Op.EVALUATE, Op.BACKWARD}
"""Operations in which rows travel; before any other a host waits for what it has sent."""


class HeaderMismatch(RunError):
    """Members disagree about the current operation. Names the bug in the order of calls, which would be a hang."""


class Aborted(StateLost):
    """The generation is over: a member died, and every other was notified."""


@dataclass(frozen=True)
class Header:
    """The fields before the counts; see FIELDS."""

    generation: int
    version: int
    step: int
    op: Op
    layer: int = 0
    micro_batch: int = 0
    dtype: int = 0
    width: int = 0

    def encode(self) -> list[int]:
        """As int64 words, the magic number first."""
        return [MAGIC, *(int(getattr(self, name)) for name in FIELDS[1:])]


def read_headers(
    rows: list[list[int]], *, generation: int, version: int, workers: list[int], layers: Sequence[str] = ()
) -> Header:
    """Decode the one header that all of these `workers` sent.

    Args:
        layers: their names in the model, for messages.

    Raises:
        HeaderMismatch: they differ from each other, or from this host's generation or placement.
    """
    first = rows[0][:HEADER_SIZE]
    for worker, row in zip(workers, rows, strict=True):
        if row[:HEADER_SIZE] != first:
            differences = ", ".join(
                f"{name} {mine} and {other}"
                for name, mine, other in zip(FIELDS, first, row[:HEADER_SIZE], strict=True)
                if mine != other
            )
            found = f"worker {workers[0]} and worker {worker} are in different operations: {differences}"
            raise HeaderMismatch(found + _calls({workers[0]: first, worker: row}, layers))
    expected: dict[str, int] = {"magic": MAGIC, "generation": generation, "version": version}
    seen: dict[str, int] = dict(zip(FIELDS, first, strict=True))
    wrong = [f"{name} {seen[name]} instead of {value}" for name, value in expected.items() if seen[name] != value]
    if wrong:
        raise HeaderMismatch(f"the workers' header has {', '.join(wrong)}")
    return Header(**{name: seen[name] for name in FIELDS[1:] if name != "op"}, op=Op(seen["op"]))


def _calls(rows: Mapping[int, list[int]], layers: Sequence[str]) -> str:
    """The calls of layers that two workers are in, by worker, and the rule that they break; else empty."""
    op, layer, alike = FIELDS.index("op"), FIELDS.index("layer"), slice(FIELDS.index("op"))
    first, other = rows.values()
    if first[alike] != other[alike] or not {first[op], other[op]} & ROW_OPERATIONS or not layers:
        return ""
    said = [
        f"worker {worker} is in {Op(row[op]).name}" + (f" of {layers[row[layer]]}" if row[op] in ROW_OPERATIONS else "")
        for worker, row in rows.items()
    ]
    return (
        f"; {', '.join(said)}: every worker calls every expert layer equally often in every micro-batch, and one"
        " without rows as in its last one (Trainable.communicates gives it a row); experts.hosts 0 has no such rule"
    )


def bytes_tensor(data: bytes) -> Tensor:
    """Copy bytes into a uint8 tensor, to be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# ---------------------------------------------------------------- nccl
# NCCL communicators of a generation: connected within a limit, used in pairs of members, and ended within a limit.

ABORT_S = 10.0
"""Longest wait for the abort of all communicators of a member; one that takes longer goes on in its thread."""
POLL_S = 0.02
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Read by the constructor of a process group. Ray sets 1 on workers, torch's default is 3: both end the process."""
CONSTRUCTION = {
    ERROR_HANDLING: "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Environment of the constructor of these groups; torch's default group keeps the user's or torch's values."""
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds that a call of a non-blocking communicator waits for the connection. torch reads it once, at the first such
call; its default of 30 minutes would hold the lock that an abort needs. It would also end a call that connects and
waits for a late member, so nothing is left to connect after the meeting."""
NONBLOCKING_S = "60"
PROBES = (2**12, 2**18, 2**23)
"""Float32 elements of the collectives that connect a group: the largest has more bytes than a bucket of gradients."""


def nccl(
    store: Any, name: str, rank: int, size: int, *, device: torch.device, interface: str | None, timeout_s: float,
    limit_s: float, partners: Sequence[int] = (), collectives: bool = False,
    lost: Callable[[], str | None] = lambda: None,
) -> Any:  # fmt: skip
    """Create an NCCL group under `name` in the store; blocks until all members are connected. Raises RuntimeError, as
    all errors of torch's groups: not connected in time, or the generation is over.

    Args:
        device: of the rows; a GPU without an index is the current one of the calling thread.
        interface: network interface of its connections; None takes that of NCCL_SOCKET_IFNAME, else NCCL chooses.
        timeout_s: of the calls. limit_s: until all members are connected.
        partners: the members that this one exchanges rows with; each of them names this one too.
        collectives: the group will sum and broadcast tensors.
        lost: polled while waiting: why the generation is over, None while it lives.
    """
    device = with_index(device)  # here: a new thread has a current device of its own, the first
    os.environ.setdefault(NONBLOCKING_TIMEOUT, NONBLOCKING_S)
    join_network(interface, address=None)
    options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0  # an abort then also ends a call that waits for a peer
    with without_monitors():
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # pyright: ignore
    connect = partial(_connect, group, device, partners, collectives=collectives)
    failed = within(connect, limit_s=limit_s, stop=lambda: lost() is not None)
    if failed is not None:
        abort_nccl([group])
        raise RuntimeError(f"the NCCL communicator {name} was not connected: {failed}")
    return group


def with_index(device: torch.device) -> torch.device:
    """The device with an explicit index: the calling thread's current GPU where it has none."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextlib.contextmanager
def without_monitors() -> Iterator[None]:
    """Context for the constructor of a group whose errors and timeouts are handled by the generation alone."""
    before = {name: os.environ.get(name) for name in CONSTRUCTION}
    os.environ.update(CONSTRUCTION)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _connect(group: Any, device: torch.device, partners: Sequence[int], *, collectives: bool) -> None:
    """Create the communicator by its first call, and connect whatever its later calls use.

    `eager_connect_single_device` is not used: with a non-blocking communicator it fails with "operation in progress",
    or hangs (pytorch #153960, #154055).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready = torch.ones(1, device=device)
    group.allreduce([ready]).wait()
    if int(ready.item()) != group.size():
        raise RuntimeError(f"{int(ready.item())} of {group.size()} members took part in its first sum")
    sent, received = torch.ones(group.size(), device=device), torch.zeros(group.size(), device=device)
    for work in exchange_pairs(group, received.split(1), sent.split(1), others=partners):
        work.wait()
    missing = sorted(set(partners) - set(received.nonzero().flatten().tolist()))
    if missing:
        raise RuntimeError(f"the first messages of the members {missing} did not arrive")
    if collectives:
        # each algorithm of a sum, by size and type (NVLink SHARP has no float64), and the rings of broadcasts
        room = torch.zeros(max(PROBES), device=device)
        for dtype in (torch.float32, torch.float64):
            for size in PROBES:
                group.allreduce([room.view(dtype)[:size]]).wait()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([room[: PROBES[0]]], options).wait()
        if float(room.sum().item()):  # also waits until all of it has run
            raise RuntimeError("the sums of zeros are not zero")


def within(work: Callable[[], Any], *, limit_s: float, stop: Callable[[], bool] = lambda: False) -> str | None:
    """Run `work` in a thread for at most `limit_s`, and while `stop` is false; afterwards nobody waits for it. Returns
    why it did not succeed, None if it did."""
    ended: list[str | None] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            ended.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True, name="nccl")
    thread.start()
    ends = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < ends and not stop():
        thread.join(POLL_S)
    if ended:
        return ended[0]
    return "the generation is over" if stop() else f"still waiting after {limit_s:g} s"


def exchange_pairs(
    group: Any, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], *, others: Iterable[int]
) -> list[Any]:
    """Send and receive everything that is not empty, as one call on the device, which is returned if there is any.

    Args:
        incoming, outgoing: one piece for each member. others: the members, without this one.
    """
    receives = [rank for rank in others if incoming[rank].numel()]
    sends = [rank for rank in others if outgoing[rank].numel()]
    if not receives and not sends:
        return []
    group._start_coalescing()
    try:
        for rank in receives:
            group.recv([incoming[rank]], rank, 0)
        for rank in sends:
            group.send([outgoing[rank]], rank, 0)
    except BaseException:
        with contextlib.suppress(Exception):  # NCCL keeps the group open for this thread, in all later calls
            group._end_coalescing()
        raise
    return [group._end_coalescing()]


def abort_nccl(groups: Sequence[Any]) -> None:
    """Abort communicators side by side, and wait for at most `ABORT_S`: one may wait for a kernel of another."""

    def abort(group: Any) -> None:
        with contextlib.suppress(RuntimeError):  # torch's own limit; the communicator is lost in any case
            group.abort()

    threads = [threading.Thread(target=abort, args=(group,), daemon=True, name="nccl-abort") for group in groups]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))


# ---------------------------------------------------------------- process group

HEADERS, ROWS, END = 0, 1, 2
"""Message tags: messages between two members stay in order within each tag."""
RENDEZVOUS_S = 60.0
"""Timeout until all members are connected with each other."""


class JointGroup:
    """A member's end of the joint group, which exchanges tensors between the members of one generation.

    Ranks 0 to W - 1 are the workers; `seconds` are those spent in calls, waiting included.

    Args:
        store: where the members find each other (`torch.distributed.Store`).
        name: prefix of the generation in the store, equal on all members.
        rank, size: of this member, and of the group.
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
        self, store: Any, *, name: str, rank: int, size: int, workers: int, holders: list[int], device: torch.device,
        through_host: bool = False, interface: str | None = None, timeout_s: float = 1800.0, watched: bool = False,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
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
        return [self._control, *self._payload.values()]

    def headers(self, rows: Tensor | None, size: int, *, dropped: Set[int] = frozenset()) -> list[list[int]]:
        """Send one int64 row from each worker that has not `dropped` out to each holder. Blocks a holder.

        Args:
            rows: (H, size) on the CPU, one for each holder; None on a host and on a worker that receives only.

        Returns:
            the rows received, on a holder.
        """
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
        """Start an uneven all-to-all over the first dimension, in the order of the ranks.

        Only members with rows for each other communicate: a member without any need not call it.

        Args:
            channel: equal on all members that take part.
            into: receives the rows; allocated if None.

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
        """Sum a CPU vector over all members, in place."""
        self._timed(lambda: self._control.allreduce([vector]).wait())

    def abort(self, reason: str = "the group was aborted") -> None:
        """From another thread: every waiting or later call of this member raises `Aborted` with the reason."""
        if not self._aborted:
            self.mark(reason)
            abort_groups(self.groups)

    def close(self) -> None:
        """Leave the group, in which nothing is under way: its calls are over on all members."""
        self.mark("the group was closed")
        abort_groups(list(self._payload.values()))  # torch would do so when the group is collected, without a limit

    def mark(self, reason: str) -> None:
        """Have every later call raise `Aborted` with the reason, the first one given; ends no waiting call."""
        self._aborted = self._aborted or reason

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
            abort_groups(self.groups)  # which wakes the members that wait for this one
            ends = time.monotonic() + (ABORT_REASON_TIMEOUT_S if self._watched else 0.0)
            while not self._aborted and time.monotonic() < ends:
                time.sleep(0.01)
            raise Aborted(self._aborted or f"a member has exited: {first_line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - began


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
        # gloo's messages do not use the group's timeout; given one, NCCL would wait for the device
        limit = () if self._on_device else (self._group.timeout,)
        if works:
            self._group._timed(lambda: [work.wait(*limit) for work in works])
        if self._into is not self._received:
            self._received = self._into.copy_(self._received)
        return self._into


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
    kind: Any = dist.ProcessGroupGloo
    options._devices = [kind.create_default_device() if interface is None else kind.create_device(interface=interface)]
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
    all of this member's calls in the group and closes its connections. One from a peer whose connection is closed
    already fails at once and closes no other, so every peer has its turn."""
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, END).wait(timedelta(milliseconds=1))
