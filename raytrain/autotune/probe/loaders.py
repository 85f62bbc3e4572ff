"""Measures micro-batches per second by the number of processes that read the data: the run's loader, opened once for
each number, feeds the real step. Changes nothing that it measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raytrain.autotune.probe.state_guard import preserve_model, preserve_skipped
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.loaders import LoaderRate, LoaderRates, next_count
from raytrain.autotune.search.measurement import Candidate
from raytrain.plan.choice import Resolved
from raytrain.train.device import seconds_of
from raytrain.train.loader import BatchLoader
from raytrain.train.session import Session

#: Least seconds of timed batches for each count, with at least `LEAST` batches and `ROUNDS` for each batch read ahead.
#: With a dataset too slow for that, `ROUNDS` batches for each process are enough after `MOST_S` seconds.
TIMED_S, ROUNDS, LEAST = 1.0, 2, 4
MOST_S = 10.0


def measure_loaders(probe: StepProbe, candidate: Candidate, *, most: int, passes: int) -> LoaderRates:
    """Batches per second of one worker with the counts that `next_count` asks for.

    Args:
        probe: of a session with one worker, whose rows are streamed from a dataset that is read item by item.
        most: processes.
        passes: micro-batches of a step, after which there is an update.
    """
    rates: list[LoaderRate] = []
    while (count := next_count(rates, most=most)) is not None:
        rates.append(_rate(probe, candidate, count, passes))
    return LoaderRates(candidate, most, tuple(rates))


def _rate(probe: StepProbe, candidate: Candidate, count: int, passes: int) -> LoaderRate:
    session, step, trainable = probe.session, probe.step, probe.session.trainable
    with (
        probe.computing_as(candidate),
        preserve_model(trainable, session.device),
        preserve_skipped(step.optimizers),
    ):
        loader = _loader(session, candidate.micro_batch_size, count)
        try:
            ahead = 0 if loader.pool is None else loader.pool.depth
            batches = _computed(probe, loader, passes)
            for _ in range(max(1, ahead)):
                next(batches)
            began, count_read, seconds = seconds_of(session.device), 0, 0.0
            while not _enough(count_read, seconds, count=count, ahead=ahead):
                for _ in range(max(1, count)):  # full rounds: all processes deliver at about the same time
                    count_read += next(batches)
                seconds = seconds_of(session.device) - began
        finally:
            loader.close()
    return LoaderRate(count, count_read, seconds)


def _loader(session: Session, rows: int, count: int) -> BatchLoader:
    """The run's loader with `count` processes, and global batches of one micro-batch."""
    choices = {"global_batch_size": rows, "loader_workers": count}
    planned = {name: Resolved(value, "measured") for name, value in choices.items()}
    job = replace(session.job, plan=replace(session.job.plan, **planned))
    settings = replace(session.settings, micro_batch=rows)
    return BatchLoader.open(job, settings, session.source, workers=session.workers, device=session.device,
                     weight=session.trainable.weight, dtype=session.policy.master_dtype)  # fmt: skip


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


def _enough(count_read: int, seconds: float, *, count: int, ahead: int) -> bool:
    whole = count_read >= max(LEAST, ROUNDS * ahead) and seconds >= TIMED_S
    return whole or (seconds >= MOST_S and count_read >= ROUNDS * max(1, count))
