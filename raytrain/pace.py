"""How fast each worker is: all of them compute the same rows at the same time, for as long as the slowest needs for a
few passes. Changes nothing it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from raytrain.gradients import Workers
from raytrain.probe import untouched
from raytrain.shares import Pace
from raytrain.step import MicroBatch, TrainingStep

#: Seconds of timed passes for each size, at least; more where the slowest worker has not done `PASSES` by then.
TIMED_S = 0.5
PASSES = 4


def measure_paces(
    step: TrainingStep,
    micro_batch: Callable[[int], MicroBatch],
    *,
    sizes: Sequence[int],
    workers: Workers,
    device: torch.device,
) -> list[Pace]:
    """Seconds of a forward and backward pass on every worker, in the order of the ranks; collective.

    Nobody waits for anybody between passes: a worker that shares its processor is measured as it will be in training,
    while the others are busy too. Seconds are the time spent by the passes done in it, not a median: of a processor
    that comes and goes a median would see only the one or the other.

    Args:
        micro_batch: the same rows on every worker, so many of them.
        sizes: of a pass; only the first must fit.
    """
    found: dict[int, float] = {}
    with untouched(step.trainable, device):
        for size in sizes:
            seconds = _pass_s(step, micro_batch, size, workers, device, must_fit=size == sizes[0])
            found[size] = seconds
            if workers.sum_flags([int(seconds == float("inf"))])[0] == workers.world:
                break  # nobody has room for a larger one
    for size in sizes:
        found.setdefault(size, float("inf"))
    rows = workers.gather_floats([found[size] for size in sizes])
    kinds = [name.decode() for name in workers.gather_bytes(device_kind(device).encode())]
    return [Pace(kind, dict(zip(sizes, row, strict=True))) for kind, row in zip(kinds, rows, strict=True)]


def device_kind(device: torch.device) -> str:
    """The accelerator's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _pass_s(
    step: TrainingStep, micro_batch: Callable[[int], MicroBatch], size: int, workers: Workers, device: torch.device,
    *, must_fit: bool,
) -> float:  # fmt: skip
    """Mean seconds of this worker's passes of so many rows; infinite where there was no room."""

    def one_pass() -> float:
        micro = micro_batch(size)
        began = time.perf_counter()
        step.backward([MicroBatch(micro.batch, max(1, micro.weight))], global_weight=max(1, micro.weight))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    fits = True
    try:
        one_pass()  # kernels, allocator
        warm = one_pass()
    except torch.OutOfMemoryError:
        if must_fit:
            raise
        fits, warm = False, 0.0
        torch.cuda.empty_cache()
    span = max(TIMED_S, PASSES * max(row[0] for row in workers.gather_floats([warm])))
    if not fits:
        return float("inf")
    began, passes = time.perf_counter(), 0
    while passes == 0 or time.perf_counter() - began < span:
        one_pass()
        passes += 1
    return (time.perf_counter() - began) / passes
