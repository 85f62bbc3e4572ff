"""The numeric gate: real optimizer steps in two precisions, from one state and on the same rows. Changes nothing.

One batch shows whether a precision computes nearly the same gradient. Whether it trains as well shows only over several
steps: rounding errors add up, updates may be smaller than the format can represent, and a loss scale has to adapt.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator

import numpy as np
import torch

from raytrain.autotune.probe.state_guard import preserve_model, preserve_optimizers
from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.precision import GateReport
from raytrain.errors import OutOfMemory, RunError, first_line
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.memory.oom import let_go
from raytrain.train.precision.policy import LossScale, apply_matmul, policy_for
from raytrain.train.session import Session
from raytrain.train.step import StepOutput


def run_gate(
    session: Session, candidate: Candidate, *, reference: str, steps: int, budget: int | None = None
) -> GateReport:
    """Train `steps` steps in the candidate's precision and in the reference's, each from the session's current state.

    A step is one micro-batch of the candidate's size on each worker; rows, dropout and learning rate are those of the
    run. Weights, optimizer state, buffers, generators and the order of the data are restored. Collective.

    Args:
        session: prepared in a precision that keeps weights in the same format as both.
        budget: bytes that this process may have (`is_out_of_memory`).

    Raises:
        RunError: parts of the model are in other processes, whose state cannot be restored.
    """
    if session.trainable.remote.distributed:
        raise RunError("the numeric gate needs the whole model in the workers: experts.hosts=0")
    size, workers = candidate.micro_batch_size, session.workers
    drawn = session.loader.batches.rows_from(session.state.cursor, size * steps * workers.world_size)
    rows = np.split(drawn, steps)
    try:
        wanted, other = (_trained(session, name, rows) for name in (reference, candidate.precision))
    except (RuntimeError, MemoryError, OutOfMemory) as error:  # such as an operation without a kernel in this dtype
        short = is_out_of_memory(error, device=session.device, budget=budget)
        let_go(error, session.device)
        return GateReport(candidate.precision, reference, error=first_line(error), out_of_memory=short)
    return GateReport(
        precision=candidate.precision,
        reference=reference,
        losses=other[0],
        reference_losses=wanted[0],
        norms=other[1],
        reference_norms=wanted[1],
        skipped=other[2],
        reference_skipped=wanted[2],
    )


def _trained(
    session: Session, precision: str, rows: list[np.ndarray]
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Losses and gradient norms of the steps, and how many steps were skipped; the same on every worker."""
    step, loader, workers, first = session.step, session.loader, session.workers, session.state.step
    last = int(session.job.planned("max_steps"))
    outputs: list[StepOutput] = []
    with _restored(session), _computing_in(session, precision):
        for number, part in enumerate(rows, start=1):
            cut = [loader.batches.cut(share) for share in np.split(part, workers.world_size)]
            weight = max(1, loader.weight(part))
            at = max(1, min(first + number, last))
            micros, passes = map(loader.one, cut[workers.rank]), max(map(len, cut))
            outputs.append(step.run(micros, global_weight=weight, step=at, passes=passes))
    losses = torch.stack([output.loss for output in outputs]).tolist()
    total = [sum(column) for column in zip(*workers.all_gather_floats(losses), strict=True)]
    norms = torch.stack([output.norm.to(torch.float64) for output in outputs]).tolist()
    skipped = sum(bool(output.skip) for output in outputs)
    return tuple(total), tuple(norm if math.isfinite(norm) else math.nan for norm in norms), skipped


@contextlib.contextmanager
def _computing_in(session: Session, precision: str) -> Iterator[None]:
    """The session's step in another precision, with a loss scale of its own."""
    step = session.step
    kept = step.policy, step.scale
    step.policy = policy_for(precision)
    step.scale = LossScale(session.device, enabled=step.policy.scales_loss)
    apply_matmul(step.policy)
    try:
        yield
    finally:
        step.policy, step.scale = kept
        apply_matmul(kept[0])


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
