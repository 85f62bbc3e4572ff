"""Bench `unequal`: a fast and a slow worker; shares of the batch by measured speed, against equal shares.

Both arms use the same two processes and the same model, which continues to train through the blocks of both; only the
number of micro-batches per worker differs. The slow worker computes every pass several times.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import PAIR, ArmProcesses, training_pair
from raytrain.errors import InputError

#: Seconds per step with equal shares over those with measured ones, one worker being half as fast.
GOAL = Goal(at_least=1.35)
#: Largest difference of a gradient in float64 from that of one process.
GRADIENT_GAP = 1e-12
EQUAL, MEASURED = "equal shares", "measured shares"


class UnequalOptions(BenchOptions):
    """Two workers of which one is half as fast: shares by measured speed against equal ones."""

    MEASURES: ClassVar[str] = "two workers of unequal speed: measured shares of a batch against equal shares"
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


def run(options: UnequalOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `UnequalOptions`.

    Raises:
        InputError: fewer than four micro-batches, too few for unequal shares.
        RunError: a process died.
    """
    if options.batch < 4 * options.micro_batch:
        expected = f"at least four micro-batches, {4 * options.micro_batch} rows"
        raise InputError("batch", got=str(options.batch), expected=expected)
    block = f"seconds per step, the mean of {options.block_steps}"
    found = BenchMeasurement("unequal", quick, options.model_dump(), block)
    with training_pair("unequal", lambda folder: settings_of(options, folder)) as pair:
        _measure(options, found, pair, say)
    return found


def settings_of(options: UnequalOptions, folder: Path) -> dict[str, Any]:
    """Settings of both workers."""
    steps = (2 + 2 * options.blocks) * options.block_steps
    text = write_text(folder, batch=options.batch, context=options.context, steps=steps, seed=options.seed)
    job = job_of(
        options, gpt_model(options), text, name="unequal", workers=PAIR, precision={"dtype": "fp32"},
        loop={"log_every": options.block_steps, "global_batch_size": options.batch,
              "micro_batch_size": options.micro_batch},
        scale={"shares": "auto"},
    )  # fmt: skip
    return {"slowness": options.slowness, "job": job}


def _measure(options: UnequalOptions, found: BenchMeasurement, pair: ArmProcesses, say: Say) -> None:
    for name in (EQUAL, MEASURED):
        pair.ask(what=name)  # optimizer state, allocator
    say("measuring the two workers")
    measured = pair.ask(what="measure")
    found.values |= {key: measured[0][key] for key in ("reason", "rows", "pass_s")}
    found.values["probe_s"] = max(answer["seconds"] for answer in measured)
    moved = found.gate(Check("the measured shares are unequal", bool(measured[0]["rows"]), measured[0]["reason"]))
    gap = max(answer["gap"] for answer in pair.ask(what="check"))
    label = f"in float64 the gradient over unequal shares equals that of one process within {GRADIENT_GAP:g}"
    if not found.gate(Check(label, gap <= GRADIENT_GAP, f"largest difference {gap:.3g}")) or not moved:
        return

    def block(name: str) -> float:
        answers = pair.ask(what=name, steps=options.block_steps)
        return max(answer["seconds"] for answer in answers) / options.block_steps

    say(f"{options.blocks} blocks of {options.block_steps} steps, two arms")
    times = alternate({name: partial(block, name) for name in (EQUAL, MEASURED)}, blocks=options.blocks)
    found.arms |= times
    ratio = found.compare(times, of=EQUAL, to=MEASURED, goal=GOAL)
    found.values["samples_per_s"] = {name: options.batch / statistics.median(values) for name, values in times.items()}
    slower = measured[0]["pass_s"][1] / measured[0]["pass_s"][0]
    found.claim(
        f"with one of two workers at half speed measured shares train at least {GOAL.at_least} times as fast",
        ratio.low >= (GOAL.at_least or 0.0),
        f"{ratio:.2f}; a pass of the slow worker takes {slower:.2f} times as long, rows {measured[0]['rows'][0]} and "
        f"{measured[0]['rows'][1]}",
    )
