"""Bench `oom`: what an out-of-memory error costs a run of two workers, and that it leaves nothing behind.

Two plain processes hold two sessions of one job in float64 and take a step of each in turn: one undisturbed, one in
which errors are raised on one of the ranks, in forward or backward of some micro-batch. A value is the time of a step:
of the disturbed session at an error (the dropped passes and the step in halves), and of the undisturbed one at that
same step. Afterwards the weights of both are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, compare, median_interval
from jobs.bench.harness.options import OomOptions
from raytrain.errors import RunError

GOAL = Goal(at_most=2.5)
EXACT = 1e-12
WORKERS = 2
ERROR, CLEAN = "step with an error", "the same step without"
PATIENCE_S = 1800.0


def run(options: OomOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `OomOptions`.

    Raises:
        RunError: a process died, or the two did not come to an end.
    """
    found = BenchMeasurement("oom", quick, options.model_dump(), "one optimizer step of two workers")
    errors = plan_errors(options)
    say(f"{len(errors)} errors in {options.steps} steps, beside as many steps without any")
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        ranks = _ranks(options, errors, Path(folder))
    told, seconds = ranks[0]["events"], ranks[0]["seconds"]
    expected = [{"step": error["step"], "who": [f"rank {error['rank']}"]} for error in errors]
    found.gate(Check("each error is one event on record", told == expected, f"{len(told)} of {len(errors)}"))
    gap = max(rank["largest_difference"] for rank in ranks)
    detail = f"largest difference {gap:.3g} in float64"
    found.gate(Check("weights are those of the undisturbed run", gap <= EXACT, detail))
    alike = len({rank["digest"] for rank in ranks}) == 1
    if not found.gate(Check("both ranks hold the same weights", alike, "bit for bit")) or not found.passed:
        return found
    at = [error["step"] - 1 for error in errors]
    found.arms = {ERROR: [seconds["errors"][step] for step in at], CLEAN: [seconds["clean"][step] for step in at]}
    ratio = compare(found.arms, of=ERROR, to=CLEAN, name=f"{ERROR} / {CLEAN}", goal=GOAL)
    found.ratios.append(ratio)
    others = [step for step in range(options.steps) if step not in at]
    halved = median_interval([seconds["errors"][step] / seconds["clean"][step] for step in others])
    found.values |= {
        "errors": errors, "seconds": seconds, "micro_batch_sizes": ranks[0]["sizes"],
        "other_steps": vars(halved), "whole_run": sum(seconds["errors"]) / sum(seconds["clean"]),
    }  # fmt: skip
    found.claim(
        f"{len(errors)} out-of-memory errors on one of two ranks cost at most 2.5 step times each and change nothing",
        ratio.high <= 2.5,
        f"{ratio.median:.2f} steps [{ratio.low:.2f}, {ratio.high:.2f}], worst {max(ratio.values):.2f}; the steps "
        f"between them {halved.median:.2f} [{halved.low:.2f}, {halved.high:.2f}]; weights within {gap:.2g}",
    )
    return found


def plan_errors(options: OomOptions) -> list[dict[str, Any]]:
    """`blocks` errors, one in each stretch of `steps_between` steps: {"step", "rank", "micro_batch", "backward"}."""
    draw = np.random.default_rng(options.seed)
    micro_batches = max(1, options.batch // (WORKERS * options.micro_batch))
    return [
        {
            # the first step of all also makes the optimizer's state, which is none of the error's costs
            "step": 2 + index * options.steps_between + int(draw.integers(options.steps_between - 1)),
            "rank": int(draw.integers(WORKERS)),
            "micro_batch": int(draw.integers(micro_batches)),
            "backward": bool(draw.integers(2)),
        }
        for index in range(options.blocks)
    ]


def _ranks(options: OomOptions, errors: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps({**options.model_dump(), "folder": str(folder), "errors": errors}))
    log = folder / "log"
    with log.open("ab") as out:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "jobs.bench.training.oom_member", str(settings), str(rank)],
                stdout=out,
                stderr=out,
            )
            for rank in range(WORKERS)
        ]
    try:
        codes = [process.wait(timeout=PATIENCE_S) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the two workers had not ended after {PATIENCE_S:g} s; {_end_of(log)}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RunError(f"the workers ended with exit codes {codes}; {_end_of(log)}")
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(WORKERS)]


def _end_of(log: Path) -> str:
    return f"their log ends with:\n{log.read_text(errors='replace')[-2000:]}"
