"""Exceptions for users; each message is one sentence: what was found, what is expected, which key to change."""

from __future__ import annotations

import re
from bdb import BdbQuit
from functools import partial

GUESS = "did you mean "
"""How a remedy begins that names what was probably meant."""


class RaytrainError(Exception):
    """A failure that raytrain explains; `exit_code` is the exit code of the command."""

    exit_code = 1


def mismatch(subject: str, *, got: str, expected: str, remedy: str = "") -> str:
    """The sentence of every error about a wrong value: ``SUBJECT: got X, expected Y; REMEDY``.

    A remedy that begins with a guess, ``did you mean Z?``, stands first: it is all that most readers need.
    """
    if remedy.startswith(GUESS):
        guess, _, more = remedy.partition("?")
        return f"{subject}: {guess}? Got {got}, expected {expected}{more}"
    text = f"{subject}: got {got}, expected {expected}"
    return f"{text}; {remedy}" if remedy else text


class InputError(RaytrainError):
    """The input is wrong and nothing was started (exit 2).

    Args:
        key: the key, file or option to change, e.g. ``loop.max_steps``.
        got: what was found.
        expected: what is valid.
        remedy: what to change, such as the nearest key.
    """

    exit_code = 2

    def __init__(self, key: str, *, got: str, expected: str, remedy: str = "") -> None:
        self.key, self.got, self.expected, self.remedy = key, got, expected, remedy
        super().__init__(mismatch(key, got=got, expected=expected, remedy=remedy))

    def __reduce__(self) -> tuple[object, ...]:
        # pickle's default does not support keyword-only arguments; errors are sent between processes
        return partial(InputError, self.key, got=self.got, expected=self.expected, remedy=self.remedy), ()


class RunError(RaytrainError):
    """The run failed after it was started (exit 1)."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, or is refused."""


class DevicePlacementError(RunError):
    """A tensor is not on the device it should be on; the message names it."""


class CollectiveFailed(RunError):
    """A collective failed, usually because a worker died: a consequence of the cause, not the cause itself."""


def lost_in(what: str, error: BaseException) -> CollectiveFailed:
    """The failure of `what` ("a collective of 2 workers"), from the error that torch raised: without the place in the
    C++ code that begins the message of gloo and NCCL, and without the advice that follows it."""
    why = re.sub(r"^(\[[^\]]*\.(cc|cpp|h|hpp):\d+\]\s*)+", "", first_line(error))
    return CollectiveFailed(f"{what} failed: {why.partition('. This may indicate')[0]}")


class StateLost(RunError):
    """State in other processes is lost, or they cannot be reached: the run resumes from the latest checkpoint."""


class ClusterLost(RunError):
    """One of Ray's own processes died, and the run with it: the driver starts the next attempt."""


class ResourcesTaken(RunError):
    """The workers find no room in the cluster: what the run holds is given back, and it waits for all of it again.

    Nothing failed: it is no fault, and costs none of the restarts that `retry` allows.
    """


class WorkersChange(ResourcesTaken):
    """The cluster has room for another number of workers than an elastic run has: it continues with that number."""

    def __init__(self, workers: int, reason: str) -> None:
        super().__init__(reason)
        self.workers = workers


class OutOfMemory(RunError):
    """A device or the memory budget of a process is exhausted."""


LONGEST_LINE = 500
"""Characters of a line that is shown of an error's message."""
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text of the user's code for a terminal and a file: control characters, which could clear the screen, and halves
    of characters, which cannot be written, as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\r\n", "\n").translate(_CONTROLS)


def message_of(error: BaseException) -> str:
    """The message of an error; "" if a class of the user's own fails to write it, which is not what went wrong."""
    try:
        return printable(str(error))
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or the name of its type if none does."""
    if isinstance(error, BdbQuit):
        return "a debugger was left, or found no terminal: `raytrain train --debug` trains where it has one"
    line = next((line for line in message_of(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}... ({len(line):,} characters)"
