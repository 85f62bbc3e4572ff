"""What each bench can be asked, and the list of them. Torch-free: `bench --list` and `--help` are instant."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Positive, Text
from jobs.bench.harness.bench_options import BenchOptions
from jobs.bench.harness.data_options import CloneOptions, DataOptions
from jobs.bench.harness.speed_options import AttentionOptions, CompileOptions, OverlapOptions, PinnedOptions


class LoopOptions(BenchOptions):
    """Our loop in Ray Train workers against the loop one writes by hand."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 2, "width": 16, "context": 16, "batch": 4, "blocks": 3, "block_steps": 10, "startups": 0,
    }  # fmt: skip

    workers: list[Count] = Field([1, 2], description="world sizes, one after the other")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step, over all workers")
    text: Text | None = Field(None, description="a text file; null generates one")
    block_steps: Count = Field(40, description="steps of one block, a multiple of 10 (the log interval)")
    dropped: Count = Field(2, description="blocks before the kept ones")
    startups: NonNegativeInt = Field(2, description="times that each arm's start-up is measured, apart")


class PrecisionOptions(BenchOptions):
    """fp32 against bf16 and fp16, by layer width."""

    QUICK: ClassVar[dict[str, Any]] = {
        "widths": [16, 32], "batch": 8, "blocks": 3, "block_s": 0.0, "compare_width": 32, "gpt_width": 16,
        "gpt_layers": 1,
    }  # fmt: skip

    widths: list[Count] = Field([256, 512, 1024, 2048], description="of the three hidden layers of a perceptron")
    batch: Count = Field(256, description="rows of a step of the perceptron")
    compare_width: Count = Field(512, description="where our gain is held against the plain loop's own gain")
    gpt_width: NonNegativeInt = Field(128, description="of a small GPT (context 64, batch 12); 0 leaves it out")
    gpt_layers: Count = Field(4, description="of the small GPT")
    block_s: float = Field(0.25, ge=0, description="seconds that one block of the fp32 arm should take")


class CheckpointOptions(BenchOptions):
    """The pause that a checkpoint makes in the loop, written in the background or in its way."""

    QUICK: ClassVar[dict[str, Any]] = {"millions": [0.05], "blocks": 3, "steps": 2, "batch": 4}

    millions: list[float] = Field([1.0, 10.0, 50.0], description="millions of parameters, with AdamW state")
    batch: Count = Field(64, description="rows of a step")
    steps: Count = Field(5, description="steps of one block; the checkpoint is taken after the first")
    dir: Text | None = Field(None, description="where they are written; null is the system's temporary directory")


class MemoryOptions(BenchOptions):
    """Peak memory of one large batch against accumulation, activation checkpointing and bf16, each in a process."""

    QUICK: ClassVar[dict[str, Any]] = {"layers": 1, "width": 64, "context": 32, "rows": 16, "blocks": 1}

    blocks: Count = Field(3, description="processes of each arm")
    rows: Count = Field(64, description="rows of a step; must be divisible by `accumulation`")
    accumulation: Count = Field(4, description="micro-batches of the second arm")
    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(256, description="of the GPT")
    context: Count = Field(128, description="tokens of a window")
    steps: Count = Field(4, description="steps of each process; the peak is taken from the third on")


class PlacementOptions(BenchOptions):
    """Placement policies, planned on the windows so far and scored on the next one."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 2, "experts": 12, "hosts": 4, "replicas": 4, "blocks": 3, "rows": 5_000,
        "plan_layers": 2, "plan_experts": 32, "plan_hosts": 8, "plan_replicas": 8, "plans": 1,
    }  # fmt: skip

    trace: Text | None = Field(None, description="JSONL, a window a line: {step, layers: [[rows]]}; null draws one")
    history: Count = Field(4, description="windows that the first forecast is made from")
    layers: Count = Field(4, description="of the drawn trace")
    experts: Count = Field(64, description="of each layer of the drawn trace")
    rows: Count = Field(200_000, description="of each window and layer of the drawn trace")
    sigma: float = Field(1.0, ge=0, description="spread of the drawn loads' logarithms")
    drift: float = Field(0.2, ge=0, description="how far those walk from one window to the next")
    hosts: Count = Field(8, description="that the experts are placed on")
    replicas: NonNegativeInt = Field(8, description="extra copies in each layer; rounded up to full slots")
    speeds: list[Positive] = Field([4.0, 2.0, 1.0], description="of the unequal hosts, repeated in turn")
    plan_layers: Count = Field(58, description="of the placement that is timed")
    plan_experts: Count = Field(256, description="of the placement that is timed")
    plan_hosts: Count = Field(64, description="of the placement that is timed")
    plan_replicas: NonNegativeInt = Field(64, description="of the placement that is timed")
    plans: Count = Field(5, description="times that it is timed")


class MovesOptions(BenchOptions):
    """Training with a shifting load on unequal hosts: experts that move against experts that stay."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 32, "context": 16, "batch": 4, "blocks": 3, "block_steps": 8, "shift_steps": 12,
        "every": 4, "slowness": [1, 2],
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions; each runs one block of both arms")
    block_steps: Count = Field(20, description="steps of one block")
    layers: Count = Field(2, description="of the GPT")
    width: Count = Field(256, description="of the GPT")
    context: Count = Field(128, description="tokens of a window")
    batch: Count = Field(8, description="rows of a step")
    experts: Count = Field(8, description="of each layer")
    top_k: Count = Field(2, description="experts of a token")
    skew: float = Field(0.4, ge=0, description="added to the best-liked expert's score; to the n-th an n-th of it")
    shift_steps: Count = Field(60, description="steps until other experts are liked")
    every: Count = Field(10, description="experts.rebalance_every of the arm that moves")
    slowness: list[Count] = Field([1, 3], description="how often each host computes everything")


