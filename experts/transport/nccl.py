"""NCCL communicators of a generation: connected within a limit, used in pairs of members, and ended within a limit.

What torch does by default would hang a generation in which a member dies:

- A communicator is created by its first call, in which a death leaves the others waiting. Here it is created and used
  once while the members meet, in a thread that the meeting does not wait for longer than its limit.
- Every member must take part in an `alltoall_base`, also in one of no rows. Here only members with rows for each other
  communicate, in one group of sends and receives, as over gloo.
- A watchdog ends the process at an error of a communicator. Here errors are left to the generation, which aborts all
  communicators at a death and starts again.
- Its heartbeat monitor ends the process when an abort takes long, and a timeout writes a record of the calls into the
  store, which ends later groups of the same store. Both are off for these groups (`without_monitors`).
- Two members connect with their first message, and all of them with the first collective of each algorithm, which NCCL
  chooses by size. Here those that exchange rows send each other one number while all meet, and a group for collectives
  runs them in several sizes. (NCCL_RUNTIME_CONNECT=0 would connect all algorithms of all groups, of torch's own too
  and of those that only exchange rows; it has no effect once a communicator of the process exists.)
- An abort may wait for a peer that is gone. Here each has a thread of its own and a limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.network import join_network

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
    """Create an NCCL group under `name` in the store; blocks until all members are connected.

    Args:
        device: of the rows; a GPU without an index is the current one of the calling thread.
        interface: network interface of its connections; None takes that of NCCL_SOCKET_IFNAME, else NCCL chooses.
        timeout_s: of the calls. limit_s: until all members are connected.
        partners: the members that this one exchanges rows with; each of them names this one too.
        collectives: the group will sum and broadcast tensors.
        lost: polled while waiting: why the generation is over, None while it lives.

    Raises:
        RuntimeError: as all errors of torch's groups: not connected in time, or the generation is over.
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
        _connect_algorithms(group, device)


def _connect_algorithms(group: Any, device: torch.device) -> None:
    """Use each algorithm that NCCL may choose for a sum, by size and type (NVLink SHARP has no float64), and rings,
    which broadcasts use."""
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
    """Run `work` in a thread for at most `limit_s`; afterwards it goes on, and nobody waits for it.

    Args:
        stop: polled while waiting; true ends the wait.

    Returns:
        why `work` did not succeed, None if it did.
    """
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
    """Send and receive everything that is not empty, as one call on the device.

    Args:
        incoming, outgoing: one piece for each member. others: the members, without this one.

    Returns:
        the pending call; nothing if all pieces are empty.
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
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True, name="nccl-abort") for group in groups]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # torch's own limit; the communicator is lost in any case
        group.abort()
