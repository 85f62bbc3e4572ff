"""Measures candidates of a search with the real step, in the real process group; changes nothing.

There are two phases, since an exact reading of memory is slow. Memory: the longest rows and the worst-case routing, two
passes that accumulate, the all-reduce, the norm, the clip, an optimizer step that is skipped but allocates its state,
and an evaluation batch. Time: the next rows of the run; each pass and each update is timed, the first of them dropped.

Every worker returns the same measurement: the slowest worker's seconds, the largest peak, and out of memory if one of
them runs out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from raytrain.accelerator import seconds_of
from raytrain.autotune.batch_search import LEAST_PASSES, Measured, Proposal
from raytrain.autotune.measurement import Candidate, Measurement, Outcome, are_steady, beyond_noise, nearly_equal
from raytrain.autotune.preserve import preserve_model, preserve_optimizers, preserve_skipped
from raytrain.data.rows.batches import known_lengths
from raytrain.data.rows.contract import Split
from raytrain.data.rows.map_style import longest_row
from raytrain.errors import OutOfMemory, first_line
from raytrain.plan.batch import EVAL_MICRO_BATCHES
from raytrain.plan.choice import size_text
from raytrain.train.compile import forget_graphs
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.memory.device import PeakMeter, exact_memory, is_out_of_memory, let_go
from raytrain.train.precision import LossScale, apply_matmul, policy_for
from raytrain.train.session import Session
from raytrain.train.step import TrainingStep
from raytrain.trainable import GlobalStep, MicroBatch, in_eval

#: Micro-batches that accumulate while memory is read (from the second on, gradients exist already), and rows of the
#: warm-up on a CPU: memory that a larger size allocates permanently is part of its own peak.
ACCUMULATED = FEW_ROWS = 2
#: Steps over which the optimizer alone is timed, once for each probe.
OPTIMIZER_STEPS = 3
#: How often a new loss scale of fp16 is halved before a gradient counts as not finite.
HALVINGS = 24
#: Rounds continue until this much time has passed, within the bounds that a caller gives.
BUDGET_S = 2.0
#: The same for the comparison at the end of a search, whose rounds go on only where their times vary.
COMPARISON_S = 8.0
#: Until the rounds have taken so long, a clear result is no reason to stop: a few of milliseconds may all fall into one
#: burst of other work, and every look at the times is one more chance to be misled.
CHEAP_S = 0.25

Clear = Callable[[list[list[float]]], bool]


def _told_apart(points: Sequence[Candidate], seconds: list[list[float]]) -> bool:
    """Whether rounds in turn are steady, or tell the first candidate from all of other precisions, one way or the
    other."""
    row_s = [[one / point.micro_batch_size for one in way] for point, way in zip(points, seconds, strict=True)]
    others = [way for point, way in zip(points, row_s, strict=True) if point.precision != points[0].precision]
    clear = (beyond_noise(row_s[0], way) or beyond_noise(way, row_s[0]) for way in others)
    return all(map(are_steady, seconds)) or all(clear)


def run_agreed(work: Callable[[], object], step: TrainingStep, budget: int | None = None) -> tuple[Outcome, str]:
    """Run a part of a measurement of `step` on all workers; the outcome, the same on every one, and the reason of a
    failure, after which its passes are discarded, also on remote hosts. Collective.

    It may fail on one worker, or on a host that holds a part of the model. A worker that fails in the middle of its
    passes tells the hosts (`RemoteState.end_passes`), so that the failure is a result and does not end the attempt.

    `work` contains no collective except the passes of a model with remote state, and every worker starts the same
    number of those. With collective passes, which no worker can leave (`fsdp`), a failure is raised, and ends the
    attempt. `budget`: see `is_out_of_memory`.
    """
    remote, workers = step.trainable.remote, step.workers
    outcome: Outcome = "ok"
    reason = ""
    try:
        work()
    except (RuntimeError, ValueError, MemoryError, OutOfMemory) as error:
        if step.collective_passes and not remote.distributed and workers.world_size > 1:
            raise
        outcome = "out_of_memory" if is_out_of_memory(error, device=step.device, budget=budget) else "error"
        reason = first_line(error)
        let_go(error, step.device)
    remote.end_passes(short=outcome != "ok")
    short, failed = workers.all_reduce_ints([int(outcome == "out_of_memory"), int(outcome == "error")])
    if not short and not failed:
        hosts = remote.shortages()
        short, reason = len(hosts), "; ".join(map(str, hosts))
    if not short and not failed:
        return "ok", ""
    remote.discard()
    return "out_of_memory" if short else "error", reason or "on another worker"


@dataclass
class _Reading:
    """What one measurement of a candidate has read on this worker."""

    candidate: Candidate
    budget: int | None
    pass_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    peak: int | None = None
    floor: int | None = None
    loss: float = math.nan
    norm: float = math.nan
    outcome: Outcome = "ok"
    reason: str = ""


@dataclass(frozen=True)
class PassTimes:
    """What one way to compute showed, the same on every worker: the slowest worker's seconds of each timed round, why
    it failed (or ""), and whether nothing told rank 0 what a loss is a mean over."""

    round_s: tuple[float, ...]
    error: str = ""
    weight_unknown: bool = False


@contextlib.contextmanager
def computing_as(session: Session, candidate: Candidate, scale: LossScale | None = None) -> Iterator[None]:
    """The session's step computes in the candidate's precision, with a loss scale of its own, and with micro-batches of
    its size; all are restored."""
    step, batches = session.step, session.loader.batches
    kept = step.policy, step.scale, batches.micro_batch
    policy = policy_for(candidate.precision)
    if policy.master_dtype is not kept[0].master_dtype:
        raise ValueError(
            f"{candidate.precision} keeps weights as {policy.master_dtype}, this session was prepared with "
            f"{kept[0].master_dtype}: prepare another session for it"
        )
    step.policy, batches.micro_batch = policy, candidate.micro_batch_size
    step.scale = scale or LossScale(session.device, enabled=policy.scales_loss)
    apply_matmul(policy)
    try:
        yield
    finally:
        step.policy, step.scale, batches.micro_batch = kept
        apply_matmul(kept[0])


class StepProbe:
    """Measures candidates with the step of a prepared session; collective over its workers.

    Every worker measures the same candidates in the same order, and gets the same measurement. The device should do
    nothing else meanwhile. The rows are those that training would use next; reading them moves nothing.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step, self.loader, self.eval_split = session.step, session.loader, session.source.eval
        self.device, self.workers = session.device, session.workers
        self._cursor, splits = session.state.cursor, (self.loader.batches.split, self.eval_split)
        self._longest = {id(split): longest_row(split) for split in splits if split}
        self._optimizer_s: float | None = None

    def run_proposal(self, proposal: Proposal, *, budget: int | None) -> Measured:
        """Measure what a search proposes; changes nothing that it measures. Collective. `budget`: bytes above which a
        peak counts as out of memory; None: no limit."""
        one, passes, alone = proposal.candidate, 0 if proposal.against else proposal.passes, None
        if passes or proposal.with_memory:
            with_memory = proposal.with_memory
            alone = self.measure(one, budget=budget, passes=passes, least=LEAST_PASSES, with_memory=with_memory)
            if not proposal.against or alone.outcome != "ok":
                return (alone,)
        first, *others = self.measure_in_turn(  # of times that vary, three rounds show nothing: see `beyond_noise`
            (one, *proposal.against), budget=budget, rounds=(proposal.passes, 4 * proposal.passes),
            budget_s=COMPARISON_S, stop_on_failure=True, clear=partial(_told_apart, (one, *proposal.against)),
        )  # fmt: skip
        if alone is not None:
            first = replace(first, peak_bytes=alone.peak_bytes, floor_bytes=alone.floor_bytes)
        return (first, *others)

    def measure(
        self, candidate: Candidate, *, budget: int | None, passes: int, with_memory: bool, least: int | None = None
    ) -> Measurement:
        """Measure a candidate: its memory if asked for, then, if it fits, `passes` passes and updates, or from `least`
        on as soon as two in succession took about the same time. Collective; changes nothing. A peak above `budget`
        bytes counts as out of memory."""
        memory = Measurement(candidate, "ok")
        if with_memory:
            one = _Reading(candidate, budget)
            with (
                computing_as(self.session, candidate),
                preserve_model(self.step.trainable, self.device, worst=True),
                preserve_skipped(self.step.optimizers),
            ):
                self._read_memory(one)
            memory = self._agreed(one)
        if not passes or memory.outcome != "ok":
            return memory
        rounds = (passes if least is None else least, passes)
        alike: Clear = (lambda _seconds: False) if least is None else (lambda seconds: nearly_equal(seconds[0]))
        (timed,) = self.measure_in_turn([candidate], budget=budget, rounds=rounds, budget_s=math.inf, clear=alike)
        return replace(timed, peak_bytes=memory.peak_bytes, floor_bytes=memory.floor_bytes)

    def measure_in_turn(
        self, candidates: Sequence[Candidate], *, budget: int | None, rounds: tuple[int, int], updates: bool = True,
        budget_s: float = BUDGET_S, stop_on_failure: bool = False, clear: Clear = lambda _seconds: False,
    ) -> tuple[Measurement, ...]:  # fmt: skip
        """Measure several candidates in alternating rounds of one pass and one update each, all with the same random
        numbers; the first round is dropped. Pass i of all measurements is from round i. Collective; changes nothing.

        Args:
            rounds, budget_s, clear: see `_in_turn`.
            updates: passes alone are enough if False; the norm is then that of this worker's gradient.
            stop_on_failure: if one fails the comparison ends, and candidates that had not started are missing from the
                result; else the others go on without it.
        """
        scales = [LossScale(self.device, enabled=policy_for(one.precision).scales_loss) for one in candidates]
        rows = [self.rows(one.micro_batch_size, passes=1, longest=False) for one in candidates]
        readings: dict[int, _Reading] = {}

        def run(index: int) -> tuple[float, str]:
            warm_up = index not in readings
            one, seconds = readings.setdefault(index, _Reading(candidates[index], budget)), math.nan

            def timed() -> None:
                nonlocal seconds  # rows that processes read are read before the clock starts
                read = [self.loader.one(part) for part in rows[index]] if self.loader.pool else None
                began = seconds_of(self.device)
                self._backward(rows[index], read)
                seconds = seconds_of(self.device) - began

            with computing_as(self.session, one.candidate, scales[index]):
                fine = self._first(rows[index], one) if warm_up else self._try(timed, one)
                if fine and updates:
                    fine = self._try_update(one, timed=not warm_up)
                elif fine:
                    one.norm = float(self.step.gradients.sum_of_squares().sqrt() * scales[index].inverse)
                    self.step.gradients.zero_()
            return seconds, "" if fine else one.reason or one.outcome

        own = self._optimizer_seconds() if updates else 0.0
        with preserve_skipped(self.step.optimizers) if updates else contextlib.nullcontext():
            times, _ = self._in_turn(len(candidates), run, rounds, budget_s, stop_on_failure, clear)
        for index, one in readings.items():
            one.pass_s = times[index] if one.outcome == "ok" else []
            one.update_s = [seconds + own for seconds in one.update_s]
        return tuple(map(self._agreed, readings.values()))

    def passes_in_turn(
        self, befores: Sequence[Callable[[], object]], *, rounds: tuple[int, int]
    ) -> tuple[list[PassTimes], float]:
        """Time the first micro-batch of each worker after each of `befores` in turn, until one fails. Changes nothing
        that it measures. Collective. Returns the times; how many times as much a step does."""
        loader, step = self.loader, self.step
        indices, before = loader.global_batch(self.session.state.cursor).indices, step.weight_unknown
        rows = indices[: loader.batches.micro_batch * self.workers.world_size]
        passes, unknown = loader.passes(rows), [False] * len(befores)

        def run(index: int) -> tuple[float, str]:
            seconds = math.nan

            def timed() -> None:
                nonlocal seconds
                befores[index]()
                began, step.weight_unknown = seconds_of(self.device), False
                step.backward(loader.micro_batches(rows), global_weight=1, passes=passes)
                seconds, unknown[index] = seconds_of(self.device) - began, step.weight_unknown

            _, reason = run_agreed(timed, step)
            return seconds, reason

        seconds, errors = self._in_turn(len(befores), run, rounds, BUDGET_S, True, lambda _seconds: False)
        step.weight_unknown = before
        everybody = self.workers.all_gather_object([seconds, unknown])
        slowest = [tuple(map(max, zip(*own, strict=True))) for own in zip(*(row[0] for row in everybody), strict=True)]
        first = everybody[0][1]
        found = [PassTimes(one, errors.get(at, ""), first[at]) for at, one in enumerate(slowest)]
        return found, loader.passes(indices) / passes

    def _in_turn(
        self, ways: int, run: Callable[[int], tuple[float, str]], rounds: tuple[int, int], budget_s: float,
        stop_on_failure: bool, clear: Clear,
    ) -> tuple[list[list[float]], dict[int, str]]:  # fmt: skip
        """Run several ways to compute in alternating rounds after one warm-up round, all with the same random numbers,
        so that other work on the machine affects all alike. Changes nothing that it measures. Collective.

        Args:
            run: is given the index of a way; its seconds, and why it failed on any worker, or "". One that failed is
                not run again.
            rounds: at least, and at most if those take less than `budget_s` seconds.
            clear: whether, after the least rounds and `CHEAP_S`, this worker's seconds of each way need no more of
                them. The rounds end once they need none on any worker.

        Returns:
            This worker's seconds of the timed rounds of each way; why ways failed, by index.
        """
        seconds: list[list[float]] = [[] for _ in range(ways)]
        errors: dict[int, str] = {}
        with preserve_model(self.session.trainable, self.device):
            generators, begin = rng_state(self.device), time.perf_counter()
            for number in range(rounds[1] + 1):
                for index in (one for one in range(ways) if one not in errors):
                    set_rng_state(generators, self.device)
                    spent, reason = run(index)
                    if reason:
                        errors[index] = reason
                        if stop_on_failure:
                            break
                    elif number > 0:
                        seconds[index].append(spent)
                least = number >= rounds[0]
                late = least and time.perf_counter() - begin > budget_s
                settled = least and sum(map(sum, seconds)) >= CHEAP_S and clear(seconds)
                some_late, all_settled = self.workers.all_reduce_ints([int(late), int(settled)])
                if (stop_on_failure and errors) or some_late or all_settled == self.workers.world_size:
                    break
        return seconds, errors

    # -- rows -------------------------------------------------------------------------------------

    def rows(self, micro: int, *, passes: int, longest: bool) -> list[np.ndarray]:
        """This worker's micro-batches: rows of the epoch from the cursor on, continued from its start where it ends.

        `passes` times `micro` rows; under a token budget each of them is several micro-batches, equally many on every
        worker. `longest`: only the two largest possible ones, that with the longest row and that with most tokens.
        """
        batches, world_size, rank = self.loader.batches, self.workers.world_size, self.workers.rank
        drawn = np.split(batches.rows_from(self._cursor, micro * passes * world_size), passes * world_size)
        own = slice(rank * passes, (rank + 1) * passes)
        cut = [batches.cut(part) for part in drawn]
        if longest:
            first = [self.longest_first(batches.split, part) for part in drawn[own]]
            if batches.tokens_per_batch is None:
                return first
            tokens = lambda rows: len(rows) * int(known_lengths(batches.split, rows).max())  # noqa: E731
            heavy = [max(parts, key=tokens) for parts in cut[own]]
            return [part for pair in zip(first, heavy, strict=True) for part in pair]
        most = max(map(len, cut))
        return [part for parts in cut[own] for part in [*parts, *parts[:1] * (most - len(parts))]]

    def longest_first(self, split: Split, rows: np.ndarray, *, times: int = 1) -> np.ndarray:
        """These rows with the longest row of the split among them, to which the others are padded; no more rows than
        `times` the token budget allows."""
        longest = self._longest[id(split)]
        rows = rows if longest is None else np.concatenate([[longest.row], rows[1:]])
        return self.loader.batches.fitting(rows, split, times=times)

    # -- memory -----------------------------------------------------------------------------------

    def _read_memory(self, one: _Reading) -> None:
        forget_graphs()  # of other sizes, which would count in the floor
        micro = one.candidate.micro_batch_size
        with exact_memory(self.device):
            # before the meter starts: what the model and its kernels allocate permanently is not due to rows
            rows = self.rows(micro, passes=ACCUMULATED, longest=True)
            few = rows[0] if self.device.type == "cuda" else rows[0][:FEW_ROWS]
            if not (self._try(partial(self._warm_up, few), one) and self._try_update(one)):
                return
            meter = PeakMeter(self.device)
            one.floor = meter.floor
            fits = self._first(rows, one) and self._try_update(one)
            if fits and self.eval_split is not None:
                fits = self._try(partial(self._evaluate, micro), one)
            one.peak = meter.peak() if fits else None

    def _warm_up(self, rows: np.ndarray) -> None:
        self._backward([rows])
        if self.eval_split is not None:
            self._evaluate(len(rows))
        self.step.gradients.scale_(0.0)

    def _evaluate(self, micro: int) -> None:
        split = self.eval_split
        assert split is not None, "called only where there is one"
        rows = split.eval_order()[: EVAL_MICRO_BATCHES * micro]
        rows = self.longest_first(split, rows, times=EVAL_MICRO_BATCHES)
        batch = self.loader.one(rows, split=split)
        with in_eval(self.step.trainable.module), torch.no_grad():
            self.step.forward(batch.batch, global_weight=max(1, batch.weight))

    # -- the parts of a step ----------------------------------------------------------------------

    def _first(self, rows: list[np.ndarray], one: _Reading) -> bool:
        """The first passes, which also give the loss; under fp16 all workers repeat them with a lower loss scale until
        every worker's gradient is finite. Returns whether they succeeded on every worker."""

        def passes() -> None:
            one.loss = self._backward(rows)

        scale = self.step.scale
        for _ in range(HALVINGS if scale.enabled else 1):
            if not self._try(passes, one):
                return False
            works = not scale.enabled or math.isfinite(float(self.step.gradients.sum_of_squares()))
            if not self.workers.all_reduce_ints([int(not works)])[0]:
                return True
            scale.update(torch.ones((), dtype=torch.bool, device=self.device))
        return True

    def _backward(self, rows: list[np.ndarray], read: list[MicroBatch] | None = None) -> float:
        """Accumulate forward and backward of these micro-batches; the mean loss over this worker's rows."""
        weight = sum(self.loader.weight(part) for part in rows) if read is None else sum(one.weight for one in read)
        micros = (self.loader.one(part) for part in rows) if read is None else iter(read)
        passed = self.step.backward(micros, global_weight=max(1, weight), passes=len(rows))
        return float(passed.loss + passed.aux)

    def _try_update(self, one: _Reading, *, timed: bool = False) -> bool:
        """All-reduce, norm, clip and the optimizers' step, which is skipped where the device can. Every worker's passes
        have succeeded, so all join the all-reduce; what can fail on a single worker follows it."""
        step = self.step

        def update() -> None:
            if step.scale.enabled:
                step.gradients.scale_(step.scale.inverse)
            norm = step.gradients.sum_of_squares().sqrt()
            step.update(GlobalStep(norm=norm, skip=torch.tensor(step.skips_on_device, device=self.device)), step=1)
            one.norm = float(norm) / self.workers.world_size  # each worker's gradient is of the mean over its own rows
            ended.append(seconds_of(self.device))

        ended: list[float] = []
        began = seconds_of(self.device)
        step.workers.all_reduce(step.gradients.buffers)
        fine = self._try(update, one)
        if fine and timed:
            one.update_s.append(ended[0] - began)
        return fine

    def _optimizer_seconds(self) -> float:
        """Seconds of one real optimizer step, where `_try_update` skips it on the device. They do not depend on the
        candidate, so they are measured once."""
        if not self.step.skips_on_device:
            return 0.0
        if self._optimizer_s is None:
            norm, no = torch.ones((), device=self.device), torch.zeros((), dtype=torch.bool, device=self.device)
            times: list[float] = []
            with preserve_optimizers(self.step.optimizers):
                for _ in range(1 + OPTIMIZER_STEPS):
                    began = seconds_of(self.device)
                    self.step.update(GlobalStep(norm=norm, skip=no), step=1)
                    times.append(seconds_of(self.device) - began)
            self._optimizer_s = median(times[1:])
        return self._optimizer_s

    # -- agreement --------------------------------------------------------------------------------

    def _try(self, work: Callable[[], object], one: _Reading) -> bool:
        """Whether it succeeded on every worker; if not, the reading has the outcome and the reason."""
        outcome, reason = run_agreed(work, self.step, one.budget)
        if outcome != "ok":
            one.outcome, one.reason = outcome, reason
            one.pass_s, one.update_s = [], []  # lengths differ between workers
        return outcome == "ok"

    def _agreed(self, one: _Reading) -> Measurement:
        """The measurement over all workers. A peak that an error interrupted is left out."""
        figures = [float(one.peak or 0), float(one.floor or 0), time.time(), one.loss]
        rows = self.workers.all_gather_floats([*figures, *one.pass_s, *one.update_s])
        peak, floor, ended, _, *slowest = (max(column) for column in zip(*rows, strict=True))
        loss = sum(row[3] for row in rows) / len(rows)
        outcome, reason, budget, count = one.outcome, one.reason, one.budget, len(one.pass_s)
        if outcome == "ok" and budget is not None and peak > budget:
            outcome, reason = "out_of_memory", f"a peak of {size_text(int(peak))}, the budget is {size_text(budget)}"
        if outcome == "ok" and not (math.isfinite(loss) and math.isfinite(one.norm)):
            outcome, reason = "nonfinite", f"loss {loss:.6g}, gradient norm {one.norm:.6g}"
        return Measurement(
            one.candidate, outcome, pass_s=tuple(slowest[:count]), update_s=tuple(slowest[count:]),
            peak_bytes=None if one.peak is None else int(peak), floor_bytes=None if one.floor is None else int(floor),
            loss=loss, grad_norm=one.norm, reason=reason, taken_at=ended,
        )  # fmt: skip
