"""Ways to compute the same thing, timed in alternating rounds, so that other work on the machine affects all alike.
Nothing that they measure changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from raytrain.accelerator import seconds_of
from raytrain.autotune.state_guard import preserve_model
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.session import Session

#: Rounds continue until this much time has passed, within the bounds that a caller gives.
BUDGET_S = 2.0
#: Until the rounds have taken so long, a clear result is no reason to stop: a few of milliseconds may all fall into one
#: burst of other work, and every look at the times is one more chance to be misled.
CHEAP_S = 0.25


@dataclass(frozen=True)
class TimedArm:
    """One way to compute.

    Attributes:
        work: what is timed.
        before: runs before the clock starts.
        values: reads what was computed, after the clock has stopped.
    """

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    values: Callable[[], Sequence[float]] = tuple


@dataclass(frozen=True)
class ArmTimes:
    """What one arm showed, the same on every worker.

    Attributes:
        round_s: the slowest worker's seconds of each timed round.
        values: rank 0's, of the last round.
        error: why the arm failed, or "".
    """

    round_s: tuple[float, ...]
    values: tuple[float, ...]
    error: str

    @property
    def median_s(self) -> float:
        """Of the rounds; infinite if nothing was timed."""
        return median(self.round_s) if self.round_s else float("inf")


def _attempt(_index: int, run: Callable[[], object]) -> str:
    """Run an arm; a failure is raised."""
    run()
    return ""


def timed_arms(
    arms: Sequence[TimedArm], session: Session, *, rounds: tuple[int, int],
    budget_s: float = BUDGET_S, attempt: Callable[[int, Callable[[], object]], str] = _attempt,
    stop_on_failure: bool = False, clear: Callable[[list[list[float]]], bool] = lambda _seconds: False,
) -> list[ArmTimes]:  # fmt: skip
    """Time all arms in alternating rounds after one warm-up round, every arm with the same random numbers. Changes
    nothing that it measures. Collective.

    Args:
        rounds: at least, and at most if those take less than `budget_s` seconds.
        attempt: is given an arm's index and runs it; returns why that failed on any worker, or "". A failed arm is not
            run again.
        stop_on_failure: with one failed arm the others are of no interest.
        clear: whether, after the least rounds and `CHEAP_S`, this worker's seconds by arm need no more of them. The
            rounds end once they need none on any worker.
    """
    workers, device = session.workers, session.device
    seconds: list[list[float]] = [[] for _ in arms]
    values: list[Sequence[float]] = [() for _ in arms]
    errors: dict[int, str] = {}

    def timed(index: int, *, counts: bool) -> None:
        arms[index].before()
        begin = seconds_of(device)
        arms[index].work()
        if counts:
            seconds[index].append(seconds_of(device) - begin)
        values[index] = arms[index].values()

    with preserve_model(session.trainable, device):
        generators, begin = rng_state(device), time.perf_counter()
        for number in range(rounds[1] + 1):
            for index in (one for one in range(len(arms)) if one not in errors):
                set_rng_state(generators, device)
                if reason := attempt(index, partial(timed, index, counts=number > 0)):
                    errors[index] = reason
                    del seconds[index][max(0, number - 1) :]  # another worker may have failed where this one did not
                    if stop_on_failure:
                        break
            least = number >= rounds[0]
            late = least and time.perf_counter() - begin > budget_s
            settled = least and sum(map(sum, seconds)) >= CHEAP_S and clear(seconds)
            some_late, all_settled = workers.all_reduce_ints([int(late), int(settled)])
            if (stop_on_failure and errors) or some_late or all_settled == workers.world_size:
                break
    shown = [tuple(values[index]) if index not in errors else () for index in range(len(arms))]
    everybody = workers.all_gather_object((seconds, shown))
    slowest = [tuple(map(max, zip(*(own[index] for own, _ in everybody), strict=True))) for index in range(len(arms))]
    return [ArmTimes(slowest[index], everybody[0][1][index], errors.get(index, "")) for index in range(len(arms))]
