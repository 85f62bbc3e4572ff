"""How many processes of a worker read its data: micro-batches per second by the number of processes.

The run's loader, opened once for each number, feeds the real step. More processes help until the model no longer waits
for data; then they only occupy cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raytrain.accelerator import seconds_of
from raytrain.autotune.measurement import Candidate, LoaderRate, LoaderRates
from raytrain.autotune.size_curve import NEAR
from raytrain.autotune.state_guard import preserve_model, preserve_skipped
from raytrain.autotune.step_probe import StepProbe, computing_as
from raytrain.plan.choice import Resolved
from raytrain.train.loader import BatchLoader
from raytrain.train.session import Session

#: Least seconds of timed batches for each count, with at least `LEAST` batches and `ROUNDS` for each batch read ahead.
#: With a dataset too slow for that, `ROUNDS` batches for each process are enough after `MOST_S` seconds.
TIMED_S, ROUNDS, LEAST = 1.0, 2, 4
MOST_S = 10.0


def next_count(measured: Sequence[LoaderRate], *, most: int) -> int | None:
    """How many processes to measure next: 0, then doubled until two in succession bring nothing; None at the end."""
    if not measured:
        return 0
    rates, last = [one.per_s for one in measured], measured[-1].count
    stuck = len(rates) > 2 and max(rates[-2:]) <= (1 + NEAR) * max(rates[:-2])
    return None if stuck or last >= most else min(most, max(1, 2 * last))


def choose_count(found: LoaderRates) -> Resolved:
    """The smallest count within `NEAR` of the best rate, with its reason."""
    rates = {one.count: one.per_s for one in found.rates}
    best = max(rates, key=lambda one: rates[one])
    count = min(one for one, rate in rates.items() if rate >= (1 - NEAR) * rates[best])
    reason = f"{rates[count]:.3g} batches/s of {found.candidate.micro_batch_size} rows"
    if count != best:
        reason += f", within {NEAR:.0%} of the best"
    others = ", ".join(f"{one}: {rates[one]:.3g}" for one in sorted(rates) if one != count)
    return Resolved(count, f"{reason}; {others} (0 to {found.most} processes, measured with the model)")


def measure_loaders(probe: StepProbe, candidate: Candidate, *, most: int, passes: int) -> LoaderRates:
    """Batches per second of one worker with the counts that `next_count` asks for. Changes nothing that it measures.

    Args:
        probe: of a session with one worker, whose rows are streamed from a dataset that is read item by item.
        most: processes.
        passes: micro-batches of a step, after which there is an update.
    """
    session, rates = probe.session, list[LoaderRate]()
    while (count := next_count(rates, most=most)) is not None:
        with (
            computing_as(session, candidate),
            preserve_model(session.trainable, session.device),
            preserve_skipped(session.step.optimizers),
        ):
            loader = _loader(session, candidate.micro_batch_size, count)
            try:
                rates.append(_rate(probe, loader, count, passes))
            finally:
                loader.close()
    return LoaderRates(candidate, most, tuple(rates))


def _loader(session: Session, rows: int, count: int) -> BatchLoader:
    """The run's loader with `count` processes, and global batches of one micro-batch."""
    choices = {"global_batch_size": rows, "loader_workers": count}
    planned = {name: Resolved(value, "measured") for name, value in choices.items()}
    job = replace(session.job, plan=replace(session.job.plan, **planned))
    settings = replace(session.settings, micro_batch=rows)
    return BatchLoader.open(job, settings, session.source, workers=session.workers, device=session.device,
                     weight=session.trainable.weight, dtype=session.policy.master_dtype)  # fmt: skip


def _rate(probe: StepProbe, loader: BatchLoader, count: int, passes: int) -> LoaderRate:
    ahead = 0 if loader.pool is None else loader.pool.depth
    batches = _computed(probe, loader, passes)
    for _ in range(max(1, ahead)):
        next(batches)
    began, read, seconds = seconds_of(probe.device), 0, 0.0
    while True:
        for _ in range(max(1, count)):  # full rounds: all processes deliver at about the same time
            read += next(batches)
        seconds = seconds_of(probe.device) - began
        enough = read >= max(LEAST, ROUNDS * ahead) and seconds >= TIMED_S
        if enough or (seconds >= MOST_S and read >= ROUNDS * max(1, count)):
            return LoaderRate(count, read, seconds)


def _computed(probe: StepProbe, loader: BatchLoader, passes: int) -> Iterator[int]:
    """Compute global batches without end; yields the number of micro-batches of each."""
    cursor, done = probe.session.state.cursor, 0
    while True:
        indices, cursor = loader.global_batch(cursor)
        count = loader.passes(indices)
        probe.step.backward(loader.micro_batches(indices), global_weight=len(indices), passes=count)
        done += count
        if done >= passes:
            probe.update()
            done = 0
        yield count
