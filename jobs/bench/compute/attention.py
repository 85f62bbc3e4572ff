"""Bench `attention`: time and memory of causal attention with a mask built per call, a cached mask, and no mask.

Variants of the same attention: explicit softmax attention with a mask (built in each call, or cached), torch's fused
attention with a mask (built, or cached) and with `is_causal`, which needs none. Sliding-window attention is timed too.
torch's profiler reports every allocation of a forward and backward pass; the peak is computed from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate
from jobs.bench.harness.options import BenchOptions

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain.models.attention import MaskCache

Attention = Callable[..., Any]
"""(queries, keys, values) -> outputs of attention."""
BUILT, KEPT = "written out, mask built", "written out, mask kept"
FUSED_BUILT, FUSED_KEPT, NONE = "fused, mask built", "fused, mask kept", "fused, no mask"
#: fp32 sums in a different order.
TOLERANCE = 1e-4
#: R2 from which bytes count as linear in the length.
STRAIGHT = 0.999
#: Commonly claimed gain of a forward pass from a mask cache, and its size.
PROMISED_GAIN, PROMISED_BYTES = 1.05, 2**20


class AttentionOptions(BenchOptions):
    """Causal attention with and without masks: time of each variant, and peak bytes by length."""

    MEASURES: ClassVar[str] = (
        "attention masks: built, cached or none (is_causal); a sliding window; peak memory by length"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 16, "heads": 2, "length": 32, "rows": 2, "lengths": [1024, 1280, 1536, 2048], "window": 8,
        "blocks": 3, "block_s": 0.0,
    }  # fmt: skip

    layers: Count = Field(4, description="attention layers of one timed forward pass")
    width: Count = Field(256, description="of a token")
    heads: Count = Field(4, description="of each layer")
    length: Count = Field(512, description="tokens of a row")
    rows: Count = Field(4, description="of a batch")
    window: Count = Field(64, description="tokens that a sliding window sees")
    lengths: list[Count] = Field(
        [1024, 1536, 2048, 3072, 4096],
        description="lengths of one row at which peak bytes are counted; torch's kernel uses other tiles below 1024",
    )
    block_s: float = Field(0.25, ge=0, description="seconds that one block should take")


def run(options: AttentionOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each variant; see `AttentionOptions`."""
    from jobs.bench.harness.sessions import restored_threads
    from raytrain.models.attention import MaskCache, windowed_attention

    found = BenchMeasurement("attention", quick, options.model_dump(), "seconds of one forward pass through the layers")
    with restored_threads(None if options.threads == "auto" else options.threads):
        cache = MaskCache()
        ways = _variants(cache)
        heads = _draw_heads(options, rows=options.rows, length=options.length)
        _gate(found, ways, heads)
        window: Attention = partial(windowed_attention, window=options.window, masks=MaskCache())
        _time(found, options, {**ways, "sliding window": window}, heads, say)
        _bytes(found, options, {BUILT: ways[BUILT], NONE: ways[NONE], "sliding window": window}, say)
    _claims(found, options, cache)
    return found


