"""Processes of a run on this machine: memory and CPU time from /proc, what they have finished, where they are.

The counter of finished work distinguishes a long evaluation or save from a stuck one; the stacks say where a stuck one
is.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.devices.limits import ROOT, text_of

# ---------------------------------------------------------------- process


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
    lines = text_of(root / "proc/self/status").splitlines()
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


# ---------------------------------------------------------------- processes

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
        """This process, and the children of the raylet that belong to the job; each is read once: that stays."""
        children = self._children(int(self._stat(self._pid)[1]))
        for pid in children:
            if pid not in self._of_run:
                self._of_run[pid] = self._job is not None and self._job_of(pid) == self._job
        return [self._pid, *(pid for pid in children if self._of_run[pid])]

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
        return [int(child) for thread in threads for child in text_of(thread / "children").split()]

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


# ---------------------------------------------------------------- work
# What a process has finished inside a long activity, such as batches of an evaluation: by it the driver distinguishes a
# long one from a stuck one.

#: What rank 0 does besides steps, as its progress names it.
EVALUATING, SAVING, SLEEPING = "evaluating", "saving a checkpoint", "replaying"


class WorkCount:
    """Counts finished pieces of work, from several threads: only whether `done` changes has a meaning."""

    def __init__(self) -> None:
        self.done = 0

    def add(self) -> None:
        """A micro-batch or a batch of an evaluation was computed, a piece of a file was written or read, or a wait that
        has a limit of its own goes on."""
        self.done += 1


#: Of this process; a worker's heartbeats carry it to the driver.
WORK = WorkCount()


# ---------------------------------------------------------------- stacks

OUTSIDE_S = 10.0
"""Most seconds that py-spy may take."""


def own_stacks() -> str:
    """The stack of every Python thread of this process, the main thread first."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident in sorted(frames, key=lambda one: one != main):
        lines = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"Thread {names.get(ident, '?')} ({ident})\n{lines}")
    return "\n".join(texts)


def thread_named(prefix: str) -> int | None:
    """A thread of this process whose name begins with this."""
    found = (thread.ident for thread in threading.enumerate() if thread.name.startswith(prefix))
    return next(found, None)


def stack_of(thread: int) -> list[traceback.FrameSummary]:
    """The stack of one thread of this process, the innermost frame last; [] if it has ended."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else list(traceback.extract_stack(frame))


def outside_stacks(pid: int) -> str:
    """The stacks of another process of this machine, which may be stopped; otherwise a sentence saying why not."""
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        return "no stack: py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=OUTSIDE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no stack: py-spy did not answer within {OUTSIDE_S:.0f} s"
    return done.stdout if done.returncode == 0 else f"no stack: {done.stderr.strip()}"
