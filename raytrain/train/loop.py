"""The training loop. Independent of Ray; every process of a run executes the same iterations.

    start -> [ global batch -> step -> (log) -> (eval) -> (checkpoint) -> (stop?) ]* -> end

Decisions that a clock or a signal could make differently on two workers (stop, save) are made by rank 0 and summed with
the gradients of each step. Device values are read once for each logged row; between rows, the number of failed steps in
a row arrives on the host two steps later (`NonFinite`). Where a worker runs out of memory in a step, all retry it in
smaller micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.telemetry.work import EVALUATING, SAVING, WORK
from cluster.wording import counted
from raytrain.config.messages import abbreviated
from raytrain.errors import RunError, first_line, message_of
from raytrain.runs.records import EvalRecord
from raytrain.train.clock import Clock, Fetching
from raytrain.train.compute.compile import forget_graphs
from raytrain.train.compute.switches import Switches
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.allocator import release_cached
from raytrain.train.memory.micro_batch import MicroBatchSize
from raytrain.train.memory.oom import Shortage, run_or_shortage
from raytrain.train.memory.retry import ShortageRetry
from raytrain.train.parallel.buffer_sync import BufferSync
from raytrain.train.row import LogInterval, read_row
from raytrain.train.state import LoopLimits, LoopOutcome, LoopState, NonFinite, Reporter, Saver
from raytrain.train.step import StepOutput, TrainingStep
from raytrain.trainable import MicroBatch

#: Parameters that a message about nonfinite gradients names.
NAMED_AT_MOST = 5
UNTOLD = (
    "the loss adds means over different counts, or is compiled as a whole: its micro-batches count by their rows or "
    'labels, which may differ from one mean over the global batch; return what it is a mean over as "weight" beside it'
)


@dataclass(eq=False, kw_only=True)
class TrainingLoop:
    """One attempt's loop on one worker.

    Args:
        step: the optimizer step.
        loader: the rows of each global batch, as this worker's micro-batches.
        evaluate: `() -> EvalRecord-like mapping` over the eval split, collective; None without an eval split.
        limits: when to stop, log and evaluate.
        reporter, saver: rank 0's write; those of the other workers do nothing.
        should_stop: rank 0's stop flag (a signal arrived), read once a step; with several workers before the step.
        peak_memory: `() -> bytes` for the logged rows.
        memory: further figures of this worker's memory for the logged rows.
        full_rate: samples per second of this worker's device at its peak, for their MFU; 0 where unknown.
        clock: the attempt's, where several loops make up one attempt.
        sizing: the micro-batch size, across out-of-memory errors.
        switches: what the session has switched on.
    """

    step: TrainingStep
    loader: BatchLoader
    evaluate: Callable[[int], dict[str, Any]] | None
    limits: LoopLimits
    reporter: Reporter
    saver: Saver
    should_stop: Callable[[], bool]
    peak_memory: Callable[[], int]
    memory: Callable[[], dict[str, int]] = dict
    full_rate: Callable[[], float] = float
    clock: Clock = field(default_factory=Clock)
    sizing: MicroBatchSize
    switches: Switches

    def __post_init__(self) -> None:
        self._retry = ShortageRetry(
            self.step, self.loader, sizing=self.sizing, reporter=self.reporter, forget=forget_graphs
        )
        self._buffers = BufferSync(self.step.trainable.module, self.step.workers, self.step.changes)
        self._nonfinite = NonFinite(self.step.device)
        self._culprit = ""
        self._clears = 0
        self._said_untold = False
        self._skipped_before = 0
        self._interval = LogInterval()
        self.activity = ""
        """What the loop does besides steps, for whoever shows its progress; read from another thread."""

    def run(self, state: LoopState) -> LoopOutcome:
        """Train from `state` to the end, a stop or a rollback; `state` is advanced in place."""
        self._skipped_before, self.step.weight_unit = state.skipped_steps, state.weight_unit
        self.switches.compile_seconds()  # those of probes, which ran before this attempt's clock started
        self._interval.since = time.perf_counter()
        while state.step < self.limits.max_steps:
            output = self._one_step(state)
            self._clear(state.step)
            last = state.step == self.limits.max_steps
            if last or self._row_due(state):
                failed = self._log(state, output)
                if failed >= (limit := self.limits.nonfinite_steps):
                    why = f"{failed} steps in a row were not finite"
                    if failed > limit:  # a step does not wait for what the device finds in it
                        why += f" (the limit is {limit}; {failed - limit} more ran before it was noticed)"
                    return LoopOutcome("rollback", f"{why} ({self._culprit})" if self._culprit else why, failed)
            every = self.limits.eval_every
            if self.evaluate is not None and (last or (every and state.step % every == 0)):
                self._evaluate(state)
            stop, save = self._stop_or_save(state.step, output)
            plateau = self._plateau(state)
            ends, best = last or stop or plateau, state.best_step == state.step
            if ends or save or best:
                self._save(state, final=ends, only_best=best and not (ends or save))
            if plateau:
                return LoopOutcome("plateau", f"no gain of eval loss in {state.evals_without_gain} evaluations")
            if stop and not last:
                return LoopOutcome("interrupted", "a stop was asked for")
        return LoopOutcome("done", counted(state.step, "step"))

    # -- one step ---------------------------------------------------------------------------------

    def _one_step(self, state: LoopState) -> StepOutput:
        begin = time.perf_counter()
        indices, following = self.loader.global_batch(state.cursor)
        number = state.step + 1
        self._fetching = fetching = Fetching()
        try:
            output = self._retry.run(lambda: self._run_step(indices, number), step=number)
        except Exception as error:
            why = self.loader.float64.explained(error) or one_row_explained(error, rows=len(indices))
            if why is None:
                raise
            raise RunError(f"step {number}: {why}") from error
        self._retry.after_step(number)
        split = self.step.workers.world_size > 1 or self.loader.passes(indices) > 1
        if self.step.untold and split and not self._said_untold:
            self._said_untold = True
            self.reporter.event("decision", what="loss_weight", value="rows or labels", step=number, reason=UNTOLD)
        self._report_sent(self._buffers.after_step(), step=number)
        state.step, state.weight_unit = number, self.step.weight_unit
        self._epoch, state.cursor = state.cursor.epoch, following
        for kind, fields in [*self.loader.notices(), *self.step.trainable.remote.notices()]:
            self.reporter.event(kind, **fields)
        scale = self.step.scale
        self._nonfinite.add(output.skip, scale=scale.value if scale.enabled else None)
        seconds = time.perf_counter() - begin - self._compiled(number)
        self.clock.add("data", fetching.seconds)
        self.clock.add("communication", output.communication_s)
        self.clock.add("compute", seconds - fetching.seconds - output.communication_s)
        tokens = len(indices) * self.loader.tokens_per_row
        waited_s = output.communication_s
        self._interval.add(seconds, fetching, waited_s=waited_s, samples=len(indices), tokens=tokens)
        return output

    def _clear(self, step: int) -> None:
        """Release cached memory where `loop.clear_every` asks for it; rows count how often, in this attempt."""
        if self.limits.clear_every and step % self.limits.clear_every == 0:
            release_cached(self.step.device)
            self._clears += 1

    def _report_sent(self, names: list[str], *, step: int) -> None:
        """Report the buffers and parameters that are sent to all workers after every step from now on."""
        if names:
            reason = "they differ between workers after a step, so rank 0's are sent to all of them, as DDP does"
            self.reporter.event("decision", what="buffers", value=names, step=step, reason=reason)

    def _run_step(self, indices: np.ndarray, number: int) -> StepOutput:
        """Step `number` over these rows, in micro-batches of the size in force. Raises StepDropped."""
        weight = self.loader.global_weight(indices)
        micros: Iterator[MicroBatch] | list[MicroBatch] = self._micro_batches(indices)
        if weight is None:
            micros, weight = self._fetch_all(micros)
        if weight <= 0:
            raise RunError(
                f"step {number}: the {len(indices)} rows of this global batch hold nothing to average over "
                "(every label is -100); fix data.source"
            )
        several = self.step.workers.world_size > 1
        return self.step.run(
            micros,
            global_weight=weight,
            step=number,
            passes=self.loader.passes(indices),
            flags=(lambda: self._requests(number)) if several else list,
        )

    def _fetch_all(self, micros: Iterator[MicroBatch]) -> tuple[list[MicroBatch], int]:
        """This worker's micro-batches and the weight of all workers', where only the batches themselves tell it."""
        workers = self.step.workers
        result = run_or_shortage(lambda: list(micros), device=self.step.device, who=f"rank {workers.rank}")
        own = [] if isinstance(result, Shortage) else result
        weight, short = workers.all_reduce_ints([sum(micro.weight for micro in own), int(isinstance(result, Shortage))])
        if short:
            raise self.step.reduction.dropped(result)
        return own, weight

    def _micro_batches(self, indices: np.ndarray) -> Iterator[MicroBatch]:
        """This worker's micro-batches; the seconds spent waiting for them are counted separately."""
        for micro in self._fetching.timed(self.loader.micro_batches(indices)):
            self.switches.observe(micro.batch)
            yield micro
            WORK.add()

    def _requests(self, step: int) -> list[int]:
        """Rank 0's requests for after `step`: (stop, save); zeros on the other workers."""
        first = self.step.workers.rank == 0
        return [int(first and self.should_stop()), int(first and self.saver.due(step))]

    def _stop_or_save(self, step: int, output: StepOutput) -> tuple[bool, bool]:
        """Rank 0's requests on every worker: (stop, save). Several workers summed them with the gradients: another
        collective in each step costs two workers 2 % of it, measured."""
        stop, save = output.flags or self._requests(step)
        return bool(stop), bool(save)

    def _save(self, state: LoopState, *, final: bool, only_best: bool) -> None:
        begin, self.activity = time.perf_counter(), SAVING
        self._report_sent(self._buffers.synchronize(), step=state.step)
        state.skipped_steps = self._skipped_before + int(self._nonfinite.total)
        self.saver.save(state, final=final, only_best=only_best)
        self._charge("save", begin, step=state.step)

    # -- time -------------------------------------------------------------------------------------

    def _charge(self, purpose: str, begin: float, *, step: int) -> None:
        spent = time.perf_counter() - begin - self._compiled(step)
        self.clock.add(purpose, spent)
        self.activity = ""
        self._interval.since += spent  # throughput is of training, without evaluation and saving

    def _compiled(self, step: int) -> float:
        """Report the switches' events and charge the compiler's seconds since the last call, which are returned."""
        for kind, fields in self.switches.notices():
            self.reporter.event(kind, step=step, **fields)
        seconds = self.switches.compile_seconds()
        self.clock.add("compile", seconds)
        self._interval.since += seconds
        return seconds

    # -- logging ----------------------------------------------------------------------------------

    def _ends_epoch(self, state: LoopState) -> bool:
        """Whether the step that was just done is the last one of its epoch."""
        return state.cursor.epoch > self._epoch

    def _row_due(self, state: LoopState) -> bool:
        """Whether a row is due: at the first step, by `log_every`, or since too many steps have failed."""
        every = self.limits.log_every
        due = self._ends_epoch(state) if every == "epoch" else bool(every) and state.step % every == 0
        if state.step == 1 or due:
            return True
        return self._nonfinite.longest_before() >= self.limits.nonfinite_steps

    def _log(self, state: LoopState, output: StepOutput) -> int:
        """Write a row; returns the longest run of failed steps since the last one."""
        row = read_row(
            self.step, output, self._interval, self._nonfinite, number=state.step, epoch=self._epoch,
            skipped_before=self._skipped_before, peak_memory=self.peak_memory, full_rate=self.full_rate,
            extra={**self.switches.metrics(), **self.memory(), **self._counts(state)},
        )  # fmt: skip
        state.final_loss = row.record.loss
        self.reporter.metrics(row.record.to_row())
        if row.model is not None:
            self.reporter.interval(row.model.row, row.model.traces)
            for kind, fields in row.model.events:
                self.reporter.event(kind, **fields)
        if row.failed:
            self._name_nonfinite(state.step, row.record.loss, row.record.aux_loss)
        self._interval = LogInterval()
        self._nonfinite.reset_longest()
        return row.longest_failed

    def _counts(self, state: LoopState) -> dict[str, Any]:
        found: dict[str, Any] = {"ends_epoch": True} if self._ends_epoch(state) else {}
        return found | ({"memory_clears": self._clears} if self.limits.clear_every else {})

    def _name_nonfinite(self, step: int, loss: float, aux_loss: float | None) -> None:
        """Report what was not finite in the step that was just skipped; its gradients are still in the buffers."""
        if not math.isfinite(loss):
            self._culprit = f"the loss was {loss}"
        elif aux_loss is not None and not math.isfinite(aux_loss):
            self._culprit = f"the auxiliary loss was {aux_loss}"
        else:
            names = [*self.step.reduction.nonfinite(), *self.step.remote_nonfinite] or ["unknown parameters"]
            self._culprit = f"the gradients of {abbreviated(names, NAMED_AT_MOST)}"
        self.reporter.event("nonfinite", step=step, what=self._culprit)

    # -- evaluation -------------------------------------------------------------------------------

    def _evaluate(self, state: LoopState) -> None:
        evaluate = self.evaluate
        if evaluate is None or (state.last_eval and state.last_eval["step"] == state.step):
            return
        begin, self.activity = time.perf_counter(), EVALUATING
        self._report_sent(self._buffers.synchronize(), step=state.step)
        values = self._retry.run(lambda: evaluate(state.step), step=state.step, evaluation=True)
        loss = values.pop("loss")
        record = EvalRecord(step=state.step, loss=loss, accuracy=values.pop("accuracy", None), extra=values)
        self._charge("eval", begin, step=state.step)
        finite = math.isfinite(loss)
        if finite and (state.gain_from is None or loss < state.gain_from - self.limits.min_delta):
            state.gain_from, state.evals_without_gain = loss, 0
        else:
            state.evals_without_gain += 1
        if finite and (state.best_eval_loss is None or loss < state.best_eval_loss):  # of equal losses the first
            state.best_eval_loss, state.best_step = loss, state.step
        state.last_eval = {"step": state.step, "loss": loss}
        self.reporter.metrics(record.to_row())

    def _plateau(self, state: LoopState) -> bool:
        return self.limits.patience is not None and state.evals_without_gain >= self.limits.patience


def one_row_explained(error: BaseException, *, rows: int) -> str | None:
    """Why a batch norm failed on the last micro-batch of a step of so many rows, if it did."""
    if "more than 1 value per channel" not in message_of(error):
        return None
    return (
        f"a batch norm cannot be trained on one row ({first_line(error)}), as in the last micro-batch of this step's "
        f"{counted(rows, 'row')}: set data.drop_last true, which leaves out the rows at the end of an epoch that do "
        "not fill a global batch, or another loop.global_batch_size or loop.micro_batch_size"
    )
