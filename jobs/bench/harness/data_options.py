"""Keys of the benches `data` and `clone`. Torch-free."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, NonNegative
from jobs.bench.harness.bench_options import BenchOptions


class DataOptions(BenchOptions):
    """Rows converted once and kept, against converting, cloning and copying them in every epoch."""

    QUICK: ClassVar[dict[str, Any]] = {"rows": 64, "batch": 16, "values": 64, "blocks": 2, "epochs": 3}

    blocks: Count = Field(5, description="repetitions that are kept; each trains both arms from the start")
    rows: Count = Field(2048, description="annotations of the set")
    batch: Count = Field(128, description="rows of a step")
    values: Count = Field(2048, description="numbers of an annotation, as JSON text")
    hidden: Count = Field(16, description="width of the perceptron that is trained")
    epochs: Count = Field(5, description="of each arm")


class CloneOptions(BenchOptions):
    """What cloning each batch, moving what is in place, and reading in the training process cost."""

    QUICK: ClassVar[dict[str, Any]] = {
        "rows": 64, "batch": 16, "values": 32, "hidden": 8, "blocks": 2, "block_steps": 4, "load_batches": 4,
        "load_batch": 2, "load_blocks": 2, "calls": 200,
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions that are kept; each runs one block of every arm")
    rows: Count = Field(4096, description="of the set, kept in memory")
    batch: Count = Field(256, description="rows of a step")
    values: Count = Field(2048, description="numbers of a row")
    hidden: Count = Field(16, description="width of the perceptron that is trained")
    block_steps: Count = Field(32, description="steps of one block")
    calls: Count = Field(5000, description="moves of one batch that are timed together")
    transform_ms: NonNegative = Field(5.0, description="what an item of the loader's dataset computes, alone")
    load_batch: Count = Field(8, description="rows of a step of the loader's part")
    load_batches: Count = Field(24, description="steps of one of its blocks")
    load_blocks: Count = Field(11, description="repetitions of it that are kept")
