"""Memory of this process on its device: peaks, the budget, the limit, and which errors mean that it ran out.

On a GPU the numbers are the allocator's reserved bytes, without the context of CUDA or ROCm itself, which lies outside
of it. On a CPU they are the resident set of the whole process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cluster.devices.limits import ROOT, memory_bytes
from cluster.telemetry.process import process_memory, reset_peak
from raytrain.errors import OutOfMemory
from raytrain.train.memory.allocator import freed_at_once, give_back_free_pages

if TYPE_CHECKING:
    from raytrain.train.parallel.collectives import Workers

#: On a CPU torch says "out of memory" by a plain RuntimeError. It is taken for one where at least this part of what the
#: process may have was in use: what failed is not known, but hardly larger than all that is there already.
PRESSED = 0.5


class PeakMeter:
    """Reads floor and peak of one measurement; make one for each, inside `exact_memory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_free_pages()
        self.floor = self.now()
        """Bytes in use when the meter was made: without what was freed before and only kept."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._resets = reset_peak()

    def now(self) -> int:
        """Bytes in use now."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        return process_memory().rss

    def peak(self) -> int:
        """The most since the meter was made; since the start of the process where the kernel resets no peak."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        return process_memory().peak


@contextlib.contextmanager
def exact_memory(device: torch.device) -> Iterator[None]:
    """Inside, memory that was freed before does not hide what is allocated now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()
        return
    with freed_at_once():
        yield


def process_budget(device: torch.device, *, fraction: float, limit: int | None, processes: int) -> int | None:
    """Bytes that this process may have, as `PeakMeter` counts them; None where nobody knows.

    Args:
        fraction: `cluster.memory_fraction`, of what is free now or held by this process.
        limit: `cluster.memory_limit`, of one process.
        processes: that share this device, or this node's memory, and are started like this one.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        room = fraction * (free / processes + torch.cuda.memory_reserved(device))
    else:
        _, free = memory_bytes()
        room = fraction * (free / processes + process_memory().rss) if free else 0.0
    known = [int(value) for value in (room, limit) if value]
    return min(known, default=None)


def limit_device_memory(
    device: torch.device, *, fraction: float, limit: int | None, processes: int = 1
) -> float | None:
    """Have the device's allocator refuse more than this process may take: its part of `fraction`, and `limit` bytes.

    Returns:
        the fraction of the device that was set; None on a CPU, where there is no such switch: there a measured peak
        above the budget counts as out of memory.
    """
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    share = fraction / processes
    share = share if limit is None else min(share, limit / total)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return share


def is_out_of_memory(error: BaseException, *, device: torch.device | None, budget: int | None = None) -> bool:
    """Whether an error means that memory ran out: by its type and the allocator, never by its message.

    torch's allocators for devices and Python's own have types for it. torch's allocator for CPU tensors raises a plain
    RuntimeError, as many mistakes do: it is judged by what the process had against the limits at which an allocation
    is refused (RLIMIT_AS, RLIMIT_DATA), and `budget` bytes resident. At those of a cgroup or machine it is killed.
    Where nobody knows the device (None) the type alone decides.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if device is None or device.type != "cpu" or type(error) is not RuntimeError:
        return False
    return any(used >= PRESSED * allowed for used, allowed in _use_and_limits(budget))


def _use_and_limits(budget: int | None, *, root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """(used at most so far, allowed) of each limit in force on this process."""
    sizes = _status(root)
    for kind, name in ((resource.RLIMIT_AS, "VmPeak"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft > 0:
            yield sizes.get(name, 0), soft
    if budget:
        yield process_memory(root=root).peak, budget


def _status(root: Path) -> dict[str, int]:
    """Sizes of this process in bytes by their names in /proc/self/status; empty where there is no such file."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith("Vm"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def address_space_limit(limit: int) -> None:
    """Let this process map at most `limit` bytes (RLIMIT_AS), for a child whose only purpose is to be measured."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def processes_sharing(device: torch.device, workers: Workers) -> int:
    """Workers of this run that take their memory where this one does, itself among them: those with the same GPU, on a
    CPU those of its node, as the launcher tells them. Collective on GPUs."""
    if device.type != "cuda":
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return workers.all_gather_object(own).count(own)