class UnequalOptions(BenchOptions):
    """Two workers of which one is half as fast: shares by measured speed against equal ones."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 16, "context": 16, "batch": 12, "micro_batch": 1, "blocks": 3, "block_steps": 2,
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions that are kept; each runs one block of both arms")
    block_steps: Count = Field(5, description="steps of one block")
    layers: Count = Field(2, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(96, description="rows of a step, over both workers")
    micro_batch: Count = Field(4, description="rows of one forward and backward pass")
    slowness: Count = Field(2, description="times as long as the passes of the second worker take")


class RecoveryOptions(BenchOptions):
    """Deaths of an expert host and of a worker in a run of the default recipe."""

    QUICK: ClassVar[dict[str, Any]] = {"blocks": 1, "layers": 1, "width": 32, "steps_between": 12, "save_every": 5}

    blocks: Count = Field(5, description="deaths of each kind")
    hosts: Count = Field(2, description="expert hosts")
    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    save_every: Count = Field(10, description="steps between checkpoints")
    steps_between: Count = Field(40, description="steps from one recovery to the next death")


class OomOptions(BenchOptions):
    """Out-of-memory errors on one of two workers, in steps drawn at random."""

    QUICK: ClassVar[dict[str, Any]] = {
        "blocks": 3, "steps_between": 4, "layers": 1, "width": 16, "context": 16, "batch": 8, "micro_batch": 2,
    }  # fmt: skip

    blocks: Count = Field(20, description="errors")
    steps_between: Annotated[int, Field(ge=2)] = Field(6, description="steps to one error, on average")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(32, description="rows of a step, over both workers")
    micro_batch: Count = Field(8, description="rows of a micro-batch, before it is halved")
    grow_after: Count = Field(2, description="loop.grow_after")

    @property
    def steps(self) -> int:
        """Of the whole measurement."""
        return self.blocks * self.steps_between


class ExpertsOptions(BenchOptions):
    """One mixture-of-experts layer, forward and backward, with its experts elsewhere and in one process."""

    QUICK: ClassVar[dict[str, Any]] = {
        "tokens": 64, "width": 16, "experts": 4, "layouts": ["1+2", "2+0"], "token_counts": [32], "widths": [8],
        "blocks": 3, "table_blocks": 2, "block_s": 0.0, "train_layers": 1, "train_width": 16, "train_context": 16,
        "train_rows": 2,
    }  # fmt: skip

    threads: Count | Literal["auto"] = Field(2, description="threads of the lone process; workers and hosts have one")
    tokens: Count = Field(2048, description="of a pass, over all workers")
    width: Count = Field(512, description="of a token; the experts' hidden width is four times that")
    experts: Count = Field(8, description="of the layer")
    top_k: Count = Field(2, description="experts of a token")
    layouts: list[Text] = Field(
        ["1+2", "2+0", "1+0", "1+1", "2+1", "2+2"], description="WORKERS+HOSTS; no hosts: shared out over the workers"
    )
    token_counts: list[Count] = Field([512, 2048, 8192], description="of the table for one worker and two hosts")
    widths: list[Count] = Field([256, 512, 1024], description="of that table")
    table_blocks: Count = Field(5, description="repetitions that are kept, for each size of that table")
    block_s: float = Field(0.5, ge=0, description="seconds that one block should take")
    train_layers: Count = Field(2, description="of the GPT that trains with one and with two micro-batches in flight")
    train_width: Count = Field(256, description="of that GPT")
    train_context: Count = Field(128, description="tokens of its window")
    train_rows: Count = Field(4, description="of one of its micro-batches")
    micro_batches: Count = Field(4, description="of one of its steps")


class TuneOptions(BenchOptions):
    """The search for batch size and precision against an exhaustive grid and against doubling until failure."""

    QUICK: ClassVar[dict[str, Any]] = {
        "wide": 32, "narrow": 16, "context": 16, "rows": 16, "repeats": 2, "blocks": 2, "gate_steps": 2,
        "block_s": 0.0, "ceilings": [2],
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions of the chosen point against the grid's best")
    repeats: Count = Field(3, description="times that each way of searching is taken, in turn")
    wide: Count = Field(256, description="width of one GPT of two layers")
    narrow: Count = Field(64, description="width of the other")
    context: Count = Field(64, description="tokens of a window of both")
    rows: Count = Field(256, description="of a step, and the largest micro-batch that is tried; a power of two")
    free: bool = Field(False, description="the micro-batch is the whole batch of a step, which may be any size")
    gate_steps: Count = Field(20, description="steps of the numeric gate")
    block_s: float = Field(0.25, ge=0, description="seconds that one block of the chosen point should take")
    ceilings: list[Count] = Field([4, 8, 32], description="budgets are set so that so many rows of the GPT just fit")


class PeersOptions(LoopOptions):
    """A step of ours against one of Lightning and one of Accelerate: same model, text, optimizer and schedule."""

    workers: list[Count] = Field([1], description="one")
    startups: NonNegativeInt = Field(0, description="none: start-up is measured by bench loop")


class LrOptions(BenchOptions):
    """A learning-rate range test: `raytrain bench lr JOB.yaml [section.key=value ...] [key=value ...]`."""

    QUICK: ClassVar[dict[str, Any]] = {"steps": 20, "lowest": 1e-4}
    IN_ALL: ClassVar[bool] = False

    job: Text | None = Field(None, description="a JOB.yaml or a recipe's name; null is the recipe default")
    changes: list[Text] = Field([], description="section.key=value over the job, also as arguments")
    steps: Annotated[int, Field(ge=5)] = Field(150, description="of the ramp")
    lowest: Positive = Field(1e-6, description="learning rate of the first step")
    highest: Positive = Field(10.0, description="learning rate of the last step")
    smoothing: float = Field(0.9, ge=0, lt=1, description="weight of the past in the smoothed loss")
    divergence: float = Field(2.0, gt=1, description="times the least smoothed loss, at which the ramp stops")


class AllOptions(BenchOptions):
    """Every bench, and one table: `raytrain bench all [NAME.key=value ...] [key=value ...]`."""

    IN_ALL: ClassVar[bool] = False
    OUT: ClassVar[str | None] = "benchmarks.json"

    only: list[Text] = Field([], description="these benches alone; none: all but lr")
    skip: list[Text] = Field([], description="not these")
    changes: list[Text] = Field([], description="NAME.key=value for single benches, also as arguments")
    dir: Text = Field("runs/bench/all", description="folder of their documents; one that is there is not measured anew")


BENCHES: dict[str, tuple[type[BenchOptions], str]] = {
    "loop": (LoopOptions, "our loop against a plain PyTorch loop and plain DDP: steady state, and start-up apart"),
    "precision": (PrecisionOptions, "fp32 against bf16 and fp16 by layer width: time, memory kept for backward, "
                  "and what `auto` chooses"),
    "checkpoint": (CheckpointOptions, "how long an asynchronous checkpoint stops the loop, against a synchronous one"),
    "memory": (MemoryOptions, "peak memory with gradient accumulation, activation checkpointing and bf16, each against "
               "one large batch"),
    "attention": (AttentionOptions, "masks built, cached and not made at all (is_causal); a sliding window; peak bytes "
                  "by length"),
    "compile": (CompileOptions, "eager against compiled steps, by mode; seconds of the compiler, graph breaks, and the "
                "step from which it pays; every default against loop.reference"),
    "placement": (PlacementOptions, "placement policies on the next window of expert load, per host; EPLB's example; "
                  "time to plan"),
    "moves": (MovesOptions, "training with a shifting load on hosts of unequal speed: experts that move against "
              "round-robin"),
    "unequal": (UnequalOptions, "two workers of unequal speed: shares of a batch as measured against equal ones"),
    "overlap": (OverlapOptions, "gradients of two workers summed after the last backward of a step, against sums that "
                "begin inside it"),
    "recovery": (RecoveryOptions, "how long a run stands still when an expert host dies, against a dead worker"),
    "oom": (OomOptions, "what out-of-memory errors on one of two workers cost, and that they change nothing"),
    "experts": (ExpertsOptions, "a layer whose experts live on hosts, or are shared out, against one process; sorted "
                "rows against masks, grouped product against loop; two micro-batches in flight"),
    "data": (DataOptions, "rows converted once and kept, against converting, cloning and copying in every epoch; busy "
             "shares"),
    "clone": (CloneOptions, "what cloning batches, moving what is in place and reading in the training process cost"),
    "pinned": (PinnedOptions, "copies to a GPU out of pinned and out of pageable memory"),
    "tune": (TuneOptions, "the search for batch size and precision against an exhaustive grid, and against doubling "
             "until failure"),
    "peers": (PeersOptions, "a step of ours against Lightning and Accelerate, where they are installed"),
    "lr": (LrOptions, "JOB.yaml: the loss over a rising learning rate, and the rate that it suggests: advice"),
    "all": (AllOptions, "every bench, and one table of what was claimed and what this machine says"),
}  # fmt: skip
"""Name -> (its keys, what it measures). Each is run by `jobs.bench.FOLDER.NAME.run(options, quick=, say=)`."""
