"""A generation on one member: meeting the others, and hearing of the end. No Ray here.

The members meet at a store (the directory's). Each leaves its name there, so that one who does not come can be named;
then they connect with each other. A death is told by whoever watches (`GenerationWatch`), long before a call would time out.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from experts.transport.process_group import RENDEZVOUS_S, JointGroup, abort_group, gloo, nccl
from raytrain.errors import RunError, StateLost, first_line
from raytrain.train.parallel.collectives import WorkersGroup

HOSTS_WAIT_LONGER_S = 10.0
"""Than the workers do: where nobody can meet, the workers end the run with the reason before a host is heard."""
POLL_S = 0.02
INTERFACE_HINT = "cluster.interface names the network interface over which all nodes reach each other"
Reason = Callable[[], str | None]
"""Why the generation is over; None while it lives."""


def open_group(told: dict[str, Any], *, rank: int, lost: Reason = lambda: None) -> JointGroup:
    """A member's end of the generation's joint group; blocks until all members are there.

    Args:
        told: {"generation", "workers", "hosts", "address": (host, port) of the store, "interface", "device"}.
        lost: looked at while waiting.

    Raises:
        StateLost: the generation ended meanwhile. RunError: a member did not come, or cannot be reached.
    """
    workers, hosts = told["workers"], told["hosts"]
    limit = RENDEZVOUS_S + (HOSTS_WAIT_LONGER_S if rank >= workers else 0.0)
    store = connect(told["address"], who=_title(rank, workers), limit=limit)
    name, places = f"generation-{told['generation']}", []
    try:
        places = _meet(store, name, rank=rank, workers=workers, size=workers + hosts, limit=limit, lost=lost)
        return JointGroup(
            store,
            name=name,
            rank=rank,
            size=workers + hosts,
            workers=workers,
            holders=list(range(workers, workers + hosts)),
            device=torch.device(told["device"]),
            interface=told["interface"],
            watched=True,
        )
    except RuntimeError as error:  # torch's; ours are no RuntimeErrors
        reason = lost()
        if reason is not None:
            raise StateLost(reason) from error
        others = ", ".join(f"{_title(other, workers)} on {place}" for other, place in enumerate(places))
        raise RunError(
            f"{_title(rank, workers)} cannot be connected with all others over {told['interface'] or 'the default'} "
            f"interface ({first_line(error)}); there are {others}; {INTERFACE_HINT}"
        ) from error


def open_store(address: str) -> tuple[Any, tuple[str, int]]:
    """The store of all generations, on this address alone, and where it is."""
    listener = socket.create_server((address, 0), backlog=1024)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, (address, port)


def connect(address: tuple[str, int], *, who: str, limit: float) -> Any:
    """A client of the store where the members meet.

    Raises:
        RunError: nobody answers there.
    """
    host, port = address
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit))  # pyright: ignore
    except RuntimeError as error:
        raise RunError(
            f"{who} cannot reach the expert directory at {host}:{port} within {limit:g} s ({first_line(error)}); {INTERFACE_HINT}"
        ) from error


def _meet(store: Any, name: str, *, rank: int, workers: int, size: int, limit: float, lost: Reason) -> list[str]:
    """Leave this member's place in the store, wait for everybody's; where they are, by rank."""
    keys, ends = [f"{name}/place/{other}" for other in range(size)], time.monotonic() + limit
    store.set(keys[rank], os.uname().nodename)
    while not store.check(keys):
        reason = lost()
        if reason is not None:
            raise StateLost(reason)
        if time.monotonic() > ends:
            absent = [_title(other, workers) for other, key in enumerate(keys) if not store.check([key])]
            raise RunError(f"{', '.join(absent)} did not come within {limit:g} s to where all members meet; {INTERFACE_HINT}")
        time.sleep(POLL_S)
    return [store.get(key).decode() for key in keys]


def join_as_worker(
    told: dict[str, Any], *, rank: int, wait: Callable[[], str]
) -> tuple[JointGroup, WorkersGroup | None, Reason]:
    """A worker's groups of one generation, all of which end with it, and why it is over: the joint group, and one of
    the workers alone where there are several.

    Args:
        wait: blocks until the generation is over; returns why.

    Raises:
        StateLost, RunError: as `open_group`.
    """
    lost = GenerationWatch(wait)
    group = open_group(told, rank=rank, lost=lost.reason)
    lost.ends(group)
    if told["workers"] == 1:
        return group, None, lost.reason
    try:
        payload, flags = _workers_groups(told, rank=rank, device=group.device)
    except RuntimeError as error:  # all workers are connected with each other: one of them is gone again
        raise StateLost(lost.reason() or f"the workers did not meet: {first_line(error)}") from error
    for one in {id(one): one for one in (payload, flags)}.values():
        lost.ends(AbortableGroup(one))
    return group, WorkersGroup(payload, flags, lost.reason), lost.reason


def _workers_groups(told: dict[str, Any], *, rank: int, device: torch.device) -> tuple[Any, Any]:
    """(payload, flags) over the workers of one generation."""
    workers = told["workers"]
    store = connect(told["address"], who=_title(rank, workers), limit=RENDEZVOUS_S)
    name = f"generation-{told['generation']}/workers"
    flags = gloo(store, f"{name}/flags", rank, workers, interface=told["interface"], timeout_s=1800.0)
    if device.type != "cuda":
        return flags, flags
    return nccl(store, f"{name}/payload", rank, workers, timeout_s=1800.0), flags


class AbortableGroup:
    """A process group with the `abort(reason)` of a joint group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def abort(self, _reason: str) -> None:
        """End what waits."""
        abort_group(self._group)


class GenerationWatch:
    """Thread of a member: waits for the end of the generation, and then ends every group of it here.

    Args:
        wait: blocks until the generation is over; returns why.
    """

    def __init__(self, wait: Callable[[], str]) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._reason: str | None = None
        threading.Thread(target=self._watch, daemon=True, name="generation-watch").start()

    def reason(self) -> str | None:
        """Why the generation is over; None while it lives."""
        return self._reason

    def ends(self, group: Any) -> None:
        """End this group too, at once where the generation is over already."""
        with self._lock:
            self._groups.append(group)
            reason = self._reason
        if reason is not None:
            group.abort(reason)

    def _watch(self) -> None:
        reason = self._wait()
        with self._lock:
            self._reason, groups = reason, list(self._groups)
        for group in groups:
            group.abort(reason)


def _title(rank: int, workers: int) -> str:
    return f"worker {rank}" if rank < workers else f"expert host {rank - workers}"
