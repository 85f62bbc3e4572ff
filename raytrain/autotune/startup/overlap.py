"""`scale.overlap: auto` on the real model: the passes of a step with their sums, with and without overlap in turn."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

from raytrain.autotune.probe.state_guard import untouched
from raytrain.autotune.search.precision import choose_overlap
from raytrain.autotune.startup.record import Push, shared_record, write_decision
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.memory.oom import StepDropped
from raytrain.train.parallel.buckets import could_overlap
from raytrain.train.session import Session
from raytrain.train.state import Reporter

#: Only the last of a step's passes can overlap: so many micro-batches of each worker, at most, show what it is worth.
MEASURED_PASSES = 4
#: Rounds are taken in turn until the time is up, at least `MIN_ROUNDS` of them, of which overlap must win each; so that
#: fewer are enough where it has lost one.
BUDGET_S = 2.0
MIN_ROUNDS = 5
MAX_ROUNDS = 15


def resolve_overlap(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """Whether sums overlap, where the plan leaves it open; needs a prepared session. Collective.

    A restarted or resumed attempt takes what was measured first.
    """
    if (
        not isinstance(session.job.plan.overlap, Deferred) or session.workers.world_size == 1
    ):  # fewer than were planned for
        return
    known = shared_record(session, run, "overlap")
    if known is not None:
        session.apply_choices(overlap=Resolved(known["value"], known["reason"]))
        return
    seconds: dict[str, list[float]] = {}
    why = _cannot(session)
    if why:
        chosen = Resolved(False, why)
    else:
        push({"phase": "measuring overlap"})
        try:
            chosen, seconds = measure_overlap(session)
        except StepDropped as error:  # raised by all together
            chosen = Resolved(False, f"no memory while it was measured ({error})")
    session.apply_choices(overlap=chosen)
    if session.workers.rank == 0:
        write_decision(run, "overlap", chosen, seconds, reporter)


def _cannot(session: Session) -> str:
    """Why there is nothing to measure, the same on every worker; "" where there is."""
    if any(isinstance(part, nn.SyncBatchNorm) for part in session.trainable.module.modules()):
        return "a SyncBatchNorm meets the other workers inside backward, and sums must not come between"
    if not could_overlap(session.step.gradients, session.workers):
        total = sum(flat.nbytes for flat in session.step.gradients.buffers)
        return f"the gradients are one bucket of {total:,} bytes, which is whole only when backward is over"
    return ""


def measure_overlap(session: Session) -> tuple[Resolved, dict[str, list[float]]]:
    """The choice, and the slowest worker's seconds of each round by arm ("after", "during"), on the real model and the
    first micro-batches of its window; changes nothing it measures. Collective.

    Raises:
        StepDropped: a worker had no memory; all raise it.
    """
    loader, step, workers, device = session.loader, session.step, session.workers, session.device
    rows = loader.window(session.state.cursor).indices
    rows = rows[: MEASURED_PASSES * loader.batches.micro_batch * workers.world_size]
    passes = loader.passes(rows)
    times: dict[str, list[float]] = {"after": [], "during": []}
    with untouched(step.trainable, device):
        generators, begin = rng_state(device), time.perf_counter()
        for round_number in range(MAX_ROUNDS + 1):
            for name, measured in times.items():
                step.reduction.overlap(name == "during")
                set_rng_state(generators, device)  # the same dropout for both
                workers.all_reduce_ints([0])  # they begin together
                _synchronize(device)
                began = time.perf_counter()
                work = partial(step.backward, loader.micro_batches(rows), global_weight=1, passes=passes)
                step.reduction.passed(work, flags=_no_wishes)
                _synchronize(device)
                if round_number:  # the first shows rank 0 the order
                    measured.append(time.perf_counter() - began)
            lost = any(a <= b for a, b in zip(times["after"], times["during"], strict=True))
            enough = (round_number >= MIN_ROUNDS or lost) and time.perf_counter() - begin > BUDGET_S
            if workers.all_reduce_ints([int(enough)])[0]:
                break
    step.reduction.overlap(False)
    told = workers.all_gather_floats([*times["after"], *times["during"]])
    slowest = [max(column) for column in zip(*told, strict=True)]
    count = len(slowest) // 2
    seconds = {"after": slowest[:count], "during": slowest[count:]}
    return choose_overlap(seconds), seconds


def _no_wishes() -> list[int]:
    return [0, 0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
