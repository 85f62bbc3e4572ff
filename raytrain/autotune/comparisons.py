"""Comparisons on the real model: ways to compute the same thing timed in alternating rounds, and real steps in two
precisions from one state. Nothing that they measure changes.

Rounds alternate, so that other work on the machine affects all ways alike.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raytrain.accelerator import seconds_of
from raytrain.autotune.batch_search import LEAST_PASSES, Contest, Proposal
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import GateReport, PrecisionTrial, has_winner
from raytrain.autotune.state_guard import preserve_model, preserve_optimizers
from raytrain.autotune.step_probe import StepProbe, computing_as, run_agreed
from raytrain.errors import OutOfMemory, RunError, first_line
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.memory.device import is_out_of_memory, let_go
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.precision import PrecisionPolicy, policy_for
from raytrain.train.session import Session
from raytrain.train.step import StepOutput
from raytrain.trainable import MicroBatch, Trainable

#: Rounds continue until this much time has passed, within the bounds that a caller gives.
BUDGET_S = 2.0
#: Until the rounds have taken so long, a clear result is no reason to stop: a few of milliseconds may all fall into one
#: burst of other work, and every look at the times is one more chance to be misled.
CHEAP_S = 0.25
#: Rounds of a comparison of precisions.
MIN_ROUNDS, MAX_ROUNDS = 3, 12


@dataclass(frozen=True)
class TimedArm:
    """One way to compute.

    Attributes:
        work: what is timed.
        before: runs before the clock starts.
        values: reads what was computed, after the clock has stopped.
    """

    work: Callable[[], object]
    before: Callable[[], object] = lambda: None
    values: Callable[[], Sequence[float]] = tuple


@dataclass(frozen=True)
class ArmTimes:
    """What one arm showed, the same on every worker.

    Attributes:
        seconds: for each worker those of every timed round.
        values: rank 0's, of the last round.
        error: why the arm failed, or "".
    """

    seconds: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    error: str

    @property
    def median_s(self) -> float:
        """The largest of the workers' medians; infinite if nothing was timed."""
        return max(statistics.median(own) if own else float("inf") for own in self.seconds)

    @property
    def round_s(self) -> list[float]:
        """The slowest worker's seconds of each round."""
        return [max(round_s) for round_s in zip(*self.seconds, strict=True)]


def timed_arms(
    arms: Sequence[TimedArm], *, trainable: Trainable, workers: Workers, device: torch.device, min_rounds: int,
    max_rounds: int, budget_s: float = BUDGET_S, attempt: Callable[[Callable[[], object]], str] | None = None,
    stop_on_failure: bool = False, decided: Callable[[list[list[float]]], bool] = lambda _seconds: False,
    clear: Callable[[list[list[float]]], bool] = lambda _seconds: False,
) -> list[ArmTimes]:  # fmt: skip
    """Time all arms in alternating rounds after one warm-up round, every arm with the same random numbers. Changes
    nothing that it measures. Collective.

    Args:
        attempt: runs an arm, and returns why that failed on any worker, or "". A failed arm is not run again. Without
            it failures are raised.
        stop_on_failure: with one failed arm the others are of no interest.
        decided: whether this worker's seconds by arm need no `min_rounds`.
        clear: whether, after `min_rounds` and `CHEAP_S`, this worker's seconds by arm need no more of the budget. The
            rounds end once they need none on any worker.
    """
    seconds: list[list[float]] = [[] for _ in arms]
    values: list[Sequence[float]] = [() for _ in arms]
    errors: dict[int, str] = {}
    with preserve_model(trainable, device):
        generators, begin = rng_state(device), time.perf_counter()
        for round_number in range(max_rounds + 1):
            for index, arm in enumerate(arms):
                if index in errors:
                    continue
                set_rng_state(generators, device)
                spent: list[float] = []

                def run(arm: TimedArm = arm, spent: list[float] = spent, index: int = index) -> None:
                    arm.before()
                    begin = seconds_of(device)
                    arm.work()
                    spent.append(seconds_of(device) - begin)
                    values[index] = arm.values()

                reason = "" if attempt is None else attempt(run)
                if attempt is None:
                    run()
                if reason:
                    errors[index] = reason
                    if stop_on_failure:
                        break
                elif round_number:
                    seconds[index] += spent
            enough = round_number >= min_rounds or decided(seconds)
            enough = enough and time.perf_counter() - begin > budget_s
            cheap = sum(map(sum, seconds)) < CHEAP_S
            settled = round_number >= min_rounds and not cheap and clear(seconds)
            some, all_of = workers.all_reduce_ints([int(enough), int(settled)])
            if (stop_on_failure and errors) or some or all_of == workers.world_size:
                break
    shown = [tuple(values[index]) if index not in errors else () for index in range(len(arms))]
    everybody = workers.all_gather_object((seconds, shown))
    return [
        ArmTimes(tuple(tuple(own[index]) for own, _ in everybody), tuple(everybody[0][1][index]), errors.get(index, ""))
        for index in range(len(arms))
    ]


