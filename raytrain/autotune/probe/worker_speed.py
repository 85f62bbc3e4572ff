"""Measures how fast each worker is: all compute the same rows at the same time, for as long as the slowest one needs
for a few passes. Changes nothing that it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from raytrain.autotune.probe.state_guard import preserve_model
from raytrain.autotune.search.shares import WorkerSpeed
from raytrain.train.device import device_name
from raytrain.train.memory.device import PeakMeter, exact_memory, is_out_of_memory
from raytrain.train.memory.oom import let_go
from raytrain.train.parallel.collectives import Workers
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch

#: Least seconds of timed passes for each size; more if the slowest worker needs them for `PASSES` passes.
TIMED_S = 1.0
PASSES = 4


def measure_worker_speeds(
    step: TrainingStep,
    micro_batch: Callable[[int], MicroBatch],
    *,
    sizes: Sequence[int],
    workers: Workers,
    device: torch.device,
    room: int | None = None,
) -> list[WorkerSpeed]:
    """Seconds of a forward and backward pass on every worker, in the order of the ranks; collective.

    The workers do not wait for each other between passes: one that shares its processor is measured as it will be in
    training, while the others compute too. The result is the mean, total time divided by passes: on a processor that is
    available only part of the time a median would show just one of its two speeds.

    Args:
        micro_batch: returns a micro-batch of the given number of rows, the same on every worker.
        sizes: rows of a pass; only the first must fit.
        room: bytes that passes of the other sizes may use on this worker's device; None = as many as it allocates.
    """
    pass_s: dict[int, float] = {}
    with preserve_model(step.trainable, device):
        for size in sizes:
            fits = size == sizes[0] or _fits(step, micro_batch(size), device, room)
            seconds = _pass_s(step, micro_batch(size), workers, device, fits=fits)
            pass_s[size] = seconds
            if workers.all_reduce_ints([int(seconds == float("inf"))])[0] == workers.world_size:
                break  # a larger size fits on no worker
    for size in sizes:
        pass_s.setdefault(size, float("inf"))
    rows = workers.all_gather_floats([pass_s[size] for size in sizes])
    kinds = workers.all_gather_object(device_name(device))
    return [WorkerSpeed(kind, dict(zip(sizes, row, strict=True))) for kind, row in zip(kinds, rows, strict=True)]


def _fits(step: TrainingStep, micro: MicroBatch, device: torch.device, room: int | None) -> bool:
    """Whether a pass stays within `room`."""
    with exact_memory(device):
        meter = PeakMeter(device)
        try:
            _one_pass(step, micro, device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, device=device, budget=room):
                raise
            let_go(error, device)
            return False
        return room is None or meter.peak() <= room


def _one_pass(step: TrainingStep, micro: MicroBatch, device: torch.device) -> float:
    began, weight = time.perf_counter(), max(1, micro.weight)
    step.backward([MicroBatch(micro.batch, weight)], global_weight=weight)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _pass_s(step: TrainingStep, micro: MicroBatch, workers: Workers, device: torch.device, *, fits: bool) -> float:
    """Mean seconds of this worker's passes; infinite if the rows do not fit, while other workers are measured."""
    warm = 0.0
    for _ in range(2 if fits else 0):  # kernels and the allocator first
        warm = _one_pass(step, micro, device)
    span = max(TIMED_S, PASSES * max(row[0] for row in workers.all_gather_floats([warm])))
    if not fits:
        return float("inf")
    began, passes = time.perf_counter(), 0
    while passes == 0 or time.perf_counter() - began < span:
        _one_pass(step, micro, device)
        passes += 1
    return (time.perf_counter() - began) / passes
