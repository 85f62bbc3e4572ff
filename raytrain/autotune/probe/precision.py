"""The probe measures: the real model, the real batch, in the real worker; and leaves everything as it was.

Weights, optimizer state, generators, buffers and the order of the data are the same before and after (a test hashes
them): gradients are zeroed at the start of the next step, buffers and generators are put back here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from raytrain.autotune.probe.agreed import tried
from raytrain.autotune.probe.state_guard import untouched
from raytrain.autotune.search.precision import PrecisionTrial
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.precision.policy import PrecisionPolicy, policy_for
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch, Trainable

#: Rounds are taken in turn over the candidates until the time is up, at least `MIN_ROUNDS` of them.
BUDGET_S = 2.0
MIN_ROUNDS = 3
MAX_ROUNDS = 12


def compare_precisions(
    trainable: Trainable,
    micro: MicroBatch,
    *,
    candidates: list[str],
    gradients: GradientBuffers,
    workers: Workers,
    device: torch.device,
    budget_s: float = BUDGET_S,
) -> list[PrecisionTrial]:
    """Time forward and backward of one micro-batch in each precision, in alternating rounds on all workers.

    The first round of each candidate is its warm-up and is dropped. Every worker returns the same trials: the
    slowest worker's median, rank 0's loss and norm.
    """
    policies = [policy_for(name) for name in candidates]
    times: dict[str, list[float]] = {policy.name: [] for policy in policies}
    values: dict[str, tuple[float, float]] = {}
    errors: dict[str, str] = {}
    with untouched(trainable, device):
        begin = time.perf_counter()
        for round_number in range(MAX_ROUNDS + 1):
            for policy in policies:
                if policy.name in errors:
                    continue
                state, measured = rng_state(device), []
                work = partial(_measure, trainable, micro, policy, gradients, device, into=measured)
                outcome, reason = tried(work, workers=workers, device=device, remote=trainable.remote)
                set_rng_state(state, device)  # the same dropout for every arm
                if outcome != "ok":  # no memory, or an operation without a kernel in this dtype: that is a result
                    errors[policy.name] = reason
                    continue
                seconds, loss, norm = measured
                values[policy.name] = (loss, norm)
                if round_number:
                    times[policy.name].append(seconds)
            spent = time.perf_counter() - begin
            enough = round_number >= MIN_ROUNDS and spent > budget_s
            if workers.all_reduce_ints([int(enough)])[0]:
                break
    medians = [statistics.median(times[p.name]) if times[p.name] else float("inf") for p in policies]
    rows = workers.all_gather_floats([*medians, *(v for p in policies for v in values.get(p.name, (0.0, 0.0)))])
    count = len(policies)
    return [
        PrecisionTrial(
            precision=policy.name,
            seconds=max(row[index] for row in rows),
            loss=rows[0][count + 2 * index],
            grad_norm=rows[0][count + 2 * index + 1],
            error=errors.get(policy.name),
        )
        for index, policy in enumerate(policies)
    ]


def compare_inflight(
    step: TrainingStep,
    micro_batches: Callable[[], Iterable[MicroBatch]],
    *,
    passes: int,
    workers: Workers,
    device: torch.device,
    budget_s: float = BUDGET_S,
) -> tuple[dict[int, float], dict[int, str]]:
    """Time the passes of a step with one and with two micro-batches in flight, in alternating rounds on all workers.
    Where either fails nothing more is measured.

    Args:
        micro_batches: this worker's, gathered anew for each round, as in a step.
        passes: of the busiest worker.
    Returns:
        The slowest worker's median seconds by micro-batches in flight, and by that number why it failed; the same on
        every worker.
    """
    times: dict[int, list[float]] = {1: [], 2: []}
    before = step.inflight

    def timed(measured: list[float]) -> None:
        _synchronize(device)
        began = time.perf_counter()
        step.backward(micro_batches(), global_weight=1, passes=passes)
        _synchronize(device)
        measured.append(time.perf_counter() - began)

    failed: dict[int, str] = {}
    with untouched(step.trainable, device):
        generators = rng_state(device)
        begin = time.perf_counter()
        for round_number in range(MAX_ROUNDS + 1):
            for number, measured in times.items():
                step.inflight = number
                set_rng_state(generators, device)  # the same dropout for both
                outcome, reason = tried(
                    partial(timed, measured), workers=workers, device=device, remote=step.trainable.remote,
                    meets=step.meets,
                )  # fmt: skip
                if outcome != "ok":
                    failed[number] = reason
                    break
            enough = round_number >= MIN_ROUNDS and time.perf_counter() - begin > budget_s
            if failed or workers.all_reduce_ints([int(enough)])[0]:
                break
    step.inflight = before
    if failed:
        return {}, failed
    rows = workers.all_gather_floats([statistics.median(measured[1:]) for measured in times.values()])
    return {number: max(row[index] for row in rows) for index, number in enumerate(times)}, {}


def _measure(
    trainable: Trainable, micro: MicroBatch, policy: PrecisionPolicy, gradients: GradientBuffers, device: torch.device,
    *, into: list[float],
) -> None:  # fmt: skip
    """One pass: its seconds, loss and gradient norm."""
    gradients.zero_()
    _synchronize(device)
    begin = time.perf_counter()
    with policy.autocast(device):
        call: Callable[..., object] = trainable.loss
        extra = {"num_items_in_batch": micro.weight} if trainable.takes_global_count else {}
        output = call(trainable.module, micro.batch, **extra)
    loss: Tensor = output.loss if output.aux is None else output.loss + output.aux  # type: ignore[attr-defined]
    loss.backward()
    _synchronize(device)
    seconds = time.perf_counter() - begin
    into += [seconds, float(loss.detach()), float(gradients.sum_of_squares().sqrt())]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
