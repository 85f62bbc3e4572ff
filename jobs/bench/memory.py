"""Bench `memory`: peak memory of a step in several micro-batches against the same step in one batch.

Each measurement is a process of its own (`python -m jobs.bench.memory SETTINGS.json`), where freed memory goes
back to the system at once. The peak is taken from the third step on, above a floor of two steps of one row: what is
left is what the batch adds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs.bench.measuring import Goal, Measurement, Say, alternate, compare, equal_series
from jobs.bench.options import MemoryOptions
from raytrain.errors import InputError, RunError

#: Without these malloc keeps what was freed, and the resident set says little about what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
FLOOR_STEPS = 2
#: fp32 sums in another order.
TOLERANCE = 1e-4
TIMEOUT_S = 300.0


def run(options: MemoryOptions, *, quick: bool, say: Say) -> Measurement:
    """Measure both ways; see `MemoryOptions`.

    Raises:
        InputError: rows that the micro-batches cannot share equally.
        RunError: a process failed.
    """
    if options.rows % options.accumulation:
        raise InputError("rows", seen=str(options.rows), expected=f"a multiple of accumulation {options.accumulation}")
    found = Measurement(
        "memory", quick, options.model_dump(), "bytes that a step adds to the floor, in one process", unit="bytes"
    )
    micro = options.rows // options.accumulation
    names = {f"{options.accumulation} x {micro} rows": micro, f"1 x {options.rows} rows": options.rows}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def block(name: str) -> float:
        say(f"{name}: a process of its own")
        answers[name].append(_in_own_process(options, names[name]))
        return float(answers[name][-1]["peak"] - answers[name][-1]["floor"])

    turns = {name: (lambda name=name: block(name)) for name in names}
    found.arms = alternate(turns, blocks=options.blocks, dropped=0)
    small, large = names
    series = {name: rows[0]["losses"] for name, rows in answers.items()}
    found.gate(equal_series("both ways take the same steps", series[small], series[large], relative=TOLERANCE))
    ratio = compare(
        found.arms, of=small, to=large, name=f"peak above the floor, {small} / {large}",
        goal=Goal(at_most=1.0), words=("smaller", "larger"),
    )  # fmt: skip
    found.ratios.append(ratio)
    found.claim(
        f"{options.accumulation} micro-batches need less memory than one batch of the same rows",
        ratio.high < 1,
        f"{ratio.median:.3f} of its bytes above the floor, interval [{ratio.low:.3f}, {ratio.high:.3f}]",
    )
    found.values["processes"] = answers
    return found


def _in_own_process(options: MemoryOptions, micro: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**options.model_dump(), "micro": micro}))
        command = [sys.executable, "-m", "jobs.bench.memory", str(path)]
        done = subprocess.run(
            command, env={**os.environ, **MALLOC}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """What one process finds: {"floor", "peak" (bytes resident), "losses", "micro_batches" of a step, "exact_peak"}."""
    from cluster.inventory import local_inventory
    from cluster.telemetry import process_memory, reset_peak
    from jobs.bench.sessions import SessionArm

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
        },
        "scale": {"workers": 1, "mode": "cpu", "threads": local_inventory().cpus if threads == "auto" else threads},
    }  # fmt: skip
    arm = SessionArm(job, precision="fp32")
    batches = arm.session.feed.batches
    batches.global_batch = batches.micro_batch = 1
    arm.run(FLOOR_STEPS)
    floor = process_memory().rss
    batches.global_batch, batches.micro_batch = rows, settings["micro"]
    handles, _ = arm.session.feed.window(arm.session.state.cursor)
    arm.run(2)
    exact = reset_peak()
    arm.run(max(1, settings["steps"] - 2))
    return {
        "floor": floor,
        "peak": process_memory().peak,
        "exact_peak": exact,
        "micro_batches": len(batches.rank_handles(handles)),
        "losses": arm.losses[FLOOR_STEPS:],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
