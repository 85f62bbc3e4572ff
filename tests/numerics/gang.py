"""Runs a function in N new processes that form a gloo group, with a timeout and without Ray.

The processes are forked from a server that has only imported modules, so each is as fresh as a new process (no
threads, no random number drawn, no memory reused) and starts in a tenth of a second instead of three seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

LIMIT_S = 90.0
PRELOAD = [
    "torch._inductor",
    "raytrain.train.session",
    "raytrain.execution.checkpointer",
    "experts.models",
    "jobs.driver.check_job",
    "jobs.driver.planning",
]
"""It includes torch's compiler, which every optimizer imports and which takes longer than all the rest."""


def run_gang(
    function: Callable[..., Any], *arguments: Any, world_size: int, timeout: float = LIMIT_S, killed: bool = False
) -> list[Any]:
    """Runs `function(rank, world_size, *arguments)` in `world_size` processes; returns their results by rank.

    Args:
        function: a function at the top level of a module that a new process can import; it returns no tensors.
        killed: the group must end by SIGKILL; the result is an empty list.

    The test fails with the traceback of the first rank that failed; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in fixed}
    os.environ.update(fixed)  # inherited by the server, which starts with the first call
    with tempfile.TemporaryDirectory(prefix="gang-") as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_live, args=(function, rank, world_size, f"{folder}/store", theirs, arguments), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        try:
            results = _collect(ends, timeout=timeout, killed=killed)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in ends:
                end.close()
        codes = [process.exitcode for process in processes]
        if killed and -signal.SIGKILL not in codes:
            pytest.fail(f"no process was killed: exit codes {codes}")
        return results


def _collect(ends: list[Connection], *, timeout: float, killed: bool) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(ends))
    limit = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(waiting)} of {len(ends)} had not returned after {timeout} s")
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            try:
                kind, value = waiting.pop(rank).recv()
            except EOFError:
                kind, value = "died", ""
            if killed and kind != "returned":
                return []
            if kind != "returned":
                pytest.fail(f"rank {rank} of {len(ends)} {kind}\n{value}")
            results[rank] = value
    if killed:
        pytest.fail("the group returned, though it was to be killed")
    return [results[rank] for rank in range(len(ends))]


def _live(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    connection: Connection,
    arguments: tuple[Any, ...],
) -> None:
    """In a child: joins the group, runs the function and sends its result."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
        value = function(rank, world_size, *arguments)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None
    connection.send(("returned", value))
    signal.pause()  # the parent kills all ranks: a peer may still be reading what this rank sent last
