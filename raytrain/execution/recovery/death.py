"""Why a worker's process ended, as far as Ray, the kernel and the process itself tell."""

from __future__ import annotations

import re
from collections.abc import Callable

#: What Ray writes of the end of an actor: its process id, and its exit code where it left by itself.
_PID, _EXIT_CODE = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE), re.compile(r"\bexit code (-?\d+)")
#: Of a process that Ray's own memory monitor ended.
_RAY_MEMORY = re.compile(r"NODE_OUT_OF_MEMORY|running low on memory|memory usage threshold")
#: What a process itself writes last: Ray's handler of signals, Python's, and the C++ library.
_LAST_WORDS = re.compile(
    r"\*\*\* (?P<signal>SIG[A-Z]+) received|Fatal Python error: (?P<error>.+)|(?P<cpp>terminate called .+)"
)


def words_of_death(rank: int, error: str, *, stderr: Callable[[int], str] | None, memory: bool) -> str:
    """One line: `the process of rank 0 (pid 4711) ended unexpectedly`, and why where that is known.

    Args:
        error: the text of Ray's exception.
        stderr: returns the end of what a process of this machine wrote to stderr, by its process id; None: the worker
            ran on another machine.
        memory: the kernel killed a process of this machine for its memory since the workers started.
    """
    pid = int(found[1]) if (found := _PID.search(error)) else None
    who = f"the process of rank {rank}{f' (pid {pid})' if pid else ''}"
    if _RAY_MEMORY.search(error):
        return f"{who} was ended by Ray's memory monitor: its node was out of memory"
    if memory:
        return f"{who} ended unexpectedly, and the kernel killed a process out of memory meanwhile (OOM killer)"
    last = _LAST_WORDS.search(stderr(pid)) if stderr is not None and pid else None
    if last is not None:
        return f"{who} ended with {last['signal'] or last['error'] or last['cpp']}"
    if code := _EXIT_CODE.search(error):
        return f"{who} ended with exit code {code[1]}"
    return f"{who} ended unexpectedly"
