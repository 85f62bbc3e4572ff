"""The part of bench `claims` about causal attention: a mask built in each call, a kept one, and none.

The variants are explicit softmax attention and torch's fused attention, each with a mask, and the fused one with
`is_causal`, which needs none. torch's profiler reports every allocation of a forward and backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.harness.measuring import BenchMeasurement, Check
from jobs.bench.harness.sessions import DEVICE, synchronize, timed
from raytrain.models.attention import MaskCache, windowed_attention

Attention = Callable[..., Any]
"""(queries, keys, values) -> outputs of attention."""
BUILT, KEPT = "written out, mask built", "written out, mask kept"
FUSED_BUILT, FUSED_KEPT, NONE = "fused, mask built", "fused, mask kept", "fused, no mask"
WINDOW = "sliding window"
#: fp32 sums in a different order.
TOLERANCE = 1e-4
#: R2 from which bytes count as linear in the length.
STRAIGHT = 0.999
#: Commonly claimed gain of a forward pass from a mask cache, and its size.
PROMISED_GAIN, PROMISED_BYTES = 1.05, 2**20


def measure_attention(options: Any, found: BenchMeasurement) -> None:
    """Time the variants, count the bytes by length, judge the claims."""
    cache = MaskCache()
    ways = _variants(cache)
    heads = _draw_heads(options, rows=4, length=options.length)
    with torch.no_grad():
        expected = ways[BUILT](*heads)
        for name, way in ways.items():
            worst = float((way(*heads) - expected).abs().max())
            found.gate(Check(f"{name}: the same outputs", worst <= TOLERANCE, f"largest difference {worst:.3g}"))
        ways[WINDOW] = partial(windowed_attention, window=64, masks=MaskCache())

        def forward(way: Attention, times: int = 1) -> float:
            return timed(lambda: [way(*heads) for _ in range(times * options.layers)]) / times

        times = max(1, round(options.block_s / max(map(forward, ways.values()))))
        arms = {name: partial(forward, way, times) for name, way in ways.items()}
        seconds = found.alternate(arms, blocks=options.blocks)
    pairs = ((BUILT, KEPT), (FUSED_BUILT, FUSED_KEPT), (FUSED_KEPT, NONE), (BUILT, NONE), (NONE, WINDOW))
    gain, fused, kept, none, _ = (found.compare(seconds, of=of, to=to) for of, to in pairs)
    found.values["mask_cache"] = MaskCache.total([cache])
    found.claim(
        f"keeping masks saves at least {PROMISED_GAIN - 1:.0%} of the forward pass of attention",
        gain.low >= PROMISED_GAIN,
        f"written out {gain}, fused {fused.median:.3f}; of attention alone, of a whole model less",
    )
    found.claim(
        "no mask (is_causal) is faster than a kept one", kept.low > 1,
        f"{kept:.2f} against the fused variant with a kept mask, {none.median:.2f} against the written-out one",
    )  # fmt: skip
    one = _mask(options.length).nbytes
    found.claim(
        "the masks of typical lengths take less than 1 MB", one < PROMISED_BYTES,
        f"one mask of {options.length} tokens: {one} bytes; of 1024 exactly {1024 * 1024}, of n always n x n",
    )  # fmt: skip
    found.say(f"bytes at lengths {', '.join(map(str, options.lengths))}")
    shapes: dict[str, dict[str, Any]] = {}
    for name in (BUILT, NONE, WINDOW):
        peaks = [_peak_bytes(ways[name], _draw_heads(options, rows=1, length=length)) for length in options.lengths]
        shapes[name] = {"lengths": options.lengths, "bytes": peaks, **shape_of(options.lengths, peaks)}
    found.values["peak_bytes_by_length"] = shapes
    straight = shapes[NONE]["shape"] == "linear" and shapes[NONE]["r2"]["linear"] > STRAIGHT
    found.claim(
        "without a mask memory grows with the length, written out with its square",
        straight and shapes[BUILT]["shape"] == "quadratic",
        ", ".join(f"{name}: {row['shape']} (R2 {row['r2'][row['shape']]:.4f})" for name, row in shapes.items()),
    )


def _draw_heads(options: Any, *, rows: int, length: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(options.seed)
    shape = (rows, options.heads, length, options.wide // options.heads)
    return [torch.randn(shape, generator=draw).to(DEVICE).requires_grad_() for _ in range(3)]


def _mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()


def _variants(cache: MaskCache) -> dict[str, Attention]:
    def kept(length: int) -> Tensor:
        return cache.get("causal", length, device=DEVICE, dtype=torch.bool, build=partial(_mask, length))

    def written(mask_of: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~mask_of(q.shape[2]), float("-inf")).softmax(-1) @ v

    def fused(mask_of: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(q.shape[2]))

    return {
        BUILT: partial(written, _mask), KEPT: partial(written, kept), FUSED_BUILT: partial(fused, _mask),
        FUSED_KEPT: partial(fused, kept), NONE: partial(F.scaled_dot_product_attention, is_causal=True),
    }  # fmt: skip


def _peak_bytes(way: Attention, heads: list[Tensor]) -> int:
    """The most bytes that a forward and backward pass allocates at a time, without its inputs."""
    for tensor in heads:
        tensor.grad = torch.zeros_like(tensor)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        way(*heads).sum().backward()
        synchronize()
    made: Any = profile.profiler
    events = [event for event in made.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def shape_of(lengths: list[int], values: list[int]) -> dict[str, Any]:
    """Whether bytes grow with the length or with its square: R2 of a linear and of a quadratic fit."""
    n = np.asarray(lengths, dtype=np.float64)
    fits = {
        name: float(np.corrcoef(n**power, values)[0, 1] ** 2) for power, name in enumerate(("linear", "quadratic"), 1)
    }
    return {"r2": fits, "shape": max(fits, key=lambda name: fits[name])}
