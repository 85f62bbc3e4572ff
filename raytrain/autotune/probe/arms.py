"""Times ways to compute the same thing against each other on the real model: an A/B test over alternating rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raytrain.autotune.probe.agreed import run_agreed
from raytrain.autotune.probe.state_guard import preserve_model
from raytrain.train.device import rng_state, seconds_of, set_rng_state
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.trainable import Trainable

#: Rounds continue until this much time has passed, within the bounds that a caller gives.
BUDGET_S = 2.0
#: Until the rounds have taken so long, a clear result is no reason to stop: a few of milliseconds may all fall into one
#: burst of other work, and every look at the times is one more chance to be misled.
CHEAP_S = 0.25


def _nothing() -> None:
    """The default of what an arm does before its clock starts."""


@dataclass(frozen=True)
class TimedArm:
    """One way to compute.

    Attributes:
        work: what is timed.
        before: runs before the clock starts.
        values: reads what was computed, after the clock has stopped.
    """

    work: Callable[[], object]
    before: Callable[[], object] = _nothing
    values: Callable[[], Sequence[float]] = tuple


@dataclass(frozen=True)
class ArmTimes:
    """What one arm showed, the same on every worker.

    Attributes:
        seconds: for each worker those of every timed round.
        values: rank 0's, of the last round.
        error: why the arm failed, or "".
    """

    seconds: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    error: str

    @property
    def median_s(self) -> float:
        """The largest of the workers' medians; infinite if nothing was timed."""
        return max(statistics.median(own) if own else float("inf") for own in self.seconds)

    @property
    def round_s(self) -> list[float]:
        """The slowest worker's seconds of each round."""
        return [max(round_s) for round_s in zip(*self.seconds, strict=True)]


def run_unguarded(work: Callable[[], object]) -> str:
    """An `attempt` whose failures are raised."""
    work()
    return ""


def timed_arms(
    arms: Sequence[TimedArm],
    *,
    trainable: Trainable,
    workers: Workers,
    device: torch.device,
    min_rounds: int,
    max_rounds: int,
    budget_s: float = BUDGET_S,
    attempt: Callable[[Callable[[], object]], str] = run_unguarded,
    stop_on_failure: bool = False,
    decided: Callable[[list[list[float]]], bool] = lambda _seconds: False,
    clear: Callable[[list[list[float]]], bool] = lambda _seconds: False,
) -> list[ArmTimes]:
    """Time all arms in alternating rounds after one warm-up round, every arm with the same random numbers. Changes
    nothing that it measures. Collective.

    Args:
        attempt: runs an arm, and returns why that failed on any worker, or "". A failed arm is not run again.
        stop_on_failure: with one failed arm the others are of no interest.
        decided: whether this worker's seconds by arm need no `min_rounds`.
        clear: whether, after `min_rounds` and `CHEAP_S`, this worker's seconds by arm need no more of the budget. The
            rounds end once they need none on any worker.
    """
    seconds: list[list[float]] = [[] for _ in arms]
    values: list[Sequence[float]] = [() for _ in arms]
    errors: dict[int, str] = {}
    with preserve_model(trainable, device):
        generators, begin = rng_state(device), time.perf_counter()
        for round_number in range(max_rounds + 1):
            for index, arm in enumerate(arms):
                if index in errors:
                    continue
                set_rng_state(generators, device)
                one = _Run(arm, device)
                if reason := attempt(one.run):
                    errors[index] = reason
                    if stop_on_failure:
                        break
                    continue
                values[index] = one.values
                if round_number:
                    seconds[index].append(one.seconds)
            enough = round_number >= min_rounds or decided(seconds)
            enough = enough and time.perf_counter() - begin > budget_s
            cheap = sum(map(sum, seconds)) < CHEAP_S
            settled = round_number >= min_rounds and not cheap and clear(seconds)
            some, all_of = workers.all_reduce_ints([int(enough), int(settled)])
            if (stop_on_failure and errors) or some or all_of == workers.world_size:
                break
    return _gathered(seconds, values, errors, workers)


def timed_passes(
    session: Session, befores: Sequence[Callable[[], object]], *, most: int, rounds: tuple[int, int]
) -> tuple[list[ArmTimes], float]:
    """Time the first `most` micro-batches of each worker after each of `befores` in turn, at least and at most so many
    rounds, until one fails. Changes nothing that it measures. Collective.

    Returns:
        The times, with the value 1 where nothing told what a loss is a mean over; how many times as much a step does.
    """
    loader, step, workers, device = session.loader, session.step, session.workers, session.device
    indices, untold = loader.global_batch(session.state.cursor).indices, step.untold
    rows = indices[: most * loader.batches.micro_batch * workers.world_size]
    passes, remote = loader.passes(rows), session.trainable.remote

    def work() -> None:
        step.untold = False
        step.backward(loader.micro_batches(rows), global_weight=1, passes=passes)

    def attempt(work: Callable[[], object]) -> str:
        collective = step.collective_passes
        return run_agreed(work, workers=workers, device=device, remote=remote, collective_passes=collective)[1]

    times = timed_arms(
        [TimedArm(work, before=before, values=lambda: [float(step.untold)]) for before in befores],
        trainable=session.trainable, workers=workers, device=device, min_rounds=rounds[0], max_rounds=rounds[1],
        attempt=attempt, stop_on_failure=True,
    )  # fmt: skip
    step.untold = untold
    return times, loader.passes(indices) / passes


class _Run:
    """One run of an arm."""

    def __init__(self, arm: TimedArm, device: torch.device) -> None:
        self._arm, self._device = arm, device
        self.seconds = 0.0
        self.values: Sequence[float] = ()

    def run(self) -> None:
        self._arm.before()
        begin = seconds_of(self._device)
        self._arm.work()
        self.seconds = seconds_of(self._device) - begin
        self.values = self._arm.values()


def _gathered(
    seconds: list[list[float]], values: list[Sequence[float]], errors: dict[int, str], workers: Workers
) -> list[ArmTimes]:
    own = [*(one for arm in seconds for one in arm), *(one for arm in values for one in arm)]
    rows = [iter(row) for row in workers.all_gather_floats(own)]
    times = [tuple(tuple(next(row) for _ in arm) for row in rows) for arm in seconds]
    first = [tuple(next(rows[0]) for _ in arm) for arm in values]
    return [ArmTimes(times[index], first[index], errors.get(index, "")) for index in range(len(seconds))]
