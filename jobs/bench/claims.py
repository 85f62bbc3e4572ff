"""Bench `claims`: common claims about masks, memory, precision, compilation and data, measured on this machine.

Each part is a few arms that compute the same thing, in alternating blocks; on a machine with a GPU they run on it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from cluster.config import Count
from jobs.bench.claims_attention import measure_attention
from jobs.bench.claims_data import measure_habits, measure_loader, measure_pinned, measure_resident
from jobs.bench.claims_steps import measure_compiled, measure_memory, measure_precision
from jobs.bench.harness.measuring import BenchMeasurement
from jobs.bench.harness.options import TextOptions, key
from jobs.bench.harness.sessions import restored_threads
from raytrain.errors import InputError

Part = Literal["attention", "memory", "precision", "compile", "data", "habits", "loader", "pinned"]
Mode = Literal["default", "reduce-overhead", "max-autotune"]
MEASURES: dict[Part, Any] = {
    "attention": measure_attention, "memory": measure_memory, "precision": measure_precision,
    "compile": measure_compiled, "data": measure_resident, "habits": measure_habits, "loader": measure_loader,
    "pinned": measure_pinned,
}  # fmt: skip


class ClaimsOptions(TextOptions):
    parts: list[Part] = key(list(MEASURES), "what to measure")
    blocks: Count = key(15, "repetitions that are kept; each runs one block of every arm", quick=3)
    repeats: Count = key(3, "the same where a block is a process, or whole epochs", quick=1)
    block_s: float = key(0.25, "seconds that one block should take", quick=0.0, ge=0)
    block_steps: Count = key(20, "steps of the GPT in a block; those of habits", quick=1)
    wide: Count = key(256, "width of the GPT whose memory is measured, and of attention", quick=64)
    long: Count = key(128, "tokens of that GPT's window", quick=32)
    rows: Count = key(64, "rows of its step; must be divisible by `accumulation`", quick=16)
    accumulation: Count = key(4, "micro-batches of a step with less memory")
    widths: list[Count] = key([256, 512, 1024, 2048], "of the three hidden layers of a perceptron", quick=[16, 32])
    mlp_batch: Count = key(256, "rows of a step of the perceptron", quick=8)
    modes: list[Mode] = key(list(get_args(Mode)), "of torch.compile")
    length: Count = key(512, "tokens of a row of timed attention", quick=32)
    lengths: list[Count] = key(
        [1024, 1536, 2048, 3072, 4096],
        "of a row whose peak bytes are counted; torch's kernel uses other tiles below 1024",
        quick=[1024, 1280, 1536, 2048],
    )
    annotations: Count = key(2048, "rows of the dataset of JSON text", quick=64)
    values: Count = key(2048, "features of a row", quick=64)
    data_batch: Count = key(128, "rows of a step on them", quick=16)
    epochs: Count = key(5, "of each arm", quick=3)
    load_batches: Count = key(24, "steps of a block with and without a loader process", quick=4)


def run(options: ClaimsOptions, found: BenchMeasurement) -> None:
    if options.rows % options.accumulation:
        raise InputError("rows", got=str(options.rows), expected=f"a multiple of accumulation {options.accumulation}")
    found.block = "seconds of a step, a pass or a block, by part"
    with restored_threads(options.thread_count):
        for part in options.parts:
            found.say(part)
            MEASURES[part](options, found)
