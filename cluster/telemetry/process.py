"""Memory of this process, read from /proc."""

from __future__ import annotations

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
    fields: dict[str, int] = {}
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return MemoryUse(rss=0, peak=0)
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon"):
            fields[name] = int(value.split()[0]) * 1024
    rss = fields.get("VmRSS", 0)
    return MemoryUse(rss=rss, peak=max(rss, fields.get("VmHWM", 0)), anonymous=fields.get("RssAnon", rss))


def reset_peak(*, root: Path = ROOT) -> bool:
    """Resets the peak to the current value; False if the kernel does not allow it."""
    try:
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
