"""Memory of this process, read from /proc, and its limit."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from cluster.devices.limits import ROOT


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this process: currently resident, the peak since the start or the last `reset_peak`, and the part of the
    resident bytes that is not of mapped files."""

    rss: int
    peak: int
    anonymous: int = 0


def process_memory(*, root: Path = ROOT) -> MemoryUse:
    """Host memory of this process from /proc/self/status; zeros if there is no such file.

    Device memory is not included.
    """
    sizes = process_sizes(root)
    rss = sizes.get("VmRSS", 0)
    return MemoryUse(rss=rss, peak=max(rss, sizes.get("VmHWM", 0)), anonymous=sizes.get("RssAnon", rss))


def process_sizes(root: Path = ROOT) -> dict[str, int]:
    """Sizes of this process in bytes by their names in /proc/self/status; empty if the file does not exist."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith(("Vm", "Rss")))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


_data_limit: int | None = None  # what `limit_memory` has set


def limit_memory(limit: int | None) -> None:
    """Let the allocations of this process fail where it would use more than `limit` resident bytes; None: no longer.

    The kernel limits what is private and may be written (RLIMIT_DATA), touched or not, without mapped files and shared
    memory. What is reserved but unused now, as most of the threads' stacks, is added to the limit.
    """
    global _data_limit
    sizes, (soft, hard) = process_sizes(), resource.getrlimit(resource.RLIMIT_DATA)
    wanted = hard if is_own_limit(soft) else soft  # a limit of the user's own stays
    if limit is not None and "VmData" in sizes:
        _data_limit = sizes["VmData"] + max(0, limit - sizes["VmRSS"])
        wanted = _data_limit if wanted == resource.RLIM_INFINITY else min(wanted, _data_limit)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def is_own_limit(soft: int) -> bool:
    """Whether a soft RLIMIT_DATA is that of `limit_memory`, which says nothing of how much room a process had."""
    return soft == _data_limit


def reset_peak(*, root: Path = ROOT) -> bool:
    """Resets the peak to the current value; False if the kernel does not allow it."""
    try:
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
