"""Memory of this process."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from cluster.telemetry.processes import MemoryUse, process_memory, reset_peak

SLACK = 8 << 20
"""The kernel sums its counters lazily: two of them agree within some pages a core."""


def test_resident_and_peak_are_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nRssAnon:\t  50 kB\n")
    assert process_memory(root=tmp_path) == MemoryUse(rss=200 * 1024, peak=300 * 1024, anonymous=50 * 1024)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert process_memory(root=tmp_path) == MemoryUse(rss=0, peak=0)
    assert reset_peak(root=tmp_path) is False


def test_the_peak_remembers_freed_memory_until_it_is_reset() -> None:
    before = process_memory()
    block = mmap.mmap(-1, 64 << 20)  # new pages, not those that an allocator has kept
    for page in range(0, len(block), 4096):
        block[page] = 1
    during = process_memory()
    block.close()
    after = process_memory()
    assert during.rss >= before.rss + (48 << 20)
    assert after.rss < during.rss
    assert after.peak >= during.rss - SLACK
    if not reset_peak():
        pytest.skip("this kernel lets no process reset its peak")
    assert process_memory().peak < during.rss - SLACK
