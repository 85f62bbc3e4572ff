"""What the benches of attention and of compiled steps can be asked. Torch-free."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Positive, Text
from jobs.bench.harness.bench_options import BenchOptions


class AttentionOptions(BenchOptions):
    """Causal attention with and without masks: time of each way, and peak bytes by length."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 16, "heads": 2, "length": 32, "rows": 2, "lengths": [1024, 1280, 1536, 2048], "window": 8,
        "blocks": 3, "block_s": 0.0,
    }  # fmt: skip

    layers: Count = Field(4, description="of the stack of attention layers that is timed, forward only")
    width: Count = Field(256, description="of a token")
    heads: Count = Field(4, description="of each layer")
    length: Count = Field(512, description="tokens of a row")
    rows: Count = Field(4, description="of a batch")
    window: Count = Field(64, description="tokens that a sliding window sees")
    lengths: list[Count] = Field(
        [1024, 1536, 2048, 3072, 4096],
        description="of one row, whose peak bytes are counted; below torch's kernel takes other tiles",
    )
    block_s: float = Field(0.25, ge=0, description="seconds that one block should take")


class CompileOptions(BenchOptions):
    """Whole optimizer steps compiled against eager, what compiling costs first, and all switches against none."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 1, "width": 8, "context": 8, "batch": 4, "blocks": 3, "block_steps": 1,
        "modes": ["default"],
    }  # fmt: skip

    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step")
    parts: Text = Field("blocks", description="loop.compile_parts")
    modes: list[Literal["default", "reduce-overhead", "max-autotune"]] = Field(
        ["default", "max-autotune"], description="of torch.compile; reduce-overhead is default on a CPU"
    )
    block_steps: Count = Field(20, description="steps of one block")
    reference: bool = Field(True, description="also a job with every default against loop.reference")


class OverlapOptions(BenchOptions):
    """Two workers whose gradients are summed after the last backward of a step, or begin to be inside it."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 2, "width": 32, "context": 16, "batch": 8, "micro_batch": 4, "blocks": 3, "block_steps": 2,
        "bucket_mb": 0.02,
    }  # fmt: skip

    layers: Count = Field(6, description="of the GPT")
    width: Count = Field(384, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(8, description="rows of a step, over both workers")
    micro_batch: Count = Field(4, description="rows of one pass; only the last of a step can overlap")
    bucket_mb: Positive = Field(4.0, description="MiB at which a bucket is closed; 4 is what a run on a CPU takes")
    block_steps: Count = Field(5, description="steps of one block")


class PinnedOptions(BenchOptions):
    """Copies to a GPU: out of pinned memory, out of pageable memory, and pinned on the way."""

    QUICK: ClassVar[dict[str, Any]] = {"megabytes": 0.25, "batches": 2, "blocks": 3}

    megabytes: float = Field(16.0, gt=0, description="of one batch")
    batches: Count = Field(16, description="copied in one block")
