"""Where the threads of a process are: of this one from inside, of another one on this machine through py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import threading
import traceback

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
