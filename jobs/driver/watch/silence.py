"""Workers that do not respond: for how long, and what is printed about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jobs.driver.screen.phases import EXPORTING, TRAINING

#: Phases in which a process that does not respond is stopped or stuck. Before them the user's code may hold Python's
#: lock for long in one call, as while it unpickles large data: they allow `SETUP_TIMES` the silence.
STEADY = (TRAINING, EXPORTING)
SETUP_TIMES = 5
#: A worker without a sign of life for this long is reported.
SAY_SILENT_S = 15.0


class Silence:
    """Measures how long each worker has not responded.

    It counts from when this process first saw the newest sign of life, on a clock that stands still while the machine
    is suspended: after that, all workers have been silent for as long as the driver.

    Args:
        limit_s: `retry.host_silence_s`.
        clock: seconds; replaced in tests.
    """

    def __init__(self, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since: dict[int, tuple[tuple[float, str], float]] = {}

    def overdue(self, signs: Mapping[int, tuple[float, str]], progress: Mapping[str, Any]) -> dict[int, float]:
        """Rank -> seconds, of the workers whose processes are to be ended; call it often.

        Args:
            signs: rank -> (unix time of its last sign of life, where it runs), of the workers that have not returned.
            progress: as shown by the driver: {"phase", ...}.
        """
        now = self._clock()
        self._since = {
            rank: known if (known := self._since.get(rank)) is not None and known[0] == sign else (sign, now)
            for rank, sign in signs.items()
        }
        limit = self._limit_s * (1 if progress.get("phase") in STEADY else SETUP_TIMES)
        return {rank: now - since for rank, (_, since) in sorted(self._since.items()) if now - since >= limit}


class SilentRanks:
    """Says which workers do not respond, and which do again: the others wait for them in the next collective."""

    def __init__(self) -> None:
        self._reported: dict[int, float] = {}

    def lines(self, signs: Mapping[int, tuple[float, str]], *, now: float, limit_s: float) -> list[str]:
        """A line for each worker whose state has changed.

        Args:
            signs: rank -> (unix time of its last sign of life, where it runs), of the workers that have not returned.
            now: unix time.
            limit_s: `retry.host_silence_s`, after which its process is ended.
        """
        found = []
        for rank, (last, where) in sorted(signs.items()):
            silent = now - last >= SAY_SILENT_S
            if silent and rank not in self._reported:
                self._reported[rank] = last
                at = time.strftime("%H:%M:%S", time.localtime(last))
                then = f"after {limit_s:g} s it is ended, and all workers restart (retry.host_silence_s)"
                found.append(f"rank {rank} {where} has not responded since {at}: {then}")
            elif not silent and rank in self._reported:
                found.append(f"rank {rank} {where} responds again, after {last - self._reported.pop(rank):.0f} s")
        for rank in self._reported.keys() - signs.keys():  # another process has taken its place, or will
            del self._reported[rank]
        return found
