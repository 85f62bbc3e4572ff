"""`scale.shares: auto`: the shares of a global batch that follow from every worker's measured speed, so that the
slowest finishes as early as possible."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raytrain.accelerator import seconds_of
from raytrain.autotune.state_guard import preserve_model
from raytrain.plan.choice import Resolved
from raytrain.plan.shares import Shares, gain_over_equal
from raytrain.train.session import Session
from raytrain.trainable import MicroBatch

#: Shares that save less than this fraction of a step stay equal: they would follow noise.
WORTHWHILE = 0.05
#: Least seconds of timed passes; more if the slowest worker needs them for `PASSES` passes.
TIMED_S, PASSES = 1.0, 4


def choose_shares(pass_s: Sequence[float], *, total: int, micro_batch: int) -> Resolved:
    """The shares of a global batch of `total` rows for workers with these seconds for a pass, by rank.

    Returns:
        `Shares.to_json()`, or "equal" where unequal shares would save less than `WORTHWHILE`.
    """
    seconds = tuple(pass_s)
    chosen = Shares(micro_batch, (micro_batch,) * len(seconds), seconds)
    gain = gain_over_equal(chosen, total=total, plain_s=seconds)
    ratio_text = f"the slowest worker needs {max(seconds) / min(seconds):.2f} times as long for a row as the fastest"
    if gain < 1 + WORTHWHILE:
        saved = max(0.0, 1 - 1 / gain)
        return Resolved("equal", f"{ratio_text}: unequal shares of {total} rows would save {saved:.0%}")
    rows = [len(span) for span in chosen.spans(total, micro_batch=micro_batch)]
    each = f"ranks 0-{len(rows) - 1}: {', '.join(map(str, rows))} rows"
    return Resolved(chosen.to_json(), f"{ratio_text}; {each}: {gain:.2f} times as fast as equal shares")


def measure_shares(session: Session) -> tuple[Resolved, list[float]]:
    """Shares by measured speed, from the first rows of the epoch, and each worker's seconds for a pass; the same on
    every worker. Changes nothing that it measures. Collective.

    All workers compute the same rows at the same time, without waiting for each other between passes: one that shares
    its processor is measured as it will be in training. Their speed is the mean, total time divided by passes: on a
    processor that is available only part of the time a median would show just one of its two speeds.
    """
    batches, workers, device = session.loader.batches, session.workers, session.device
    rows = batches.split.order(batches.seed, session.state.cursor.epoch)[: batches.micro_batch]
    micro = session.loader.one(rows)

    def one_pass() -> float:
        began, weight = seconds_of(device), max(1, micro.weight)
        session.step.backward([MicroBatch(micro.batch, weight)], global_weight=weight)
        return seconds_of(device) - began

    with preserve_model(session.trainable, device):
        one_pass()  # kernels and the allocator first
        span = max(TIMED_S, PASSES * max(row[0] for row in workers.all_gather_floats([one_pass()])))
        began, passes = time.perf_counter(), 0
        while passes == 0 or time.perf_counter() - began < span:
            one_pass()
            passes += 1
        seconds = (time.perf_counter() - began) / passes
    pass_s = [row[0] for row in workers.all_gather_floats([seconds])]
    return choose_shares(pass_s, total=batches.global_batch_size, micro_batch=batches.micro_batch), pass_s
