"""Elapsed and remaining time in a progress bar: what was measured, in words that cannot be confused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rich.progress import ProgressColumn, Task
from rich.text import Text

#: The rate is that of the steps of the last so many seconds; before this many there is none.
WINDOW_S, LEAST_S = 60.0, 2.0


class RemainingTime:
    """Estimates the time for the steps that are left from the newest steps of this attempt.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._left_s: float | None = None
        self._since = 0.0

    def see(self, step: int, total: int | None, *, left_s: float | None = None) -> None:
        """The newest step.

        Args:
            total: steps of the run; None while none are made: what was measured before is forgotten, as after a step
                back, since the next attempt may be faster or slower.
            left_s: the remaining seconds, where the caller knows them better.
        """
        if total is None:
            self._seen.clear()
            self._left_s = None
            return
        if self._seen and step == self._seen[-1][1]:
            return
        now = self._clock()
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        self._since, self._left_s = now, left_s
        (first_at, first), left = self._seen[0], total - step
        if left_s is None and left > 0 and now - first_at >= LEAST_S:
            self._left_s = left * (now - first_at) / (step - first)

    def seconds(self) -> float | None:
        """The remaining seconds; None where they are unknown."""
        return None if self._left_s is None else max(0.0, self._left_s - (self._clock() - self._since))


class _TimesColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        """The text of the task's field `times`, a function, so that the time passes between two updates."""
        return Text(task.fields["times"](), style="progress.elapsed", no_wrap=True)


def times_column() -> ProgressColumn:
    """The column of a bar for `times_text`: its task has a field `times`, which returns the text."""
    return _TimesColumn()


def times_text(elapsed_s: float, left_s: float | None) -> str:
    """`0:04:46`, the elapsed time, and once the remaining time is known `0:04:46  0:11:52 left`."""
    return clock_text(elapsed_s) + ("" if left_s is None else f"  {clock_text(left_s)} left")


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds: `0:04:46`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
