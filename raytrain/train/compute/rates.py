"""Measures rates of a device: matrix products by number format, and memory.

Each figure is the best of a few repetitions, since other processes can only make a repetition slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cluster.devices.limits import cpu_description
from raytrain.accelerator import gpu_module, on_gpu, synchronize
from raytrain.train.precision import policy_for

ROWS = 1024
"""Rows of a measured matrix product: tokens of a small micro-batch."""

MAPS = 2
"""Linear maps of a measured network."""

REPEATS = 3
POINT_S = 0.025
"""After this many seconds, no more than `REPEATS` repetitions of one measurement are made."""

STREAM_BYTES = 32 << 20
"""Size of the tensors for the memory rate: larger than a CPU's caches."""


def product_flops(
    device: torch.device, dtype: str, *, width: int = 512, rows: int = ROWS, budget_s: float = POINT_S
) -> float:
    """FLOPs per second of the matrix products of training in this process, in a `precision.dtype`, with torch's current
    number of threads; after `budget_s` seconds no more than `REPEATS` repetitions are made.

    Measured on forward and backward of linear maps with master weights, (rows, width) by (width, width), as a step
    computes them: with the casts, copies and transposed operands that a product alone does not have.
    """
    policy = policy_for(dtype)
    like: dict[str, Any] = {"dtype": policy.master_dtype, "device": device}
    weights = [torch.full((width, width), 1.0 / width, requires_grad=True, **like) for _ in range(MAPS)]
    start = torch.ones(rows, width, requires_grad=True, **like)
    before = torch.get_float32_matmul_precision()

    def train() -> None:
        value = start
        with policy.autocast(device):
            for weight in weights:
                value = F.linear(value, weight)
        value.backward(value.detach())

    torch.set_float32_matmul_precision(policy.matmul)
    try:
        spent = _best(train, device, budget_s=budget_s)
    finally:
        torch.set_float32_matmul_precision(before)
    return 6.0 * MAPS * rows * width * width / spent


def memory_rate(device: torch.device) -> float:
    """Bytes per second of an operation on tensors that no cache holds, such as the update of an optimizer."""
    source = torch.ones(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2.0 * STREAM_BYTES / _best(lambda: torch.add(source, 1.0, out=target), device, budget_s=POINT_S)


def formats_of(device: torch.device) -> Sequence[str]:
    """Number formats worth measuring on a device, those that jobs use most first."""
    if on_gpu(device):
        major, _ = gpu_module(device).get_device_capability(device)
        return ("bf16", "fp16", "tf32", "fp32", "fp64") if major >= 8 else ("fp16", "fp32", "fp64")
    return ("fp32", "bf16", "fp64") if any(cpu_description()[1].values()) else ("fp32", "fp64")


def _best(work: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """Seconds of the fastest of a few repetitions, after one that is not counted."""
    work()
    synchronize(device)
    best, until = float("inf"), time.perf_counter() + budget_s
    for repeat in range(64):
        began = time.perf_counter()
        if began > until and (repeat >= REPEATS or best > budget_s):
            break
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
