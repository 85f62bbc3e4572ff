"""Bench `memory`: peak memory of a step in one batch against the same step in several micro-batches, with activation
checkpointing, and in bf16.

Each measurement is a separate process (`python -m jobs.bench.compute.memory SETTINGS.json`), which returns freed memory
to the system at once. The value is the peak from the third step on, minus the memory after two steps of one row: the
bytes that the batch adds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.inputs import gpt_model, job_of
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import run_command
from raytrain.errors import InputError

#: Without these malloc keeps freed memory, and the resident set does not show what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
FLOOR_STEPS = 2
#: fp32 sums in a different order; rounding of bf16, over the few steps of a process.
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
TIMEOUT_S = 300.0


class MemoryOptions(BenchOptions):
    """Peak memory of one large batch against accumulation, activation checkpointing and bf16."""

    MEASURES: ClassVar[str] = (
        "peak memory of training: with accumulation, activation checkpointing and bf16, each against one large batch"
    )
    QUICK: ClassVar[dict[str, Any]] = {"layers": 1, "width": 64, "context": 32, "rows": 16, "blocks": 1}

    blocks: Count = Field(3, description="processes of each arm")
    rows: Count = Field(64, description="rows of a step; must be divisible by `accumulation`")
    accumulation: Count = Field(4, description="micro-batches of the second arm")
    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(256, description="of the GPT")
    context: Count = Field(128, description="tokens of a window")
    steps: Count = Field(4, description="steps of each process; the peak is read from the third on")


def run(options: MemoryOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each variant; see `MemoryOptions`.

    Raises:
        InputError: rows not divisible by `accumulation`.
        RunError: a process failed.
    """
    if options.rows % options.accumulation:
        raise InputError("rows", got=str(options.rows), expected=f"a multiple of accumulation {options.accumulation}")
    found = BenchMeasurement(
        "memory", quick, options.model_dump(), "bytes that a step adds to the floor, in one process", unit="bytes"
    )
    micro = options.rows // options.accumulation
    small, large = f"{options.accumulation} x {micro} rows", f"1 x {options.rows} rows"
    ways: dict[str, dict[str, Any]] = {
        small: {"micro": micro},
        large: {"micro": options.rows},
        "activation checkpointing": {"micro": options.rows, "again": True},
        "bf16": {"micro": options.rows, "precision": "bf16"},
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}

    def block(name: str) -> float:
        say(f"{name}: starting a process")
        answers[name].append(_in_own_process(options, ways[name]))
        return float(answers[name][-1]["peak"] - answers[name][-1]["floor"])

    turns = {name: partial(block, name) for name in ways}
    found.arms = alternate(turns, blocks=options.blocks, dropped=0)
    series = {name: rows[0]["losses"] for name, rows in answers.items()}
    claims = {
        small: f"{options.accumulation} micro-batches need less memory than one batch of the same rows",
        "activation checkpointing": "activation checkpointing needs less memory than keeping activations",
        "bf16": "bf16 needs less memory than fp32",
    }
    for name, claim in claims.items():
        tolerance = HALF_TOLERANCE if name == "bf16" else TOLERANCE
        found.gate(equal_series(f"{name}: the same steps", series[name], series[large], relative=tolerance))
        ratio = found.compare(
            found.arms, of=name, to=large, name=f"peak above the floor, {name} / {large}",
            goal=Goal(at_most=1.0), words=("smaller", "larger"),
        )  # fmt: skip
        found.claim(claim, ratio.high < 1, f"{ratio} of its bytes above the floor")
    found.values["processes"] = answers
    return found


def _in_own_process(options: MemoryOptions, way: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({"options": options.model_dump(), **way}))
        command = [sys.executable, "-m", "jobs.bench.compute.memory", str(path)]
        printed = run_command(command, timeout_s=TIMEOUT_S, environment=MALLOC)
    return json.loads(printed.splitlines()[-1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure in this process: {"floor", "peak" (resident bytes), "losses", "micro_batches" per step, "exact_peak"}."""
    from cluster.telemetry.process import process_memory, reset_peak
    from jobs.bench.harness.sessions import SessionArm

    options = MemoryOptions(**settings["options"])
    text = bytes(97 + (31 * i * i + 7 * i) % 26 for i in range((8 + options.steps * options.rows) * options.context))
    loop = {
        "max_steps": 1_000, "global_batch_size": options.rows, "micro_batch_size": settings["micro"], "log_every": 1,
        "activation_checkpointing": settings.get("again", False),
    }  # fmt: skip
    job = job_of(options, gpt_model(options), text, name="memory", loop=loop, threads=options.thread_count)
    arm = SessionArm(job, precision=settings.get("precision", "fp32"))
    batches = arm.session.loader.batches
    batches.global_batch_size = batches.micro_batch = 1
    arm.run(FLOOR_STEPS)
    floor = process_memory().rss
    batches.global_batch_size, batches.micro_batch = options.rows, settings["micro"]
    indices, _ = arm.session.loader.global_batch(arm.session.state.cursor)
    arm.run(2)
    exact = reset_peak()
    arm.run(max(1, options.steps - 2))
    return {
        "floor": floor,
        "peak": max(arm.reporter.peaks[FLOOR_STEPS + 2 :]),  # of each row: the loop resets the peak
        "exact_peak": exact,
        "micro_batches": len(batches.rank_indices(indices)),
        "losses": arm.losses[FLOOR_STEPS:],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
