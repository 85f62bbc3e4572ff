"""Adapts the micro-batch size during a run: halves it after out of memory, grows it back after clean steps.

The global batch, its order and the gradient do not change, only the number of micro-batches that compute them.
"""

from __future__ import annotations


class MicroBatchSize:
    """The current micro-batch size; a pure function of the calls, so equal in all processes with equal calls.

    It grows back through the sizes it left, one at a time, each after `grow_after` clean steps. Each repeated failure
    of a size doubles the wait before it is tried again, until the size has worked for as many steps as that wait.

    Args:
        planned: rows of a micro-batch at the start of the run; also the maximum. The current size is `now`.
        grow_after: clean steps before the next larger size is tried; None never grows.
        whole: it must not be split (`loop.micro_batch_size: whole`).
    """

    def __init__(self, planned: int, *, grow_after: int | None, whole: bool = False) -> None:
        self.planned = self.now = planned
        self.whole = whole
        self._grow_after = grow_after
        self._left: list[int] = []
        self._failures: dict[int, int] = {}
        self._clean = 0

    def after_shortage(self) -> int | None:
        """Switch to the next smaller size and return it; None if there is none."""
        if self.now == 1 or self.whole:
            return None
        self._failures[self.now] = self._failures.get(self.now, 0) + 1
        self._left.append(self.now)
        self.now, self._clean = halved(self.now), 0
        return self.now

    def after_clean_step(self) -> int | None:
        """Count a clean step; if it is time to grow, switch to the next larger size and return it, else None."""
        if self._grow_after is None:
            return None
        self._clean += 1
        if self._clean >= self._wait_for(self.now):
            self._failures.pop(self.now, None)
        if self.wait is None or self._clean < self.wait:
            return None
        self.now, self._clean = self._left.pop(), 0
        return self.now

    @property
    def wait(self) -> int | None:
        """Clean steps required before the next larger size; None if the size cannot grow."""
        return self._wait_for(self._left[-1]) if self._grow_after is not None and self._left else None

    def _wait_for(self, size: int) -> int:
        return (self._grow_after or 0) * 2 ** max(0, self._failures.get(size, 0) - 1)


def halved(size: int) -> int:
    """Half a micro-batch, rounded up, so that twice as many of them cover a global batch."""
    return (size + 1) // 2
