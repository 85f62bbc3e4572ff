"""Bench `infer`: generation in batches, against a plain loop and transformers; what workers cost and bring; stages.

Generation is compared by CPU seconds of one process, which other programs on the machine disturb less than the clock;
tokens/s of the clock are in the document as well. Jobs of several workers are compared by the clock.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Say
from jobs.bench.harness.options import BenchOptions

Part = Literal["batches", "transformers", "length", "pool", "pull", "four", "stages"]
PARTS: tuple[Part, ...] = ("batches", "transformers", "length", "pool", "pull", "four", "stages")
BATCHED = "tokens/s, batch 4 / batch 1"
WORKERS: tuple[Part, ...] = ("pool", "pull", "four")


class InferOptions(BenchOptions):
    """Batch inference: tokens per second, and the cost and the gain of workers."""

    MEASURES: ClassVar[str] = "batch inference: generation in batches, against a plain loop and transformers; workers"
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 2, "width": 16, "prompt": 6, "tokens": 4, "long": 20, "batches": [1, 4], "blocks": 2,
        "jobs": 1, "units": 4, "unit_rows": 2, "answer": 2,
        "steady_units": 3, "steady_rows": 4, "sleep_ms": 20, "sleep_units": 4, "stage_blocks": 1,
        "stage_layers": 2, "stage_width": 16, "stage_rows": 2, "stage_tokens": 8, "micro_batches": 2,
        "parts": ["batches", "transformers", "length"],
    }  # fmt: skip

    parts: list[Part] = Field(list(PARTS), description="what to measure; transformers needs batches")
    threads: Count | Literal["auto"] = Field(1, description="threads of the process that generates")
    blocks: Count = Field(15, description="repetitions of generation that are kept; each runs one block of every arm")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    prompt: Count = Field(32, description="tokens of the longest prompt; the shortest has half of them")
    tokens: Count = Field(64, description="tokens of an answer")
    long: Count = Field(512, description="tokens of a long answer")
    batches: list[Count] = Field([1, 4, 16], description="rows of a batch")
    jobs: Count = Field(3, description="repetitions of jobs with workers; each runs one job of every arm")
    units: Count = Field(32, description="small units of a job that are computed")
    unit_rows: Count = Field(16, description="rows of a small unit that is computed, one batch")
    steady_units: Count = Field(16, description="units of a steady job")
    steady_rows: Count = Field(256, description="rows of a unit of a steady job, in batches of unit_rows")
    answer: Count = Field(24, description="tokens of an answer of a worker")
    sleep_ms: Count = Field(600, description="milliseconds of a unit of a worker that sleeps")
    sleep_units: Count = Field(64, description="units that one worker sleeps through, or four; two workers take half")
    stage_blocks: Count = Field(7, description="repetitions of the batches over stages that are kept")
    stage_layers: Count = Field(8, description="of the GPT over stages")
    stage_width: Count = Field(256, description="of the GPT over stages")
    stage_rows: Count = Field(8, description="rows of a batch over stages")
    stage_tokens: Count = Field(128, description="tokens of a row over stages")
    micro_batches: Count = Field(8, description="batches over stages, all of them in flight in one arm")


def run(options: InferOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `InferOptions`.

    Raises:
        RunError: Ray did not start.
    """
    import torch

    from jobs.bench.infer_generation import measure_batches, measure_length

    block = "CPU seconds of a token, for jobs of workers seconds of a job"
    found = BenchMeasurement("infer", quick, options.model_dump(), block)
    before = torch.get_num_threads()
    torch.set_num_threads(options.thread_count)
    try:
        if "batches" in options.parts:
            measure_batches(options, found, say)
        if "length" in options.parts:
            measure_length(options, found, say)
    finally:
        torch.set_num_threads(before)
    if any(part in options.parts for part in WORKERS):
        from jobs.bench.infer_workers import measure_workers

        measure_workers(options, found, say)
    if "stages" in options.parts:
        from jobs.bench.infer_stages import measure_stages

        measure_stages(options, found, say)
    _add_product(found)
    return found


def _add_product(found: BenchMeasurement) -> None:
    """What batches of four and four workers bring together; workers that only sleep share no device."""
    medians = {ratio.name: ratio.median for ratio in found.ratios}
    batched, four = medians.get(BATCHED), medians.get("seconds, one sleeping worker / four")
    if batched is not None and four is not None:
        found.values["batches of 4 x four workers, over single rows in one process"] = batched * four
