"""Bench `infer`: generation in batches, against transformers; what the pool costs; stages.

Generation is compared by CPU seconds of one process, which other programs on the machine disturb less than the clock.
Jobs of several workers are compared by the clock.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Say
from jobs.bench.harness.options import BenchOptions

Part = Literal["batches", "transformers", "pool", "stages"]
PARTS: tuple[Part, ...] = ("batches", "transformers", "pool", "stages")


class InferOptions(BenchOptions):
    """Batch inference: generation in batches, against transformers; workers."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 2, "width": 16, "prompt": 6, "tokens": 4, "batches": [1, 4], "blocks": 2,
        "jobs": 1, "units": 4, "unit_rows": 2, "answer": 2,
        "steady_rows": 4, "stage_blocks": 1,
        "stage_layers": 2, "stage_width": 16, "stage_rows": 2, "stage_tokens": 8, "micro_batches": 2,
        "parts": ["batches", "transformers"],
    }  # fmt: skip

    parts: list[Part] = Field(list(PARTS), description="what to measure; transformers needs batches")
    threads: Count | Literal["auto"] = Field(1, description="threads of the process that generates")
    blocks: Count = Field(15, description="repetitions of generation that are kept; each runs one block of every arm")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    prompt: Count = Field(32, description="tokens of the longest prompt; the shortest has half of them")
    tokens: Count = Field(64, description="tokens of an answer")
    batches: list[Count] = Field([1, 4, 16], description="rows of a batch")
    jobs: Count = Field(3, description="repetitions of jobs with workers; each runs one job of every arm")
    unit_rows: Count = Field(16, description="rows of a batch of a worker")
    units: Count = Field(16, description="units of a job")
    steady_rows: Count = Field(256, description="rows of such a unit, in batches of unit_rows")
    answer: Count = Field(24, description="tokens of an answer of a worker")
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
    from jobs.bench.harness.sessions import restored_threads
    from jobs.bench.infer_generation import measure_batches
    from jobs.bench.infer_workers import measure_pool, measure_stages

    block = "CPU seconds of a token, for jobs of workers seconds of a job"
    found = BenchMeasurement("infer", quick, options.model_dump(), block)
    with restored_threads(options.thread_count):
        if "batches" in options.parts:
            measure_batches(options, found, say)
    if "pool" in options.parts:
        measure_pool(options, found, say)
    if "stages" in options.parts:
        measure_stages(options, found, say)
    return found
