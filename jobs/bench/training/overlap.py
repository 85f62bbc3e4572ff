"""Bench `overlap`: two workers that reduce their gradients after the last backward of a step, or during it.

Both arms use the same two processes and the same model, which continues to train through the blocks of both. A third
arm, with a separate model, has all gradients in buckets of 64 MiB; it shows the cost of small buckets alone.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, Positive
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import PAIR, ArmProcesses, training_pair
from raytrain.autotune.search.precision import WORTHWHILE_GAIN

AFTER, DURING, UNDIVIDED = "after", "during", "undivided"


class OverlapOptions(BenchOptions):
    """Two workers whose gradients are reduced after the last backward of a step, against during it."""

    MEASURES: ClassVar[str] = "all-reduces started during the last backward of a step, against after it, of two workers"
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 2, "width": 32, "context": 16, "batch": 8, "micro_batch": 4, "blocks": 3, "block_steps": 2,
        "bucket_mb": 0.02,
    }  # fmt: skip

    layers: Count = Field(6, description="of the GPT")
    width: Count = Field(384, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(8, description="rows of a step, over both workers")
    micro_batch: Count = Field(4, description="rows of one pass; only the last pass of a step can overlap")
    bucket_mb: Positive = Field(4.0, description="MiB at which a bucket is closed; a run on a CPU uses 4")
    block_steps: Count = Field(5, description="steps of one block")


def run(options: OverlapOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `OverlapOptions`.

    Raises:
        RunError: a process died.
    """
    block = f"seconds per step, the mean of {options.block_steps}"
    found = BenchMeasurement("overlap", quick, options.model_dump(), block)
    with training_pair("overlap", lambda folder: settings_of(options, folder)) as pair:
        _measure(options, found, pair, say)
    return found


def settings_of(options: OverlapOptions, folder: Path) -> dict[str, Any]:
    """Settings of both workers."""
    steps = (2 + 3 * options.blocks) * options.block_steps
    text = write_text(folder, batch=options.batch, context=options.context, steps=steps, seed=options.seed)
    loop = {"log_every": 1, "global_batch_size": options.batch, "micro_batch_size": options.micro_batch}
    job = job_of(
        options, gpt_model(options), text, name="overlap", loop=loop, workers=PAIR, precision={"dtype": "fp32"}
    )
    return {"bucket_bytes": int(options.bucket_mb * 2**20), "job": job}


def _measure(options: OverlapOptions, found: BenchMeasurement, pair: ArmProcesses, say: Say) -> None:
    (facts, _) = pair.ask(what="facts")
    found.values |= {name: facts[name] for name in ("buckets", "gradient_bytes", "accumulation")}
    several = Check("the gradients have more than one bucket", facts["buckets"] > 1, f"{facts['buckets']} buckets")
    if not found.gate(several):
        return
    one, other = (pair.ask(what=name, steps=options.block_steps)[0]["losses"] for name in (DURING, UNDIVIDED))
    if not found.gate(equal_series("reductions during and after the last backward train equally", one, other)):
        return
    say("measuring, as a run does when it starts")
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
    ratio = found.compare(times, of=AFTER, to=DURING, share=share)
    found.compare(times, of=UNDIVIDED, to=AFTER)
    mib = facts["gradient_bytes"] / 2**20
    found.claim(
        "reductions during the last backward make a step of two workers faster",
        ratio.low > 1.0,
        f"{ratio} times as fast; {mib:.1f} MiB in {facts['buckets']} buckets, {facts['accumulation']} passes a step; "
        f"without overlap {share:.0%} of a step waits for reductions",
    )
    found.claim(
        "scale.overlap: auto overlaps only if that is faster by more than noise",
        measured["value"] == (ratio.median >= 1 + WORTHWHILE_GAIN),
        f"it chose {str(measured['value']).lower()} ({measured['reason']}) in {measured['seconds']:.1f} s; {ratio}",
    )
