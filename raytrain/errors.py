"""The errors a person meets: what was seen, what was expected, which key mends it."""

from __future__ import annotations


class RaytrainError(Exception):
    """Any failure that raytrain explains itself; `exit_code` is what the command ends with."""

    exit_code = 1


class InputError(RaytrainError):
    """The input is wrong and nothing was started (exit 2).

    Args:
        key: the key, file or option that mends it, e.g. ``loop.max_steps``.
        seen: what was found there.
        expected: what would have been right.
        remedy: one more hint, such as the nearest key.
    """

    exit_code = 2

    def __init__(self, key: str, *, seen: str, expected: str, remedy: str = "") -> None:
        self.key, self.seen, self.expected, self.remedy = key, seen, expected, remedy
        text = f"{key}: seen {seen}, expected {expected}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_input_error, (self.key, self.seen, self.expected, self.remedy))


def _rebuild_input_error(key: str, seen: str, expected: str, remedy: str) -> InputError:
    """Keyword-only arguments do not survive pickle's default; errors cross process borders."""
    return InputError(key, seen=seen, expected=expected, remedy=remedy)


class RunError(RaytrainError):
    """The run failed after it was started (exit 1)."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, or is refused."""


class DevicePlacementError(RunError):
    """A tensor is not on the device it should be on; the message names it."""


class CollectiveFailed(RunError):
    """A sum over the workers failed, mostly because one of them is gone; an echo of the cause, not the cause."""


class StateLost(RunError):
    """State that lives in other processes is lost, or they can no longer be reached: the run goes back to the newest
    checkpoint and on from there."""


class OutOfMemory(RunError):
    """A device or the memory budget of a process is exhausted."""


def first_line(error: BaseException) -> str:
    """Of what an error says; its type's name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
