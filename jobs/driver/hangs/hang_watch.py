"""Steps that do not end: after how long, which rank is absent, and where the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from raytrain.config.messages import abbreviated
from raytrain.execution.driver_channel import SIGN_EVERY_S

#: A step is late after this many times its usual duration, and after this long; with torch.compile, which may compile
#: again inside a step, after `COMPILE_S`.
STEPS_LATE, LEAST_STEP_S, COMPILE_S = 10.0, 5.0, 300.0
#: Rank 0 reports its step this often (`raytrain.execution.reporter`), so that its last step may be this old.
REPORT_EVERY_S = 5.0
#: The driver waits this long for the workers' answers to the question where they are.
ANSWER_LIMIT_S = 10.0


class HangWatch:
    """Learns how long a step takes, and says when one takes far longer, who is absent, and where the others wait.

    Evaluations, checkpoints and other activities of rank 0 do not count. Rank 0's step is known to `REPORT_EVERY_S`.

    Args:
        compiles: the run compiles: a step may contain a compilation.
        clock: seconds; replaced in tests.

    Attributes:
        event: the fields of the hang that was said last; None before.
    """

    def __init__(self, *, compiles: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._least_s, self._clock = (COMPILE_S if compiles else LEAST_STEP_S), clock
        self._seen: tuple[str, int, str] = ("", -1, "")
        self._since = clock()
        self._asked: float | None = None
        self._said = False
        self.event: dict[str, Any] | None = None

    @property
    def asking(self) -> bool:
        """The workers were asked where they are, and the line about it has not been said."""
        return self._asked is not None and not self._said

    @property
    def late_s(self) -> float:
        """Seconds since the step, the phase or the activity last changed."""
        return self._clock() - self._since

    def due(self, progress: Mapping[str, Any], *, silent: bool = False) -> bool:
        """Whether the workers should be asked where they are: once for a step that exceeds its deadline, or in which a
        worker is to be ended because it is `silent`."""
        row = progress.get("row") or {}
        step = max(int(row.get("step") or 0), int(progress.get("step") or 0))
        seen = str(progress.get("phase")), step, str(progress.get("activity") or "")
        if seen != self._seen or seen[0] != "training" or seen[2] or not row.get("step_time_s"):
            self._seen, self._since, self._asked, self._said = seen, self._clock(), None, False
            return False
        usual_s = max(float(row["step_time_s"]), float(row.get("step_ms_p95") or 0.0) / 1000)
        deadline = max(self._least_s, STEPS_LATE * usual_s) + REPORT_EVERY_S
        if self._asked is not None or (self._clock() - self._since < deadline and not silent):
            return False
        self._asked = self._clock()
        return True

    def lines(
        self, signs: Mapping[int, tuple[float, str]], stacks: Mapping[int, Mapping[str, Any]], *, now: float
    ) -> list[str]:
        """The line about a step that is late, once the workers that respond have answered.

        Args:
            signs: as in `SilentRanks.lines`. stacks: as `DriverChannel.stacks` returns them. now: unix time.
        """
        if self._asked is None or self._said:
            return []
        silent = [rank for rank, (last, _) in sorted(signs.items()) if now - last >= 2 * SIGN_EVERY_S]
        waited = self._clock() - self._asked
        if waited < ANSWER_LIMIT_S and set(signs) - set(silent) - set(stacks):
            return []
        self._said = True
        absent = silent or [rank for rank, one in sorted(stacks.items()) if not one["waits"]]
        who = "; ".join(
            f"rank {rank} {signs[rank][1] if rank in signs else ''} "
            + ("does not respond" if rank in silent else f"is in {stacks[rank]['place']}")
            for rank in absent
        )
        others = [f"rank {rank} waits in {one['place']}" for rank, one in sorted(stacks.items()) if rank not in absent]
        late = self._clock() - self._since
        text = f"step {self._seen[1] + 1} has not ended for {late:.0f} s: {who or 'every rank waits for another'}"
        text += f"; {abbreviated(others, 3)}" if others else ""
        text += "; the stacks of every rank are in logs/rank_*.stacks"
        self.event = {"step": self._seen[1] + 1, "seconds": late, "ranks": absent, "silent": silent, "reason": text}
        return [text]

    def overdue(self, signs: Mapping[int, tuple[float, str]], *, hang_s: float | None) -> list[int]:
        """The ranks to end, while a step is late and that was said: after `hang_s` seconds in the step those that the
        others wait for, or one if all wait."""
        if not self._said or not signs or hang_s is None or self._clock() - self._since < hang_s:
            return []
        absent = self.event["ranks"] if self.event is not None else []
        return [rank for rank in absent if rank in signs] or [min(signs)]