def _draw_heads(options: AttentionOptions, *, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    draw = torch.Generator().manual_seed(options.seed)
    shape = (rows, options.heads, length, options.width // options.heads)
    q, k, v = (torch.randn(shape, generator=draw).requires_grad_() for _ in range(3))
    return q, k, v


def _variants(cache: MaskCache) -> dict[str, Attention]:
    import torch
    import torch.nn.functional as F

    def kept(length: int) -> Tensor:
        return cache.get("causal", length, device=torch.device("cpu"), dtype=torch.bool, build=partial(_mask, length))

    def written(mask_of: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~mask_of(q.shape[2]), float("-inf")).softmax(-1) @ v

    def fused(mask_of: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(q.shape[2]))

    def maskless(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        BUILT: partial(written, _mask), KEPT: partial(written, kept),
        FUSED_BUILT: partial(fused, _mask), FUSED_KEPT: partial(fused, kept), NONE: maskless,
    }  # fmt: skip


def _mask(length: int) -> Tensor:
    import torch

    return torch.ones(length, length, dtype=torch.bool).tril()


def _gate(found: BenchMeasurement, ways: dict[str, Attention], heads: tuple[Tensor, Tensor, Tensor]) -> None:
    import torch

    with torch.no_grad():
        expected = ways[BUILT](*heads)
        for name, way in ways.items():
            worst = float((way(*heads) - expected).abs().max())
            found.gate(Check(f"{name}: the same outputs", worst <= TOLERANCE, f"largest difference {worst:.3g}"))


def _time(
    found: BenchMeasurement, options: AttentionOptions, ways: dict[str, Attention],
    heads: tuple[Tensor, Tensor, Tensor], say: Say,
) -> None:  # fmt: skip
    import torch

    def forward(way: Attention, times: int) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for _ in range(times * options.layers):
                way(*heads)
        return (time.perf_counter() - began) / times

    once = max(forward(way, 1) for way in ways.values())
    times = max(1, round(options.block_s / once))
    say(f"{len(ways)} variants of attention, {times} passes a block")
    found.arms = alternate({name: partial(forward, way, times) for name, way in ways.items()}, blocks=options.blocks)
    pairs = ((BUILT, KEPT), (FUSED_BUILT, FUSED_KEPT), (FUSED_KEPT, NONE), (BUILT, NONE), (NONE, "sliding window"))
    for of, to in pairs:
        found.compare(found.arms, of=of, to=to)


# -- bytes ----------------------------------------------------------------------------------------


def _bytes(found: BenchMeasurement, options: AttentionOptions, ways: dict[str, Attention], say: Say) -> None:
    say(f"bytes at lengths {', '.join(map(str, options.lengths))}")
    peaks = {
        name: [peak_bytes(way, _draw_heads(options, rows=1, length=length)) for length in options.lengths]
        for name, way in ways.items()
    }
    found.values["peak_bytes"] = {
        name: {"lengths": options.lengths, "bytes": values, **shape_of(options.lengths, values)}
        for name, values in peaks.items()
    }


def peak_bytes(way: Attention, heads: tuple[Tensor, Tensor, Tensor]) -> int:
    """The most bytes that a forward and backward pass allocates at a time, without its inputs."""
    import torch

    for tensor in heads:
        tensor.grad = torch.zeros_like(tensor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        way(*heads).sum().backward()
    found: Any = profile.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def shape_of(lengths: list[int], values: list[int]) -> dict[str, Any]:
    """How bytes grow with the length: the exponent of a power law, and R2 of a linear and of a quadratic fit."""
    n, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    power = float(np.polyfit(np.log(n), np.log(y), 1)[0]) if len(n) > 1 else math.nan
    spread = float(((y - y.mean()) ** 2).sum()) or 1.0
    fits = {}
    for name, columns in (("linear", [n, n**0]), ("quadratic", [n**2, n**0])):
        matrix = np.stack(columns, axis=1)
        rest = y - matrix @ np.linalg.lstsq(matrix, y, rcond=None)[0]
        fits[name] = 1 - float((rest**2).sum()) / spread
    return {"power": power, "r2": fits, "shape": max(fits, key=lambda name: fits[name])}


# -- what follows ---------------------------------------------------------------------------------


def _claims(found: BenchMeasurement, options: AttentionOptions, cache: MaskCache) -> None:
    from raytrain.models.attention import MaskCache

    ratios = {ratio.name: ratio for ratio in found.ratios}
    gain, fused = ratios[f"{BUILT} / {KEPT}"], ratios[f"{FUSED_BUILT} / {FUSED_KEPT}"]
    found.values["mask_cache"] = MaskCache.total([cache])
    found.claim(
        f"keeping masks saves at least {PROMISED_GAIN - 1:.0%} of the forward pass of attention",
        gain.low >= PROMISED_GAIN,
        f"written out {gain}, fused {fused.median:.3f}; of attention alone, of a whole model less",
    )
    none, kept = ratios[f"{BUILT} / {NONE}"], ratios[f"{FUSED_KEPT} / {NONE}"]
    found.claim(
        "no mask (is_causal) is faster than a kept one", kept.low > 1,
        f"{kept:.2f} against the fused variant with a kept mask, {none.median:.2f} against the written-out one",
    )  # fmt: skip
    one = _mask(options.length).nbytes
    found.claim(
        "the masks of typical lengths take less than 1 MB", one < PROMISED_BYTES,
        f"one mask of {options.length} tokens: {one} bytes; of 1024 exactly {1024 * 1024}, of n always n x n",
    )  # fmt: skip
    shapes = found.values["peak_bytes"]
    straight = shapes[NONE]["shape"] == "linear" and shapes[NONE]["r2"]["linear"] > STRAIGHT
    found.claim(
        "without a mask memory grows with the length, written out with its square",
        straight and shapes[BUILT]["shape"] == "quadratic",
        ", ".join(f"{name}: {row['shape']} (R2 {row['r2'][row['shape']]:.4f})" for name, row in shapes.items()),
    )
