"""What the processes of a gang do with the step probe. Each function is `(rank, world, ...)` and returns no tensors."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lab import GPT, MLP, Rows, class_rows, digest, make_session, token_rows, train

from cluster.telemetry.processes import process_memory, reset_peak
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.micro_batch import memory_budget
from raytrain.autotune.startup import Calibration, read_measured, settle_micro_batch, settle_precision
from raytrain.autotune.step_probe import StepProbe
from raytrain.plan.choice import Deferred
from raytrain.runs.folder import RunFolder
from raytrain.train.job import StepSettings
from raytrain.train.memory import device as memory
from raytrain.train.session import Session

WIDE_GPT = {**GPT, "layers": 1, "width": 32, "context": 128, "vocab_size": 512}
ROWS = 64
MARGIN = 0.9
"""`cluster.memory_fraction`, unless it is given."""


def wide(*, limit: int | None = None, steps: int = 60) -> Session:
    """A GPT whose 64 rows take about 60 MB, with a micro-batch that memory decides."""
    data = {"train": token_rows(300, length=128, vocabulary=512), "eval_fraction": 0.1}
    loop = {"global_batch_size": ROWS, "max_steps": steps, "eval_every": steps}
    session = make_session(WIDE_GPT, data, loop=loop)
    deferred = Deferred("the largest that fits", (1, ROWS), "a test")
    cluster = session.job.cluster.model_copy(update={"memory_limit": limit})  # less than a plan lets a worker have
    session.job = replace(session.job, plan=replace(session.job.plan, micro_batch_size=deferred), cluster=cluster)
    session.settings = StepSettings.planned(session.job)
    return session


def by_brute_force(session: Session, budget: int | None) -> dict[int, tuple[str, int | None]]:
    """Outcome and peak of every size."""
    found = {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        one = StepProbe(session).measure(Candidate("fp32", size), budget=budget, passes=0, with_memory=True)
        found[size] = (one.outcome, one.peak_bytes)
    return found


def activations(rank: int, world_size: int, vocabulary: int, precision: str) -> tuple[float, float]:
    """(estimated by the plan, measured) bytes of 32 rows of a GPT with so many words, above the floor."""
    sizes = {**GPT, "layers": 4, "heads": 4, "width": 128, "context": 128, "vocab_size": vocabulary}
    data = {"train": token_rows(32, length=128, vocabulary=64), "eval_fraction": 0.0}
    loop = {"global_batch_size": 32, "micro_batch_size": 32}
    session = make_session(sizes, data, loop=loop, precision={"dtype": precision})
    facts = session.job.plan.model_facts
    found = StepProbe(session).measure(Candidate(precision, 32), budget=None, passes=0, with_memory=True)
    assert facts is not None and found.peak_bytes is not None and found.floor_bytes is not None
    return 32 * (facts.row_bytes(precision, recomputed=False) or 0), found.peak_bytes - found.floor_bytes


def silent(status: dict[str, Any]) -> None:
    """No driver listens."""


def under_a_budget(rank: int, world_size: int, run_path: str) -> dict[str, Any]:
    """The search on a machine with so much memory for it, all sizes one by one, and what 50 further steps take."""
    run = RunFolder(run_path)
    first = by_brute_force(wide(), None)
    middle = (first[16][1] or 0) + (first[32][1] or 0)
    room = int(middle / 2 / MARGIN)
    memory.memory_bytes = lambda: (room, room - process_memory().rss)  # in this process, which is the test's own
    session = wide(steps=50)
    reporter = Rows()
    settle_micro_batch(Calibration(session, run, reporter, silent))
    again = wide()
    settle_micro_batch(Calibration(again, run, later := Rows(), silent))
    reset_peak()
    train(session)
    return {
        "peaks": {size: peak for size, (_, peak) in first.items()},
        "room": room,
        "limit": int(MARGIN * room),
        "chosen": session.settings.micro_batch,
        "used": session.loader.batches.micro_batch,
        "accumulation": session.loader.passes(np.arange(ROWS)),
        "events": reporter.events,
        "again": (again.settings.micro_batch, later.events),
        "record": read_measured(run)["micro_batch"],
        "run_peak": process_memory().peak,
        "row_bytes": (first[64][1] - first[32][1]) / 32 if first[64][1] and first[32][1] else 0.0,
        "row_estimate": session.job.plan.model_facts.activation_bytes_per_sample,  # type: ignore[union-attr]
    }


def precision_and_rows(rank: int, world_size: int, run_path: str) -> dict[str, Any]:
    """Both left open, where a worker's share does not fit: how many rows the precisions were compared with."""
    peaks = by_brute_force(wide(), None)
    session = wide(limit=((peaks[16][1] or 0) + (peaks[32][1] or 0)) // 2)
    deferred = Deferred("measured", ("fp32", "bf16"), "a test")
    session.job = replace(session.job, plan=replace(session.job.plan, precision=deferred))
    compare, rows = StepProbe.measure_in_turn, []

    def seen(probe: StepProbe, candidates: Any, **named: Any) -> Any:
        rows.extend({one.micro_batch_size for one in candidates})
        return compare(probe, candidates, **named)

    StepProbe.measure_in_turn = seen  # in this process, which is the test's own
    run, reporter = RunFolder(run_path), Rows()
    calibration = Calibration(session, run, reporter, silent)
    settle_precision(calibration, forced=None, loaded=None)
    settle_micro_batch(calibration)
    return {
        "rows": rows, "chosen": session.precision, "micro_batch": session.loader.batches.micro_batch,
        "record": read_measured(run)["micro_batch"], "decisions": [row["what"] for row in reporter.events],
    }  # fmt: skip


def under_an_address_space_limit(rank: int, world_size: int, run_path: str) -> dict[str, Any]:
    """The same where nothing but RLIMIT_AS says no: allocations of this process really fail."""
    session = wide()
    peaks = by_brute_force(session, None)
    status = Path("/proc/self/status").read_text().split("\n")
    mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    growth = (peaks[16][1] or 0) - (peaks[1][1] or 0)
    limit = mapped + int(1.5 * growth)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    limited = by_brute_force(session, None)
    settle_micro_batch(Calibration(session, RunFolder(run_path), Rows(), silent))
    return {
        "fits": [size for size, (outcome, _) in limited.items() if outcome == "ok"],
        "outcomes": {outcome for outcome, _ in limited.values()},
        "chosen": session.settings.micro_batch,
    }


def small(**sections: Any) -> Session:
    torch.manual_seed(3)
    data = {"train": class_rows(96), "eval_fraction": 0.25}
    loop = {"global_batch_size": 16, "micro_batch_size": 8, "max_steps": 4}
    return make_session(MLP, data, loop=loop, **sections)


def by_everybody(rank: int, world_size: int) -> dict[str, Any]:
    """A candidate that fits, and one that does not on rank 1 alone; budgets of different ranks."""
    session = small(cluster={"memory_limit": 10_000_000_000 + rank})
    before = digest(dict(session.trainable.module.named_parameters()))
    good = StepProbe(session).measure(Candidate("fp32", 4), budget=None, passes=2, with_memory=True)
    forward = session.trainable.loss

    def fails(*arguments: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("from a test")

    session.trainable.loss = fails if rank else forward
    bad = StepProbe(session).measure(Candidate("fp32", 8), budget=None, passes=2, with_memory=True)
    calls = []

    def fails_late(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return (fails if rank and len(calls) == 3 else forward)(*arguments, **named)

    session.trainable.loss = fails_late
    late = StepProbe(session).measure(Candidate("fp32", 8), budget=None, passes=3, with_memory=False)
    calls.clear()
    (in_turn,), _ = StepProbe(session).passes_in_turn([lambda: None], rounds=(3, 3))

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.05 * rank)
        return forward(*arguments, **named)

    session.trainable.loss = slow
    (slowest,), _ = StepProbe(session).passes_in_turn([lambda: None], rounds=(1, 1))
    session.trainable.loss = forward
    unchanged = digest(dict(session.trainable.module.named_parameters())) == before
    budget, limit = memory_budget(session), session.job.cluster.memory_limit
    losses = train(session)[0].losses
    return {
        "good": asdict(good), "bad": asdict(bad), "late": asdict(late), "unchanged": unchanged,
        "in_turn": (in_turn.error, len(in_turn.round_s)), "budget": budget, "limit": limit,
        "slowest": median(slowest.round_s), "losses": losses, "plain": train(small())[0].losses,
    }  # fmt: skip
