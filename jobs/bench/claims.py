"""Bench `claims`: common claims about masks, memory, precision, compilation and data, measured on this machine.

Each part is a few arms that compute the same thing, in alternating blocks; on a machine with a GPU they run on it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count
from jobs.bench.claims_attention import measure_attention
from jobs.bench.claims_data import measure_habits, measure_loader, measure_pinned, measure_resident
from jobs.bench.claims_steps import measure_compiled, measure_memory, measure_precision
from jobs.bench.harness.measuring import BenchMeasurement
from jobs.bench.harness.options import GptOptions
from jobs.bench.harness.sessions import restored_threads
from raytrain.errors import InputError

Part = Literal["attention", "memory", "precision", "compile", "data", "habits", "loader", "pinned"]
MEASURES: dict[Part, Any] = {
    "attention": measure_attention, "memory": measure_memory, "precision": measure_precision,
    "compile": measure_compiled, "data": measure_resident, "habits": measure_habits, "loader": measure_loader,
    "pinned": measure_pinned,
}  # fmt: skip


class ClaimsOptions(GptOptions):
    """Options of bench `claims`."""

    QUICK: ClassVar[dict[str, Any]] = {
        "blocks": 3, "repeats": 1, "block_s": 0.0, "layers": 1, "heads": 2, "width": 16, "context": 8, "batch": 4,
        "block_steps": 1, "wide": 64, "long": 32, "rows": 16, "widths": [16, 32], "compare_width": 32, "mlp_batch": 8,
        "length": 32, "lengths": [1024, 1280, 1536, 2048], "annotations": 64, "values": 64,
        "data_batch": 16, "epochs": 3, "load_batches": 4,
    }  # fmt: skip

    parts: list[Part] = Field(list(MEASURES), description="what to measure")
    blocks: Count = Field(15, description="repetitions that are kept; each runs one block of every arm")
    repeats: Count = Field(3, description="the same where a block is a process, or whole epochs")
    block_s: float = Field(0.25, ge=0, description="seconds that one block should take")
    block_steps: Count = Field(20, description="steps of the GPT in a block; those of habits")
    wide: Count = Field(256, description="width of the GPT whose memory is measured, and of attention")
    long: Count = Field(128, description="tokens of that GPT's window")
    rows: Count = Field(64, description="rows of its step; must be divisible by `accumulation`")
    accumulation: Count = Field(4, description="micro-batches of a step with less memory")
    widths: list[Count] = Field([256, 512, 1024, 2048], description="of the three hidden layers of a perceptron")
    compare_width: Count = Field(512, description="width at which the gain of bf16 is compared with a plain loop's")
    mlp_batch: Count = Field(256, description="rows of a step of the perceptron")
    modes: list[Literal["default", "reduce-overhead", "max-autotune"]] = Field(
        ["default", "reduce-overhead", "max-autotune"], description="of torch.compile"
    )
    length: Count = Field(512, description="tokens of a row of timed attention")
    lengths: list[Count] = Field(
        [1024, 1536, 2048, 3072, 4096],
        description="of a row whose peak bytes are counted; torch's kernel uses other tiles below 1024",
    )
    annotations: Count = Field(2048, description="rows of the dataset of JSON text")
    values: Count = Field(2048, description="features of a row")
    data_batch: Count = Field(128, description="rows of a step on them")
    epochs: Count = Field(5, description="of each arm")
    load_batches: Count = Field(24, description="steps of a block with and without a loader process")


def run(options: ClaimsOptions, found: BenchMeasurement) -> None:
    """Measure the parts; see `ClaimsOptions`.

    Raises:
        InputError: rows not divisible by `accumulation`.
        RunError: a process failed.
    """
    if options.rows % options.accumulation:
        raise InputError("rows", got=str(options.rows), expected=f"a multiple of accumulation {options.accumulation}")
    found.block = "seconds of a step, a pass or a block, by part"
    with restored_threads(options.thread_count):
        for part in options.parts:
            found.say(part)
            MEASURES[part](options, found)
