"""Bench `memory`: peak memory of a step in one batch against the same step in several micro-batches, with its blocks
computed again in backward, and in bf16.

Each measurement is a process of its own (`python -m jobs.bench.compute.memory SETTINGS.json`), where freed memory goes
back to the system at once. The peak is taken from the third step on, above a floor of two steps of one row: what is
left is what the batch adds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, compare, equal_series
from jobs.bench.harness.options import BenchOptions
from raytrain.errors import InputError, RunError

#: Without these malloc keeps what was freed, and the resident set says little about what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
FLOOR_STEPS = 2
#: fp32 sums in another order; bf16's own rounding, over the few steps of a process.
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
TIMEOUT_S = 300.0


class MemoryOptions(BenchOptions):
    """Peak memory of one large batch against accumulation, activation checkpointing and bf16, each in a process."""

    MEASURES: ClassVar[str] = (
        "peak memory with accumulation, activation checkpointing and bf16, each against one large batch"
    )
    QUICK: ClassVar[dict[str, Any]] = {"layers": 1, "width": 64, "context": 32, "rows": 16, "blocks": 1}

    blocks: Count = Field(3, description="processes of each arm")
    rows: Count = Field(64, description="rows of a step; must be divisible by `accumulation`")
    accumulation: Count = Field(4, description="micro-batches of the second arm")
    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(256, description="of the GPT")
    context: Count = Field(128, description="tokens of a window")
    steps: Count = Field(4, description="steps of each process; the peak is taken from the third on")


def run(options: MemoryOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each way; see `MemoryOptions`.

    Raises:
        InputError: rows that the micro-batches cannot share equally.
        RunError: a process failed.
    """
    if options.rows % options.accumulation:
        raise InputError("rows", seen=str(options.rows), expected=f"a multiple of accumulation {options.accumulation}")
    found = BenchMeasurement(
        "memory", quick, options.model_dump(), "bytes that a step adds to the floor, in one process", unit="bytes"
    )
    micro = options.rows // options.accumulation
    small, large = f"{options.accumulation} x {micro} rows", f"1 x {options.rows} rows"
    ways: dict[str, dict[str, Any]] = {
        small: {"micro": micro},
        large: {"micro": options.rows},
        "blocks computed again": {"micro": options.rows, "again": True},
        "bf16": {"micro": options.rows, "precision": "bf16"},
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}

    def block(name: str) -> float:
        say(f"{name}: a process of its own")
        answers[name].append(_in_own_process(options, ways[name]))
        return float(answers[name][-1]["peak"] - answers[name][-1]["floor"])

    turns = {name: partial(block, name) for name in ways}
    found.arms = alternate(turns, blocks=options.blocks, dropped=0)
    series = {name: rows[0]["losses"] for name, rows in answers.items()}
    claims = {
        small: f"{options.accumulation} micro-batches need less memory than one batch of the same rows",
        "blocks computed again": "activation checkpointing needs less memory than keeping activations",
        "bf16": "bf16 needs less memory than fp32",
    }
    for name, claim in claims.items():
        tolerance = HALF_TOLERANCE if name == "bf16" else TOLERANCE
        found.gate(equal_series(f"{name}: the same steps", series[name], series[large], relative=tolerance))
        ratio = compare(
            found.arms, of=name, to=large, name=f"peak above the floor, {name} / {large}",
            goal=Goal(at_most=1.0), words=("smaller", "larger"),
        )  # fmt: skip
        found.ratios.append(ratio)
        evidence = f"{ratio.median:.3f} of its bytes above the floor, interval [{ratio.low:.3f}, {ratio.high:.3f}]"
        found.claim(claim, ratio.high < 1, evidence)
    found.values["processes"] = answers
    return found


def _in_own_process(options: MemoryOptions, way: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**options.model_dump(), **way}))
        command = [sys.executable, "-m", "jobs.bench.compute.memory", str(path)]
        done = subprocess.run(
            command, env={**os.environ, **MALLOC}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """What one process finds: {"floor", "peak" (bytes resident), "losses", "micro_batches" of a step, "exact_peak"}."""
    from cluster.devices.inventory import local_inventory
    from cluster.telemetry.process import process_memory, reset_peak
    from jobs.bench.harness.sessions import SessionArm

    rows, threads = settings["rows"], settings["threads"]
    sizes = {name: settings[name] for name in ("layers", "width", "context")}
    text = bytes(97 + (31 * i * i + 7 * i) % 26 for i in range((8 + settings["steps"] * rows) * settings["context"]))
    job = {
        "name": "bench-memory",
        "seed": settings["seed"],
        "model": {"builder": "raytrain.models.gpt:gpt", "heads": 4, **sizes},
        "data": {"train": text, "eval_fraction": 0.0},
        "loop": {
            "max_steps": 1_000, "global_batch_size": rows, "micro_batch_size": settings["micro"], "log_every": 1,
            "activation_checkpointing": settings.get("again", False),
        },
        "scale": {"workers": 1, "mode": "cpu", "threads": local_inventory().cpus if threads == "auto" else threads},
    }  # fmt: skip
    arm = SessionArm(job, precision=settings.get("precision", "fp32"))
    batches = arm.session.loader.batches
    batches.global_batch_size = batches.micro_batch = 1
    arm.run(FLOOR_STEPS)
    floor = process_memory().rss
    batches.global_batch_size, batches.micro_batch = rows, settings["micro"]
    indices, _ = arm.session.loader.global_batch(arm.session.state.cursor)
    arm.run(2)
    exact = reset_peak()
    arm.run(max(1, settings["steps"] - 2))
    return {
        "floor": floor,
        "peak": max(arm.reporter.peaks[FLOOR_STEPS + 2 :]),  # each row's own: the loop sets it back
        "exact_peak": exact,
        "micro_batches": len(batches.rank_indices(indices)),
        "losses": arm.losses[FLOOR_STEPS:],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