def timed_passes(
    session: Session, befores: Sequence[Callable[[], object]], *, most: int, rounds: tuple[int, int]
) -> tuple[list[ArmTimes], float]:
    """Time the first `most` micro-batches of each worker after each of `befores` in turn, at least and at most so many
    rounds, until one fails. Changes nothing that it measures. Collective.

    Returns:
        The times, with the value 1 where nothing told what a loss is a mean over; how many times as much a step does.
    """
    loader, step, workers, device = session.loader, session.step, session.workers, session.device
    indices, untold = loader.global_batch(session.state.cursor).indices, step.untold
    rows = indices[: most * loader.batches.micro_batch * workers.world_size]
    passes, remote = loader.passes(rows), session.trainable.remote

    def work() -> None:
        step.untold = False
        step.backward(loader.micro_batches(rows), global_weight=1, passes=passes)

    def attempt(work: Callable[[], object]) -> str:
        collective = step.collective_passes
        return run_agreed(work, workers=workers, device=device, remote=remote, collective_passes=collective)[1]

    times = timed_arms(
        [TimedArm(work, before=before, values=lambda: [float(step.untold)]) for before in befores],
        trainable=session.trainable, workers=workers, device=device, min_rounds=rounds[0], max_rounds=rounds[1],
        attempt=attempt, stop_on_failure=True,
    )  # fmt: skip
    step.untold = untold
    return times, loader.passes(indices) / passes


def compare_precisions(
    trainable: Trainable, micro: MicroBatch, *, candidates: list[str], gradients: GradientBuffers, workers: Workers,
    device: torch.device, budget_s: float = BUDGET_S,
) -> list[PrecisionTrial]:  # fmt: skip
    """Time forward and backward of one micro-batch in each precision; changes nothing. Collective.

    Every worker returns the same trials: the slowest worker's median, rank 0's loss and gradient norm. A precision that
    fails, because memory runs out or an operation has no kernel in this dtype, is a trial with an error.
    """
    loss: list[Tensor] = []

    def arm(policy: PrecisionPolicy) -> TimedArm:
        def work() -> None:
            loss[:] = [backward_of(trainable, micro, policy, device)]
            gradients.check()

        return TimedArm(
            work, before=gradients.zero_, values=lambda: (float(loss[0]), float(gradients.sum_of_squares().sqrt()))
        )

    times = timed_arms(
        [arm(policy_for(name)) for name in candidates],
        trainable=trainable, workers=workers, device=device, min_rounds=MIN_ROUNDS, max_rounds=MAX_ROUNDS,
        budget_s=budget_s, clear=has_winner,
        attempt=lambda work: run_agreed(work, workers=workers, device=device, remote=trainable.remote)[1],
    )  # fmt: skip
    trials = []
    for name, timed in zip(candidates, times, strict=True):
        rounds = () if timed.error else tuple(timed.round_s)
        shown = timed.values or (0.0, 0.0)
        trials.append(PrecisionTrial(name, timed.median_s, *shown, error=timed.error or None, rounds=rounds))
    return trials


def backward_of(trainable: Trainable, micro: MicroBatch, policy: PrecisionPolicy, device: torch.device) -> Tensor:
    """Forward and backward of one micro-batch in a precision; its loss."""
    with policy.autocast(device):
        extra = {"num_items_in_batch": max(1, micro.weight)} if trainable.takes_global_count else {}
        output = trainable.loss(trainable.module, micro.batch, **extra)
    loss = output.loss if output.aux is None else output.loss + output.aux
    loss.backward()
    return loss.detach()


# -- the numeric gate -----------------------------------------------------------------------------


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


@dataclass(frozen=True)
class ProposalResult:
    """The results of a proposal; if the leader of a contest does not fit, only the measurement that shows it."""

    measurement: Measurement | None = None
    gate: GateReport | None = None
    contest: Contest | None = None


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
    rounds = probe.measure_in_turn((one, *proposal.against), budget=budget, rounds=proposal.passes)
    return ProposalResult(measurement=alone, contest=rounds)
