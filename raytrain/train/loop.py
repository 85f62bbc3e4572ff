"""The training loop: steps, evaluations, logged rows, saves, and when to stop.

It knows neither Ray nor files; `raytrain.train.session` gives it a loader, a stepper, a reporter and a saver.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cluster.telemetry.processes import EVALUATING, SAVING, SLEEPING, WORK
from cluster.wording import counted
from raytrain.config.messages import abbreviated
from raytrain.errors import RunError, first_line, message_of
from raytrain.runs.records import EvalRecord, StepRecord, spreads
from raytrain.train.compile import Switches, forget_graphs
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.device import Shortage, release_cached, run_or_shortage
from raytrain.train.memory.retry import MicroBatchSize, ShortageRetry
from raytrain.train.parallel.buffers import BufferSync
from raytrain.train.state import Clock, Fetching, LoopLimits, LoopOutcome, LoopState, NonFinite, Reporter, Saver
from raytrain.train.step import StepOutput, TrainingStep
from raytrain.trainable import IntervalRow, MicroBatch

#: Step times that a row's quantiles are taken from; without rows for long, the times before are only summed.
RECENT_STEPS = 1000


@dataclass
class LogInterval:
    """Sums over the steps since the last logged row."""

    steps: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    step_s: float = 0.0
    data_s: float = 0.0  # of these, fetching batches (`Fetching`)
    data_cpu_s: float = 0.0
    waited_s: float = 0.0  # of these, waiting for other processes
    samples: float = 0.0  # trained on, by all workers
    tokens: float = 0.0
    since: float = field(default_factory=lambda: time.perf_counter())  # moved on by what is not training

    def add(self, step_s: float, fetching: Fetching, *, waited_s: float, samples: int, tokens: int) -> None:
        self.steps += 1
        self.recent_s.append(step_s)
        self.step_s += step_s
        self.data_s += fetching.seconds
        self.data_cpu_s += fetching.cpu_s
        self.waited_s += waited_s
        self.samples += samples
        self.tokens += tokens


@dataclass(frozen=True)
class LoggedRow:
    """What a log interval leaves behind."""

    record: StepRecord  # the row of metrics.jsonl
    longest_failed: int  # the longest run of failed steps since the last row
    failed: bool  # whether the last step was skipped for a value that is not finite
    model: IntervalRow | None  # what the model reports with it (`Trainable.interval_log`)


def read_row(
    step: TrainingStep, output: StepOutput, interval: LogInterval, nonfinite: NonFinite, *, number: int, epoch: int,
    skipped_before: int, peak_memory: Callable[[], int], full_rate: Callable[[], float], extra: dict[str, Any],
) -> LoggedRow:  # fmt: skip
    """Read the device once, gather the workers' values once, and build the row of the step `number`, to which `extra`
    is added. Collective. `skipped_before`: steps that were skipped before this loop began."""
    trainable, scaler = step.trainable, step.scale
    metrics = trainable.log_metrics() if trainable.log_metrics else {}
    log = trainable.interval_log
    named = [output.loss, output.aux_loss, output.norm, output.skip, nonfinite.total, nonfinite.longest, scaler.value]
    named += [*metrics.values(), *(total for total, _ in output.metrics.values())]
    read = torch.stack([v.detach().double().to(output.loss.device) for v in named])
    of_model = read[:0] if log is None else log.device_values().double().to(read.device)
    values = torch.cat([read, of_model]).tolist()
    values, of_model = values[: len(read)], values[len(read) :]
    values, told = values[: 7 + len(metrics)], values[7 + len(metrics) :]
    loss_share, aux_share, norm, skip, skipped, longest, scale = values[:7]
    elapsed = max(time.perf_counter() - interval.since, 1e-9)
    times = sorted(interval.recent_s)
    means = [seconds / interval.steps for seconds in (interval.step_s, interval.data_s, interval.waited_s)]
    own = [*means, float(peak_memory()), full_rate(), loss_share, aux_share]
    own += [] if log is None else log.host_values()
    of_losses, known = dict(zip(output.metrics, told, strict=True)), step.metric_names
    pairs = {name: (value, output.metrics[name][1]) for name, value in of_losses.items()}
    shares = [float(not pairs.keys() <= {*known}), *(part for name in known for part in pairs.get(name, (0.0, 0.0)))]
    workers = step.workers.all_gather_floats([*own, *shares])
    means = _means(step, pairs, [row[len(own) :] for row in workers])
    workers = [row[: len(own)] for row in workers]
    step_s, data_s, waited_s, peak, full, losses, auxes = zip(*(row[:7] for row in workers), strict=True)
    model = None if log is None else log.close(number, of_model, [row[7:] for row in workers])
    record = StepRecord(
        step=number,
        epoch=epoch,
        loss=sum(losses),  # shares of the global mean loss, added in the order of the ranks
        aux_loss=sum(auxes),
        grad_norm=norm,
        lr=output.lr,
        samples_per_s=interval.samples / elapsed,
        tokens_per_s=interval.tokens / elapsed if interval.tokens else None,
        step_time_s=sum(step_s) / len(step_s),
        data_time_s=sum(data_s) / len(data_s),
        peak_memory_bytes=int(max(peak)),
        loss_scale=scale if scaler.enabled else None,
        mfu=interval.samples / elapsed / sum(full) if all(full) else None,
        extra={
            **({**means, "metrics": list(means)} if means else {}),
            **spreads(times, step_s=step_s, data_s=data_s, waited_s=waited_s, peak=peak),
            "data_cpu_share": interval.data_cpu_s / elapsed,
            "skipped_steps": skipped_before + int(skipped),
            **extra,
            **dict(zip(metrics, values[7:], strict=True)),
            **(model.metrics if model else {}),
        },
    )
    failed = bool(skip) and (not scaler.enabled or scale <= 1.0)
    return LoggedRow(record, int(longest), failed, model)


def _means(step: TrainingStep, own: dict[str, tuple[float, float]], workers: list[list[float]]) -> dict[str, float]:
    """The means of what losses have told, over the micro-batches of all workers, from `own`, name -> (weighted sum,
    weight), and for each of the `workers`, whether it has a name that the others may not know yet, as in the first row
    of a run, and the same two numbers for each name that was known. Collective where there is such a name."""
    known = step.metric_names
    shares = [dict(zip(known, zip(row[1::2], row[2::2], strict=True), strict=True)) for row in workers]
    if any(row[0] for row in workers):
        shares = step.workers.all_gather_object(own)
        step.metric_names = tuple(dict.fromkeys([*known, *(name for share in shares for name in share)]))
    sums = {
        name: [sum(parts) for parts in zip(*(share.get(name, (0.0, 0.0)) for share in shares), strict=True)]
        for name in step.metric_names
    }
    return {name: total / of for name, (total, of) in sums.items() if of}


# ---------------------------------------------------------------- loop


#: Parameters that a message about nonfinite gradients names.
NAMED_AT_MOST = 5
UNWEIGHED = (
    "the loss adds means over different counts, or is compiled as a whole: its micro-batches count by their rows or "
    'labels, which may differ from one mean over the global batch; return what it is a mean over as "weight" beside it'
)


@dataclass(eq=False, kw_only=True)
class TrainingLoop:
    """One attempt's loop on one worker.

    Args:
        evaluate: `(step) -> EvalRecord-like mapping` over the eval split, collective; None without an eval split.
        should_stop: rank 0's stop flag (a signal arrived), read once a step; with several workers before the step.
    """

    step: TrainingStep
    loader: BatchLoader
    evaluate: Callable[[int], dict[str, Any]] | None
    limits: LoopLimits
    reporter: Reporter  # rank 0's write; those of the other workers, and their savers, do nothing
    saver: Saver
    should_stop: Callable[[], bool]
    peak_memory: Callable[[], int]  # bytes, for the logged rows
    memory: Callable[[], dict[str, int]] = dict  # further figures of this worker's memory for them
    full_rate: Callable[[], float] = float  # samples/s of this worker's device at its peak, for their MFU; 0: unknown
    clock: Clock = field(default_factory=Clock)  # the attempt's, which several loops may make up
    sizing: MicroBatchSize  # across out-of-memory errors
    switches: Switches

    def __post_init__(self) -> None:
        self._retry = ShortageRetry(
            self.step, self.loader, sizing=self.sizing, reporter=self.reporter, forget=forget_graphs
        )
        self._buffers = BufferSync(self.step.trainable.module, self.step.workers, self.step.changes)
        self._nonfinite = NonFinite(self.step.device)
        self._culprit = ""
        self._clears = 0
        self._said_unknown = False
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
            self._sleep(state.step)
            if self.limits.clear_every and state.step % self.limits.clear_every == 0:
                release_cached(self.step.device)
                self._clears += 1
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
            # several workers have summed rank 0's with the gradients: another collective in each step costs two
            # workers 2 % of it, measured
            stop, save = map(bool, output.flags or self._requests(state.step))
            plateau = self.limits.patience is not None and state.evals_without_gain >= self.limits.patience
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
        if self.step.weight_unknown and split and not self._said_unknown:
            self._said_unknown = True
            self.reporter.event("decision", what="loss_weight", value="rows or labels", step=number, reason=UNWEIGHED)
        self._report_sent(self._buffers.after_step(), step=number)
        state.step, state.weight_unit = number, self.step.weight_unit
        self._epoch, state.cursor = state.cursor.epoch, following
        own = self.step.trainable.notices
        for kind, fields in [*self.loader.notices(), *self.step.trainable.remote.notices(), *(own() if own else ())]:
            self.reporter.event(kind, **fields)
        scale = self.step.scale
        self._nonfinite.add(output.skip, scale=scale.value if scale.enabled else None)
        seconds = time.perf_counter() - begin - self._compiled(number)
        self.clock.add("data", fetching.seconds)
        self.clock.add("communication", output.communication_s)
        self.clock.add("compute", seconds - fetching.seconds - output.communication_s)
        tokens = len(indices) * self.loader.tokens_per_row
        self._interval.add(seconds, fetching, waited_s=output.communication_s, samples=len(indices), tokens=tokens)
        return output

    def _sleep(self, step: int) -> None:
        """What the model does between steps (`Trainable.sleep`)."""
        if self.step.trainable.sleep is None:
            return
        begin, self.activity = time.perf_counter(), SLEEPING
        for kind, fields in self.step.trainable.sleep(step, self.step):
            self.reporter.event(kind, **fields)
        self._charge("sleep", begin, step=step)

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

    def _row_due(self, state: LoopState) -> bool:
        """Whether a row is due: at the first step, by `log_every`, or since too many steps have failed."""
        every, ends_epoch = self.limits.log_every, state.cursor.epoch > self._epoch
        due = ends_epoch if every == "epoch" else bool(every) and state.step % every == 0
        return state.step == 1 or due or self._nonfinite.longest_before() >= self.limits.nonfinite_steps

    def _log(self, state: LoopState, output: StepOutput) -> int:
        """Write a row; returns the longest run of failed steps since the last one."""
        extra = {**self.switches.metrics(), **self.memory()}
        if state.cursor.epoch > self._epoch:
            extra["ends_epoch"] = True
        if self.limits.clear_every:
            extra["memory_clears"] = self._clears
        row = read_row(
            self.step, output, self._interval, self._nonfinite, number=state.step, epoch=self._epoch,
            skipped_before=self._skipped_before, peak_memory=self.peak_memory, full_rate=self.full_rate, extra=extra,
        )  # fmt: skip
        state.final_loss = row.record.loss
        self.reporter.metrics(row.record.to_row())
        if row.model is not None:
            self.reporter.interval(row.model.row, row.model.traces)
            for kind, fields in row.model.events:
                self.reporter.event(kind, **fields)
        if row.failed:
            if not math.isfinite(row.record.loss):
                self._culprit = f"the loss was {row.record.loss}"
            elif row.record.aux_loss is not None and not math.isfinite(row.record.aux_loss):
                self._culprit = f"the auxiliary loss was {row.record.aux_loss}"
            else:
                names = [*self.step.reduction.nonfinite(), *self.step.remote_nonfinite] or ["unknown parameters"]
                self._culprit = f"the gradients of {abbreviated(names, NAMED_AT_MOST)}"
            self.reporter.event("nonfinite", step=state.step, what=self._culprit)
        self._interval = LogInterval()
        self._nonfinite.reset_longest()
        return row.longest_failed

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


def one_row_explained(error: BaseException, *, rows: int) -> str | None:
    """Why a batch norm failed on the last micro-batch of a step of so many rows, if it did."""
    if "more than 1 value per channel" not in message_of(error):
        return None
    return (
        f"a batch norm cannot be trained on one row ({first_line(error)}), as in the last micro-batch of this step's "
        f"{counted(rows, 'row')}: set data.drop_last true, which leaves out the rows at the end of an epoch that do "
        "not fill a global batch, or another loop.global_batch_size or loop.micro_batch_size"
    )
