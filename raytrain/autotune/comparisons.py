"""What a search proposes, measured on the real model; among it the numeric gate: real steps in two precisions from one
state. Nothing that is measured changes."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator

import numpy as np
import torch

from raytrain.autotune.batch_space import LEAST_PASSES, Proposal, ProposalResult
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.precision import GateReport
from raytrain.autotune.state_guard import preserve_model, preserve_optimizers
from raytrain.autotune.step_probe import StepProbe, computing_as
from raytrain.errors import OutOfMemory, RunError, first_line
from raytrain.train.memory.device import is_out_of_memory, let_go
from raytrain.train.session import Session
from raytrain.train.step import StepOutput


def run_gate(
    session: Session, candidate: Candidate, *, reference: str, steps: int, budget: int | None = None
) -> GateReport:
    """Train `steps` steps in the candidate's precision and in the reference's, each from the session's current state.

    One batch shows whether a precision computes nearly the same gradient. Whether it trains as well shows only over
    several steps: rounding errors add up, updates may be smaller than the format can represent, and a loss scale has to
    adapt. A step is one micro-batch of the candidate's size on each worker; rows, dropout and learning rate are those
    of the run. Everything that a checkpoint holds is restored. Collective.

    Args:
        session: prepared in a precision that keeps weights in the same format as both.
        budget: bytes that this process may have (`is_out_of_memory`).

    Raises:
        RunError: parts of the model are in other processes, whose state cannot be restored.
    """
    if session.trainable.remote.distributed:
        raise RunError("the numeric gate needs the whole model in the workers: experts.hosts=0")
    size, precision, trained = candidate.micro_batch_size, candidate.precision, []
    drawn = session.loader.batches.rows_from(session.state.cursor, size * steps * session.workers.world_size)
    try:
        for name in (reference, precision):
            with _restored(session), computing_as(session, Candidate(name, size)):
                trained.append(_trained(session, np.split(drawn, steps)))
    except (RuntimeError, MemoryError, OutOfMemory) as error:  # such as an operation without a kernel in this dtype
        short = is_out_of_memory(error, device=session.device, budget=budget)
        let_go(error, session.device)
        return GateReport(precision, reference, error=first_line(error), out_of_memory=short)
    (wanted, norms, skipped), (losses, own_norms, own_skipped) = trained
    return GateReport(precision, reference, losses, wanted, own_norms, norms, own_skipped, skipped)


def _trained(session: Session, rows: list[np.ndarray]) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Losses and gradient norms of the steps, and how many steps were skipped; the same on every worker."""
    step, loader, workers, first = session.step, session.loader, session.workers, session.state.step
    last = int(session.job.planned("max_steps"))
    outputs: list[StepOutput] = []
    for number, part in enumerate(rows, start=1):
        cut = [loader.batches.cut(share) for share in np.split(part, workers.world_size)]
        micros, passes = map(loader.one, cut[workers.rank]), max(map(len, cut))
        weight, at = max(1, loader.weight(part)), max(1, min(first + number, last))
        outputs.append(step.run(micros, global_weight=weight, step=at, passes=passes))
    losses = torch.stack([output.loss for output in outputs]).tolist()
    total = [sum(column) for column in zip(*workers.all_gather_floats(losses), strict=True)]
    norms = torch.stack([output.norm.to(torch.float64) for output in outputs]).tolist()
    skipped = sum(bool(output.skip) for output in outputs)
    return tuple(total), tuple(norm if math.isfinite(norm) else math.nan for norm in norms), skipped


@contextlib.contextmanager
def _restored(session: Session) -> Iterator[None]:
    """After real steps inside, everything that a checkpoint holds is restored."""
    trainable = session.trainable
    parts = trainable.state_parts() if trainable.state_parts else {}
    kept = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    try:
        with preserve_model(trainable, session.device), preserve_optimizers(session.optimizers):
            yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(kept[name])


# -- what a search proposes -----------------------------------------------------------------------


def run_proposal(probe: StepProbe, proposal: Proposal, *, reference: str, budget: int | None) -> ProposalResult:
    """Measure what is proposed; changes nothing that it measures. Collective.

    Args:
        reference: the precision that the numeric gate compares with.
        budget: bytes above which a peak counts as out of memory; None: no limit.
    """
    one, steps = proposal.candidate, proposal.gate_steps
    if steps:
        return ProposalResult(gate=run_gate(probe.session, one, reference=reference, steps=steps, budget=budget))
    passes = 0 if proposal.against else proposal.passes
    alone = None
    if passes or proposal.with_memory:
        alone = probe.measure(one, budget=budget, passes=passes, least=LEAST_PASSES, with_memory=proposal.with_memory)
    if not proposal.against or (alone is not None and alone.outcome != "ok"):
        return ProposalResult(measurement=alone)
    rounds = probe.measure_in_turn(
        (one, *proposal.against), budget=budget, rounds=(proposal.passes, proposal.passes), stop_on_failure=True
    )
    return ProposalResult(measurement=alone, contest=rounds)
