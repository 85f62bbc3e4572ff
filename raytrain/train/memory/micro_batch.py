"""How large a micro-batch is while a run goes on, pure: halved where memory ran out, grown back when it went well.

The global batch, its order and the gradient stay as they are: what changes is in how many parts a window is computed.
"""

from __future__ import annotations


class MicroBatchSize:
    """The size in force, the same in every process that is told the same.

    Growing goes back over the sizes that were left, one at a time, each after `grow_after` clean steps; a size that
    failed again is waited for twice as long as before, until it has gone well for as long as it was waited for.

    Args:
        planned: rows of a micro-batch as the run begins, and at most.
        grow_after: clean steps before the next larger size is tried; None never grows.

    Attributes:
        planned: as above.
        now: in force.
    """

    def __init__(self, planned: int, *, grow_after: int | None) -> None:
        self.planned = self.now = planned
        self._grow_after = grow_after
        self._left: list[int] = []
        self._failures: dict[int, int] = {}
        self._clean = 0

    def after_shortage(self) -> int | None:
        """The next smaller size, from now on in force; None where there is none."""
        if self.now == 1:
            return None
        self._failures[self.now] = self._failures.get(self.now, 0) + 1
        self._left.append(self.now)
        self.now, self._clean = halved(self.now), 0
        return self.now

    def after_clean_step(self) -> int | None:
        """The next larger size, from now on in force, where it is time for it; else None."""
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
        """Clean steps from one size to the next larger one; None where it does not grow."""
        return self._wait_for(self._left[-1]) if self._grow_after is not None and self._left else None

    def _wait_for(self, size: int) -> int:
        return (self._grow_after or 0) * 2 ** max(0, self._failures.get(size, 0) - 1)


def halved(size: int) -> int:
    """Half a micro-batch, rounded up: twice as many of them cover a window."""
    return (size + 1) // 2
