"""Bench `overlap`: two workers that sum their gradients after the last backward of a step, or begin inside it.

Both arms are the same two processes and the same model, which trains on through the blocks of either. A third arm, with
a model of its own, has all gradients in buckets of 64 MiB: what dividing them costs by itself.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate, compare, equal_series
from jobs.bench.harness.options import LoopOptions
from jobs.bench.harness.pair import Pair, training_pair
from jobs.bench.harness.speed_options import OverlapOptions
from jobs.bench.training.loop_arms import make_text
from raytrain.autotune.search.precision import WORTHWHILE_GAIN

AFTER, DURING, UNDIVIDED = "after", "during", "undivided"


def run(options: OverlapOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `OverlapOptions`. Raises RunError where a process died."""
    found = BenchMeasurement(
        "overlap", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    with training_pair("overlap", lambda folder: settings_of(options, folder)) as pair:
        _measure(options, found, pair, say)
    return found


def settings_of(options: OverlapOptions, folder: Path) -> dict[str, Any]:
    """What the two are told."""
    text = make_text(LoopOptions.model_validate({
        "batch": options.batch, "context": options.context, "seed": options.seed, "block_steps": options.block_steps,
        "blocks": 3 * options.blocks,
    }), folder)  # fmt: skip
    sizes = {name: getattr(options, name) for name in ("layers", "width", "context")}
    loop = {"max_steps": 1_000_000, "log_every": 1, "global_batch_size": options.batch}
    loop |= {"micro_batch_size": options.micro_batch}
    return {
        "store": str(folder / "store"), "bucket_bytes": int(options.bucket_mb * 2**20),
        "job": {
            "name": "bench-overlap", "seed": options.seed,
            "model": {"builder": "raytrain.models.gpt:gpt", "heads": 4, **sizes},
            "data": {"source": "text", "path": str(text), "eval_fraction": 0.0},
            "precision": {"dtype": "fp32"}, "loop": loop,
            "scale": {"workers": 2, "mode": "cpu", "threads": 1},
        },
    }  # fmt: skip


def _measure(options: OverlapOptions, found: BenchMeasurement, pair: Pair, say: Say) -> None:
    (facts, _) = pair.ask("facts")
    found.values |= {name: facts[name] for name in ("buckets", "gradient_bytes", "accumulation")}
    several = Check("the gradients are more than one bucket", facts["buckets"] > 1, f"{facts['buckets']} buckets")
    if not found.gate(several):
        return
    one, other = (pair.ask(name, steps=options.block_steps)[0]["losses"] for name in (DURING, UNDIVIDED))
    if not found.gate(equal_series("sums during and after the last backward train alike", one, other)):
        return
    say("measuring as a run does at its start")
    measured = pair.ask("measure")[0]
    found.values["auto"] = {name: measured[name] for name in ("value", "reason", "rounds", "seconds")}
    waits: dict[str, list[float]] = {name: [] for name in (AFTER, DURING, UNDIVIDED)}

    def block(name: str) -> float:
        answers = pair.ask(name, steps=options.block_steps)
        waits[name].append(statistics.fmean(answer["waited_s"] for answer in answers) / options.block_steps)
        return max(answer["seconds"] for answer in answers) / options.block_steps

    say(f"{options.blocks} blocks of {options.block_steps} steps, three arms")
    times = alternate({name: (lambda name=name: block(name)) for name in waits}, blocks=options.blocks)
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
