"""The training loop. Knows nothing of Ray; every process of a run executes the same iterations.

    start -> [ window of rows -> step -> (log) -> (eval) -> (checkpoint) -> (stop?) ]* -> end

All decisions that a clock or a signal could make differently on two workers (stop, save) are rank 0's and travel with
the gradients of each step. Device values are read once for each logged row, and how many steps in a row have failed at
least every `CHECK_EVERY`. Where a worker has no memory for a step, all take it again in smaller micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from raytrain.errors import RunError
from raytrain.runs.records import EvalRecord, StepRecord, spreads
from raytrain.train.clock import Clock, Fetching
from raytrain.train.compute.switches import Switches
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.micro_batch import MicroBatchSize
from raytrain.train.memory.oom import Shortage, run_or_shortage
from raytrain.train.memory.retry import ShortageRetry
from raytrain.train.state import LoopLimits, LoopOutcome, LoopState, NonFinite, Reporter, Saver
from raytrain.train.step import StepOutput, TrainingStep
from raytrain.trainable import MicroBatch

#: Parameters that a message about non-finite gradients names.
NAMED_AT_MOST = 5
#: Steps without a logged row after which the device is asked whether they failed.
CHECK_EVERY = 10


class TrainingLoop:
    """One attempt's loop on one worker.

    Args:
        step: the optimizer step.
        loader: rows of each global window, as this worker's micro-batches.
        evaluate: `() -> EvalRecord-like mapping` over the eval split, collective; None without an eval split.
        limits: how long, how often.
        reporter, saver: rank 0's writers (others are silent).
        should_stop: rank 0's stop flag (a signal arrived), read once a step; before it, where there are more workers.
        peak_memory: `() -> bytes` for the logged rows.
        clock: the attempt's, where several loops make up one attempt.
        sizing: how large micro-batches are; None keeps them as they are until memory runs out.
        switches: what the session has switched on; None where it builds nothing of the kind.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        loader: BatchLoader,
        evaluate: Callable[[int], dict[str, Any]] | None,
        limits: LoopLimits,
        reporter: Reporter,
        saver: Saver,
        should_stop: Callable[[], bool],
        peak_memory: Callable[[], int],
        clock: Clock | None = None,
        sizing: MicroBatchSize | None = None,
        switches: Switches | None = None,
    ) -> None:
        self.step = step
        self.loader = loader
        self.evaluate = evaluate
        self.limits = limits
        self.reporter = reporter
        self.saver = saver
        self.should_stop = should_stop
        self.peak_memory = peak_memory
        self.clock = clock or Clock()
        sizing = sizing or MicroBatchSize(loader.micro_batch, grow_after=None)
        self._retry = ShortageRetry(step, loader, sizing=sizing, reporter=reporter)
        self._nonfinite = NonFinite(step.device)
        self._culprit = ""
        self._skipped_before = 0
        self._begin_row()
        self._told: list[int] | None = None
        self._switches = switches

    def run(self, state: LoopState) -> LoopOutcome:
        """Train from `state` to the end, a stop or a rollback; `state` is advanced in place."""
        self._skipped_before = state.skipped_steps
        if self._switches is not None:
            self._switches.compile_seconds()  # for probes, before the clock of this attempt began
        self._since = time.perf_counter()
        while state.step < self.limits.max_steps:
            output = self._one_step(state)
            last = state.step == self.limits.max_steps
            if last or self._row_due(state.step):
                longest = self._log(state, output)
                if longest >= self.limits.nonfinite_steps:
                    why = f"{longest} steps in a row were not finite"
                    return LoopOutcome("rollback", f"{why} ({self._culprit})" if self._culprit else why, longest)
            every = self.limits.eval_every
            if self.evaluate is not None and (last or (every and state.step % every == 0)):
                self._evaluate(state)
            stop, save = self._vote(state.step)
            plateau = self._plateau(state)
            if last or stop or save or plateau:
                begin = time.perf_counter()
                state.skipped_steps = self._skipped_before + int(self._nonfinite.total)
                self.saver.save(state, final=last or stop or plateau)
                self._charge("save", begin, step=state.step)
            if plateau:
                return LoopOutcome("plateau", f"no gain of eval loss in {state.evals_without_gain} evaluations")
            if stop and not last:
                return LoopOutcome("interrupted", "a stop was asked for")
        return LoopOutcome("done", f"{state.step} steps")

    def _one_step(self, state: LoopState) -> StepOutput:
        begin = time.perf_counter()
        indices, following = self.loader.global_batch(state.cursor)
        self._fetching = fetching = Fetching()
        output = self._retry.run(lambda: self._taken(indices, step=state.step + 1), step=state.step + 1)
        self._retry.after_step(state.step + 1)
        state.step += 1
        self._epoch, state.cursor = state.cursor.epoch, following
        remote = self.step.trainable.remote
        for kind, fields in [*self.loader.notices(), *([] if remote is None else remote.notices())]:
            self.reporter.event(kind, **fields)
        scale = self.step.scale
        self._nonfinite.add(output.skip, scale=scale.value if scale.enabled else None)
        taken = time.perf_counter() - begin - self._compiled(state.step)
        self._times.append(taken)
        self.clock.add("data", fetching.seconds)
        self.clock.add("communication", output.communication_s)
        self.clock.add("compute", taken - fetching.seconds - output.communication_s)
        self._data_s += fetching.seconds
        self._data_cpu_s += fetching.cpu_s
        self._samples += len(indices)
        self._tokens += len(indices) * self.loader.tokens_per_row
        return output

    def _taken(self, indices: Any, *, step: int) -> StepOutput:
        """The step over these rows, in micro-batches of the size in force. Raises StepDropped."""
        weight = self.loader.global_weight(indices)
        micros: Iterator[MicroBatch] | list[MicroBatch] = self._micro_batches(indices)
        if weight is None:
            micros, weight = self._fetched(micros)
        if weight <= 0:
            raise RunError(
                f"step {step}: the {len(indices)} rows of this window hold nothing to average over "
                "(every label is -100); mend data.source"
            )
        passes = self.loader.passes(indices)
        several = self.step.workers.world_size > 1
        output = self.step.run(
            micros,
            global_weight=weight,
            step=step,
            passes=passes,
            flags=(lambda: self._wishes(step)) if several else list,
        )
        self._told = output.flags if several else None
        return output

    def _fetched(self, micros: Iterator[MicroBatch]) -> tuple[list[MicroBatch], int]:
        """Only the batches themselves know what they weigh: this worker's share, and the weight of all."""
        workers = self.step.workers
        came = run_or_shortage(lambda: list(micros), device=self.step.device, who=f"rank {workers.rank}")
        own = [] if isinstance(came, Shortage) else came
        weight, short = workers.all_reduce_ints([sum(micro.weight for micro in own), int(isinstance(came, Shortage))])
        if short:
            raise self.step.reduction.dropped(came)
        return own, weight

    def _micro_batches(self, indices: Any) -> Iterator[MicroBatch]:
        """This worker's micro-batches, with the seconds spent waiting for them kept apart."""
        for micro in self._fetching.timed(self.loader.micro_batches(indices)):
            if self._switches is not None:
                self._switches.saw(micro.batch)
            yield micro

    def _row_due(self, step: int) -> bool:
        """By `log_every`, or because too many steps have failed, which is asked where there was no row for long."""
        if self.limits.log_every and step % self.limits.log_every == 0:
            return True
        return len(self._times) % CHECK_EVERY == 0 and self._nonfinite.longest.item() >= self.limits.nonfinite_steps

    def _charge(self, purpose: str, begin: float, *, step: int) -> None:
        spent = time.perf_counter() - begin - self._compiled(step)
        self.clock.add(purpose, spent)
        self._since += spent  # throughput is of training, not of evaluation or saving

    def _compiled(self, step: int) -> float:
        """Seconds spent in the compiler since the last call, which are charged to it; what else the switches tell."""
        if self._switches is None:
            return 0.0
        for kind, fields in self._switches.notices():
            self.reporter.event(kind, step=step, **fields)
        seconds = self._switches.compile_seconds()
        self.clock.add("compile", seconds)
        self._since += seconds
        return seconds

    def _log(self, state: LoopState, output: StepOutput) -> int:
        """Read the device once, meet once, write a row; returns the longest run of failed steps since the last row."""
        extra = self.step.trainable.log_metrics() if self.step.trainable.log_metrics else {}
        window = self.step.trainable.interval_log
        bad, scaler = self._nonfinite, self.step.scale
        named = [output.loss, output.aux_loss, output.norm, output.skip, bad.total, bad.longest, scaler.value]
        read = torch.stack([v.detach().double().to(output.loss.device) for v in (*named, *extra.values())])
        more = read[:0] if window is None else window.device_values().double().to(read.device)
        values = torch.cat([read, more]).tolist()
        values, beyond = values[: len(read)], values[len(read) :]
        loss_share, aux_share, norm, skip, skipped, longest, scale = values[:7]
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        times = sorted(self._times)
        own = [sum(times) / len(times), self._data_s / len(times), float(self.peak_memory()), loss_share, aux_share]
        own += [] if window is None else window.host_values()
        told = self.step.workers.all_gather_floats(own)
        step_s, data_s, peak, losses, auxes = zip(*(row[:5] for row in told), strict=True)
        closed = None if window is None else window.close(state.step, beyond, [row[5:] for row in told])
        loss, aux = sum(losses), sum(auxes)  # shares of the global mean, in the order of the ranks
        record = StepRecord(
            step=state.step,
            epoch=self._epoch,
            loss=loss,
            aux_loss=aux,
            grad_norm=norm,
            lr=output.lr,
            samples_per_s=self._samples / elapsed,
            tokens_per_s=self._tokens / elapsed if self._tokens else None,
            step_time_s=sum(step_s) / len(step_s),
            data_time_s=sum(data_s) / len(data_s),
            peak_memory_bytes=int(max(peak)),
            loss_scale=scale if scaler.enabled else None,
            extra={
                **spreads(times, step_s=step_s, data_s=data_s, peak=peak),
                "data_cpu_share": self._data_cpu_s / elapsed,
                "skipped_steps": self._skipped_before + int(skipped),
                **({} if self._switches is None else self._switches.metrics()),
                **dict(zip(extra, values[7:], strict=True)),
                **(closed.metrics if closed else {}),
            },
        )
        state.final_loss = loss
        self.reporter.metrics(record.to_row())
        if closed is not None:
            self.reporter.window(closed.row, closed.traces)
            for kind, fields in closed.events:
                self.reporter.event(kind, **fields)
        if skip and (not scaler.enabled or scale <= 1.0):
            self._name_nonfinite(state.step, loss)
        self._begin_row()
        self._nonfinite.longest = torch.zeros_like(self._nonfinite.longest)
        return int(longest)

    def _begin_row(self) -> None:
        """Nothing is added up any more, from now on."""
        self._times: list[float] = []
        self._data_s = self._data_cpu_s = self._samples = self._tokens = 0.0
        self._since = time.perf_counter()

    def _name_nonfinite(self, step: int, loss: float) -> None:
        """Say what was not finite in the step that was just skipped; its gradients are still there."""
        if not math.isfinite(loss):
            self._culprit = f"the loss was {loss}"
        else:
            names = self.step.reduction.nonfinite()
            more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
            self._culprit = f"the gradients of {', '.join(names[:NAMED_AT_MOST])}{more}"
        self.reporter.event("nonfinite", step=step, what=self._culprit)

    def _evaluate(self, state: LoopState) -> None:
        if self.evaluate is None or (state.last_eval and state.last_eval["step"] == state.step):
            return
        begin = time.perf_counter()
        evaluate = self.evaluate
        values = self._retry.run(lambda: evaluate(state.step), step=state.step, evaluation=True)
        loss = values.pop("loss")
        record = EvalRecord(step=state.step, loss=loss, accuracy=values.pop("accuracy", None), extra=values)
        self._charge("eval", begin, step=state.step)
        if not math.isnan(loss) and (state.gain_from is None or loss < state.gain_from - self.limits.min_delta):
            state.gain_from, state.evals_without_gain = loss, 0
        else:
            state.evals_without_gain += 1
        if not math.isnan(loss) and (state.best_eval_loss is None or loss < state.best_eval_loss):
            state.best_eval_loss, state.best_step = loss, state.step
        state.last_eval = {"step": state.step, "loss": loss}
        self.reporter.metrics(record.to_row())

    def _plateau(self, state: LoopState) -> bool:
        return self.limits.patience is not None and state.evals_without_gain >= self.limits.patience

    def _wishes(self, step: int) -> list[int]:
        """Rank 0's wishes for after `step`: (stop, save)."""
        leads = self.step.workers.rank == 0
        return [int(leads and self.should_stop()), int(leads and self.saver.due(step))]

    def _vote(self, step: int) -> tuple[bool, bool]:
        """Rank 0's wishes become everybody's: (stop, save). Several workers told each other with the step: a second
        meeting in each step costs two workers 2 % of it, measured."""
        told, self._told = self._told, None
        stop, save = self._wishes(step) if told is None else told
        return bool(stop), bool(save)
