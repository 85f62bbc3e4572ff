"""Bench `overlap`: two workers that sum their gradients after the last backward of a step, or begin inside it.

Both arms are the same two processes and the same model, which trains on through the blocks of either. A third arm, with
a model of its own, has all gradients in buckets of 64 MiB: what dividing them costs by itself.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, Positive
from jobs.bench.harness.inputs import write_text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate, compare, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, training_pair
from raytrain.autotune.search.precision import WORTHWHILE_GAIN

AFTER, DURING, UNDIVIDED = "after", "during", "undivided"


class OverlapOptions(BenchOptions):
    """Two workers whose gradients are summed after the last backward of a step, or begin to be inside it."""

    MEASURES: ClassVar[str] = "all-reduces of two workers started during the last backward of a step, against after it"
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


def run(options: OverlapOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `OverlapOptions`. Raises RunError where a process died."""
    found = BenchMeasurement(
        "overlap", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    with training_pair("overlap", lambda folder: settings_of(options, folder)) as pair:
        _measure(options, found, pair, say)
    return found


def settings_of(options: OverlapOptions, folder: Path) -> dict[str, Any]:
    """Settings of both workers."""
    steps = (2 + 3 * options.blocks) * options.block_steps
    text = write_text(folder, batch=options.batch, context=options.context, steps=steps, seed=options.seed)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "context")}
    loop = {"max_steps": 1_000_000, "log_every": 1, "global_batch_size": options.batch}
    loop |= {"micro_batch_size": options.micro_batch}
    return {
        "bucket_bytes": int(options.bucket_mb * 2**20),
        "job": {
            "name": "bench-overlap", "seed": options.seed,
            "model": {"builder": "raytrain.models.gpt:gpt", "heads": 4, **sizes},
            "data": {"source": "text", "path": str(text), "eval_fraction": 0.0},
            "precision": {"dtype": "fp32"}, "loop": loop,
            "scale": {"workers": 2, "mode": "cpu", "threads": 1},
        },
    }  # fmt: skip


def _measure(options: OverlapOptions, found: BenchMeasurement, pair: ArmProcesses, say: Say) -> None:
    (facts, _) = pair.ask(what="facts")
    found.values |= {name: facts[name] for name in ("buckets", "gradient_bytes", "accumulation")}
    several = Check("the gradients are more than one bucket", facts["buckets"] > 1, f"{facts['buckets']} buckets")
    if not found.gate(several):
        return
    one, other = (pair.ask(what=name, steps=options.block_steps)[0]["losses"] for name in (DURING, UNDIVIDED))
    if not found.gate(equal_series("sums during and after the last backward train alike", one, other)):
        return
    say("measuring as a run does at its start")
    measured = pair.ask(what="measure")[0]
    found.values["auto"] = {name: measured[name] for name in ("value", "reason", "rounds", "seconds")}
    waits: dict[str, list[float]] = {name: [] for name in (AFTER, DURING, UNDIVIDED)}

    def block(name: str) -> float:
        answers = pair.ask(what=name, steps=options.block_steps)
        waits[name].append(statistics.fmean(answer["waited_s"] for answer in answers) / options.block_steps)
        return max(answer["seconds"] for answer in answers) / options.block_steps

    say(f"{options.blocks} blocks of {options.block_steps} steps, three arms")
    times = alternate({name: partial(block, name) for name in waits}, blocks=options.blocks)
    found.arms |= times
    found.values["waited_s"] = {name: statistics.median(values[1:]) for name, values in waits.items()}
    share = found.values["waited_s"][AFTER] / statistics.median(times[AFTER])
    ratio = compare(times, of=AFTER, to=DURING, name=f"{AFTER} / {DURING}", share=share)
    divided = compare(times, of=UNDIVIDED, to=AFTER, name=f"{UNDIVIDED} / {AFTER}")
    found.ratios += [ratio, divided]
    interval = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    mib = facts["gradient_bytes"] / 2**20
    found.claim(
        "sums begun inside the last backward make a step of two workers faster",
        ratio.low > 1.0,
        f"{interval} times as fast; {mib:.1f} MiB in {facts['buckets']} buckets, {facts['accumulation']} passes a"
        f" step, {share:.0%} of it waiting for sums where they come after",
    )
    found.claim(
        "scale.overlap: auto overlaps where that is faster by more than noise, and not where it is not",
        measured["value"] == (ratio.median >= 1 + WORTHWHILE_GAIN),
        f"it took {str(measured['value']).lower()} ({measured['reason']}) in {measured['seconds']:.1f} s; {interval}",
    )
