"""The training loop. Knows nothing of Ray; every process of a run executes the same iterations.

    start -> [ window of rows -> step -> (log) -> (eval) -> (checkpoint) -> (stop?) ]* -> end

All decisions that a clock or a signal could make differently on two workers (stop, save) are rank 0's and travel by
the small vote at the end of each step. Device values are read once for each logged row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from raytrain.data.batches import Cursor
from raytrain.feed import Feed
from raytrain.errors import RunError
from raytrain.record import EvalRecord, StepRecord
from raytrain.step import MicroBatch, StepOutput, TrainingStep


@dataclass(frozen=True)
class LoopLimits:
    """The resolved numbers a loop obeys (steps count from 1)."""

    max_steps: int
    log_every: int
    eval_every: int | None
    eval_batches: int | None
    patience: int | None
    min_delta: float
    nonfinite_steps: int


@dataclass
class LoopState:
    """Exactly what a resumed loop needs besides tensors; plain numbers, written to the checkpoint."""

    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(epoch=0, position=0))
    best_eval_loss: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0
    last_eval: dict[str, Any] | None = None
    final_loss: float | None = None
    skipped_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LoopState:
        """What `to_json` wrote."""
        return cls(**{**record, "cursor": Cursor(**record["cursor"])})


@dataclass(frozen=True)
class Outcome:
    """Why a loop returned: "done", "plateau", "interrupted" or "rollback"; `reason` in words."""

    kind: str
    reason: str
    bad_steps: int = 0


class Reporter(Protocol):
    """Where rows go; only rank 0's writes anything."""

    def metrics(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """One row of events.jsonl."""
        ...


class Saver(Protocol):
    """Writes checkpoints; `save` is called by every worker at the same step."""

    def due(self, step: int) -> bool:
        """Whether rank 0 wants a checkpoint after `step`."""
        ...

    def save(self, state: LoopState, *, final: bool) -> None:
        """Take a snapshot of the state after `state.step` and write it."""
        ...


class NeverSaves:
    """The saver of a loop whose state nobody keeps (measurements)."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, state: LoopState, *, final: bool) -> None:
        """Nothing is written."""


class Clock:
    """Seconds by purpose, on this worker, since its attempt began (DESIGN section 3, `time` in result.json)."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("data", "compute", "communication", "eval", "save"), 0.0)

    def add(self, purpose: str, seconds: float) -> None:
        """Charge seconds to a purpose."""
        self.seconds[purpose] += seconds


class NonFinite:
    """Skipped steps, counted on the device; read with the other values of a logged row."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._run = torch.zeros((), dtype=torch.float64, device=device)
        self.longest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, skip: Tensor, *, scale: Tensor | None) -> None:
        """Count one step. While a loss scale above 1 can still fall, a skip is its ordinary search and no failure."""
        self.total += skip
        failed = skip if scale is None else skip & (scale <= 1.0)
        self._run = torch.where(failed, self._run + 1, 0.0)
        self.longest = torch.maximum(self.longest, self._run)


class TrainingLoop:
    """One attempt's loop on one worker.

    Args:
        step: the optimizer step.
        feed: rows of each global window, as this worker's micro-batches.
        evaluate: `() -> EvalRecord-like mapping` over the eval split, collective; None without an eval split.
        limits: how long, how often.
        reporter, saver: rank 0's writers (others are silent).
        should_stop: rank 0's stop flag (a signal arrived), read once a step.
        peak_memory: `() -> bytes` for the logged rows.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        feed: Feed,
        evaluate: Callable[[int], dict[str, Any]] | None,
        limits: LoopLimits,
        reporter: Reporter,
        saver: Saver,
        should_stop: Callable[[], bool],
        peak_memory: Callable[[], int],
    ) -> None:
        self.step = step
        self.feed = feed
        self.evaluate = evaluate
        self.limits = limits
        self.reporter = reporter
        self.saver = saver
        self.should_stop = should_stop
        self.peak_memory = peak_memory
        self.clock = Clock()
        self._nonfinite = NonFinite(step.device)
        self._times: list[float] = []
        self._data_s = self._samples = self._tokens = 0.0
        self._since = time.perf_counter()

    def run(self, state: LoopState) -> Outcome:
        """Train from `state` to the end, a stop or a rollback; `state` is advanced in place."""
        if state.step == 0 and self.evaluate is not None and self.limits.eval_every == 0:
            self._evaluate(state)
        self._since = time.perf_counter()
        while state.step < self.limits.max_steps:
            output = self._one_step(state)
            last = state.step == self.limits.max_steps
            if last or (self.limits.log_every and state.step % self.limits.log_every == 0):
                longest = self._log(state, output)
                if longest >= self.limits.nonfinite_steps:
                    return Outcome("rollback", f"{longest} steps in a row had non-finite gradients", longest)
            every = self.limits.eval_every
            if self.evaluate is not None and (last or (every and state.step % every == 0)):
                self._evaluate(state)
            stop, save = self._vote(state.step)
            plateau = self._plateau(state)
            if last or stop or save or plateau:
                begin = time.perf_counter()
                self.saver.save(state, final=last or stop or plateau)
                self._charge("save", begin)
            if plateau:
                return Outcome("plateau", f"no gain of eval loss in {state.evals_without_gain} evaluations")
            if stop and not last:
                return Outcome("interrupted", "a stop was asked for")
        return Outcome("done", f"{state.step} steps")

    def _one_step(self, state: LoopState) -> StepOutput:
        begin = time.perf_counter()
        handles, following = self.feed.window(state.cursor)
        weight = self.feed.global_weight(handles)
        micros: Iterator[MicroBatch] | list[MicroBatch] = self._micro_batches(handles)
        self._fetch_s = 0.0
        if weight is None:  # only the batches themselves know: fetch this worker's share, then add up
            micros = list(micros)
            weight = self.step.workers.sum_flags([sum(micro.weight for micro in micros)])[0]
        if weight <= 0:
            raise RunError(
                f"step {state.step + 1}: the {len(handles)} rows of this window hold nothing to average over "
                "(every label is -100); mend data.source"
            )
        output = self.step.run(micros, global_weight=weight, step=state.step + 1)
        state.step += 1
        self._epoch, state.cursor = state.cursor.epoch, following
        scale = self.step.scale
        self._nonfinite.add(output.skip, scale=scale.value if scale.enabled else None)
        now = time.perf_counter()
        self._times.append(now - begin)
        self.clock.add("data", self._fetch_s)
        self.clock.add("communication", output.communication_s)
        self.clock.add("compute", now - begin - self._fetch_s - output.communication_s)
        self._data_s += self._fetch_s
        self._samples += len(handles)
        self._tokens += len(handles) * self.feed.tokens_per_row
        return output

    def _micro_batches(self, handles: Any) -> Iterator[MicroBatch]:
        """This worker's micro-batches, with the seconds spent waiting for them kept apart."""
        begin = time.perf_counter()
        for micro in self.feed.micro_batches(handles):
            self._fetch_s += time.perf_counter() - begin
            yield micro
            begin = time.perf_counter()

    def _charge(self, purpose: str, begin: float) -> None:
        spent = time.perf_counter() - begin
        self.clock.add(purpose, spent)
        self._since += spent  # throughput is of training, not of evaluation or saving

    def _log(self, state: LoopState, output: StepOutput) -> int:
        """Read the device once, write one row; returns the longest run of failed steps since the last row."""
        shares = torch.stack([output.loss, output.aux_loss])
        self.step.workers.sum_([shares])
        extra = self.step.trainable.log_metrics() if self.step.trainable.log_metrics else {}
        named = [output.norm, self._nonfinite.total, self._nonfinite.longest, self.step.scale.value, *extra.values()]
        values = torch.cat([shares, torch.stack([v.detach().double().to(shares.device) for v in named])]).tolist()
        loss, aux, norm, skipped, longest, scale = values[:6]
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        times = sorted(self._times)
        ranks = self.step.workers.gather_floats(
            [sum(times) / len(times), self._data_s / len(times), float(self.peak_memory()), self.clock.seconds["communication"]]
        )
        steps_s = [row[0] for row in ranks]
        record = StepRecord(
            step=state.step,
            epoch=self._epoch,
            loss=loss,
            aux_loss=aux,
            grad_norm=norm,
            lr=output.lr,
            samples_per_s=self._samples / elapsed,
            tokens_per_s=self._tokens / elapsed if self._tokens else None,
            step_time_s=sum(times) / len(times),
            data_time_s=self._data_s / len(times),
            peak_memory_bytes=int(max(row[2] for row in ranks)),
            loss_scale=scale if self.step.scale.enabled else None,
            extra={
                "step_ms_p50": 1e3 * times[len(times) // 2],
                "step_ms_p95": 1e3 * times[min(len(times) - 1, int(0.95 * len(times)))],
                "step_time_s_min": min(steps_s),
                "step_time_s_max": max(steps_s),
                "data_time_s_max": max(row[1] for row in ranks),
                "peak_memory_bytes_min": int(min(row[2] for row in ranks)),
                "skipped_steps": state.skipped_steps + int(skipped),
                **dict(zip(extra, values[6:], strict=True)),
            },
        )
        state.final_loss = loss
        self.reporter.metrics(record.to_row())
        self._times, self._data_s, self._samples, self._tokens = [], 0.0, 0.0, 0.0
        self._nonfinite.longest = torch.zeros_like(self._nonfinite.longest)
        self._since = time.perf_counter()
        return int(longest)

    def _evaluate(self, state: LoopState) -> None:
        if self.evaluate is None or (state.last_eval and state.last_eval["step"] == state.step):
            return
        begin = time.perf_counter()
        values = self.evaluate(state.step)
        loss = values.pop("loss")
        record = EvalRecord(step=state.step, loss=loss, accuracy=values.pop("accuracy", None), extra=values)
        self._charge("eval", begin)
        better = state.best_eval_loss is None or loss < state.best_eval_loss - self.limits.min_delta
        state.evals_without_gain = 0 if better else state.evals_without_gain + 1
        if not math.isnan(loss) and (state.best_eval_loss is None or loss < state.best_eval_loss):
            state.best_eval_loss, state.best_step = loss, state.step
        state.last_eval = {"step": state.step, "loss": loss}
        self.reporter.metrics(record.to_row())

    def _plateau(self, state: LoopState) -> bool:
        return self.limits.patience is not None and state.evals_without_gain >= self.limits.patience

    def _vote(self, step: int) -> tuple[bool, bool]:
        """Rank 0's wishes become everybody's: (stop, save)."""
        leads = self.step.workers.rank == 0
        wishes = [int(leads and self.should_stop()), int(leads and self.saver.due(step))]
        stop, save = self.step.workers.sum_flags(wishes)
        return bool(stop), bool(save)
