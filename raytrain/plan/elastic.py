"""Elastic workers (`scale.workers: [min, max]`): how many a cluster has room for, and when a run changes its number.

A run that loses a node continues with the workers that the other nodes have room for; one that finds room for more
saves, and continues with more. Either way the driver makes a new plan and starts the next attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.wording import counted
from raytrain.errors import WorkersChange

#: Room for more workers must last this long, so that nodes which arrive together cause one restart.
GROW_AFTER_S = 10.0
#: Ray releases what a lost group of workers held within this time.
SHRINK_AFTER_S = 5.0


class ElasticWorkers:
    """Decides when a run continues with another number of workers.

    Args:
        bounds: (min, max) workers.
        workers: their number now.
        clock: seconds; replaced in tests.
    """

    def __init__(self, bounds: tuple[int, int], workers: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._most, self._workers, self._clock = *bounds, workers, clock
        self._fits, self._since = workers, clock()

    def decide(self, *, room: int, waiting: bool) -> WorkersChange | None:
        """The number to continue with, once the cluster has had room for it for a while.

        Args:
            room: workers that fit what is free.
            waiting: no worker has started, since there is no room for all of them; else all of them train.
        """
        fits = min(self._most, room if waiting else self._workers + room)
        changes = self._least <= fits < self._workers if waiting else fits > self._workers
        now = self._clock()
        if not changes or fits != self._fits:
            self._fits, self._since = fits if changes else self._workers, now
            return None
        if now - self._since < (SHRINK_AFTER_S if waiting else GROW_AFTER_S):
            return None
        what = "the cluster has no more room" if waiting else "the cluster has room for more"
        workers = counted(fits, "worker")
        same = "on the same samples, with losses equal to rounding"
        return WorkersChange(fits, f"{what}: the run continues with {workers} instead of {self._workers}, {same}")
