"""The processes of a run, or all of Ray's, on this machine: their memory and CPU time, read from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.devices.limits import ROOT

#: The variable in which Ray tells a worker process the job that it belongs to.
JOB_VARIABLE = b"RAY_JOB_ID="
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessSample:
    """One process.

    Attributes:
        name: its title; Ray names the class and the method of an actor.
        rss: resident bytes. anonymous: of these, without mapped files, which the kernel can drop; with swapped pages.
        cpu_percent: of one core, since the last sample; None in the first.
    """

    pid: int
    name: str
    rss: int
    anonymous: int
    cpu_percent: float | None


class RunProcesses:
    """Finds and measures the processes of a run: this one, Ray's other workers of the same job, and their children.

    Args:
        pid: the process of the run that asks; the raylet that started it is its parent.
        root: the directory to use as ``/``.
    """

    def __init__(
        self, *, pid: int | None = None, root: Path = ROOT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._clock = root, clock
        self._pid = os.getpid() if pid is None else pid
        self._job = self._job_of(self._pid)
        self._of_run: dict[int, bool] = {}
        self._before: dict[int, tuple[float, float]] = {}

    def sample(self) -> list[ProcessSample]:
        """The processes, by process id."""
        pids, waiting = set[int](), self._roots()
        while waiting:
            pid = waiting.pop()
            if pid not in pids:
                pids.add(pid)
                waiting += self._children(pid)
        found = [one for pid in sorted(pids) if (one := self._read(pid)) is not None]
        self._before = {pid: seen for pid, seen in self._before.items() if pid in pids}
        return found

    def _roots(self) -> list[int]:
        """The processes whose children belong to the run as well."""
        return [self._pid, *(pid for pid in self._children(self._parent(self._pid)) if self._is_of_run(pid))]

    def _is_of_run(self, pid: int) -> bool:
        """Whether a child of the raylet belongs to the job; read once for each process, as Ray does not change it."""
        if pid not in self._of_run:
            self._of_run[pid] = self._job is not None and self._job_of(pid) == self._job
        return self._of_run[pid]

    def _job_of(self, pid: int) -> bytes | None:
        try:
            variables = (self._root / f"proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has exited, or is another user's
            return None
        return next((one for one in variables if one.startswith(JOB_VARIABLE)), None)

    def _children(self, pid: int) -> list[int]:
        try:
            threads = list((self._root / f"proc/{pid}/task").iterdir())
        except OSError:
            return []
        found = list[int]()
        for thread in threads:
            try:
                found += map(int, (thread / "children").read_text().split())
            except OSError:
                continue
        return found

    def _parent(self, pid: int) -> int:
        return int(self._stat(pid)[1])

    def _stat(self, pid: int) -> list[str]:
        """The fields of /proc/PID/stat from the third, the state, on."""
        return (self._root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()

    def _read(self, pid: int) -> ProcessSample | None:
        """None if it has exited."""
        try:
            status = (self._root / f"proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            title = (self._root / f"proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stat = self._stat(pid)
        except OSError:
            return None
        sizes = {
            line.partition(":")[0]: int(line.split()[1]) * 1024
            for line in status.splitlines()
            if line.startswith(("VmRSS", "RssAnon", "VmSwap"))
        }
        now, spent = self._clock(), (int(stat[11]) + int(stat[12])) / TICKS_PER_S
        before = self._before.get(pid)
        self._before[pid] = now, spent
        return ProcessSample(
            pid=pid,
            name=title.strip()[:80] or status.partition("\n")[0].partition(":")[2].strip(),
            rss=sizes.get("VmRSS", 0),
            anonymous=sizes.get("RssAnon", sizes.get("VmRSS", 0)) + sizes.get("VmSwap", 0),
            cpu_percent=None if before is None else 100 * (spent - before[1]) / max(now - before[0], 1e-3),
        )


class RayWorkers(RunProcesses):
    """Ray's worker processes on this machine, of every job and cluster of this user, and their children."""

    def _roots(self) -> list[int]:
        found = {int(entry.name) for entry in (self._root / "proc").iterdir() if entry.name.isdigit()}
        self._of_run = {pid: of_ray for pid, of_ray in self._of_run.items() if pid in found}
        for pid in found - self._of_run.keys():
            self._of_run[pid] = self._job_of(pid) is not None
        return [pid for pid, of_ray in self._of_run.items() if of_ray]
