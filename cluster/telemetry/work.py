"""What a process has finished inside a long activity, such as batches of an evaluation: by it the driver
distinguishes a long one from a stuck one."""

from __future__ import annotations

#: What rank 0 does besides steps, as its progress names it.
EVALUATING, SAVING = "evaluating", "saving a checkpoint"


class WorkCount:
    """Counts finished pieces of work; from several threads.

    Attributes:
        done: only whether it changes has a meaning: two threads may count one piece at once.
    """

    def __init__(self) -> None:
        self.done = 0

    def add(self) -> None:
        """A micro-batch or a batch of an evaluation was computed, a piece of a file was written or read, or a wait that
        has a limit of its own goes on."""
        self.done += 1


#: Of this process; a worker's signs of life carry it to the driver.
WORK = WorkCount()
