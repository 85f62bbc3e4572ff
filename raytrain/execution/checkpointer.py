"""When a checkpoint is due, and how the workers save one together."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Literal

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes

from raytrain.checkpoint.snapshot import flatten, unflatten
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.models.weights.headers import VERSIONS
from raytrain.models.weights.stored import versions_of
from raytrain.plan.choice import Resolved, seconds_text
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.state import Clock, LoopState, Reporter, Saver

#: `save.every: auto`: checkpoint stalls may take this share of the run time ...
STALL_BUDGET = 0.03
#: ... and, within that budget, a failure may lose at most this many seconds of work.
WORK_AT_RISK_S = 30.0
#: The longest interval in steps. Very short steps may need a longer one to cover `WORK_AT_RISK_S`.
MOST_STEPS = 10_000
#: A failure may lose at most this many seconds of work, also where that exceeds the budget.
MOST_WORK_AT_RISK_S = 600.0
#: Steps before the first automatic checkpoint, which measures the stall; fewer if they take `MOST_WORK_AT_RISK_S`.
FIRST_STEP = 10
#: Steps of an attempt that say nothing of later ones: they choose kernels, allocate memory and compile.
WARM_UP_STEPS = 2
#: Purposes of `Clock` for which the time between two steps is spent.
BETWEEN_STEPS = ("compile", "eval", "save", "sleep", "restart", "lost")
#: Writing checkpoints of evaluations that are the best so far may take this share of the time. Beyond it the best state
#: stays in memory, where the next best one replaces it: while every evaluation improves, few of them are written.
BEST_BUDGET = 0.1


class CheckpointSaver(Saver):
    """Rank 0 snapshots and writes; the other ranks send the states of their random generators.
    `fence` raises once a newer attempt has taken over."""

    def __init__(
        self, session: Session, run: RunFolder, *, every: int | str, keep: int | Literal["all"], asynchronous: bool,
        reporter: Reporter, clock: Clock, fence: Any,
    ) -> None:  # fmt: skip
        self.session = session
        self.workers: Workers = session.workers
        self.reporter = reporter
        self.clock = clock
        self._every, self._keep = every, keep
        self._interval = every if isinstance(every, int) else None
        self._last_step = session.state.step
        self._begin = time.perf_counter()
        self._begin_step = session.state.step
        self._steady = self._mark(session.state.step)
        self.writer = (
            CheckpointWriter(run, keep=keep, asynchronous=asynchronous, fence=fence, world_size=self.workers.world_size)
            if self.workers.rank == 0
            else None
        )
        self._remote = session.strategy.remote_checkpoint(session.parts, run)
        self._about = {
            "source_facts": session.facts, "tokenizer": session.source.tokenizer, "reads": dict(session.source.reads),
            "own_format": session.trainable.export is not None,
            VERSIONS: versions_of(session.trainable.module.state_dict()),
        }  # fmt: skip

    def due(self, step: int) -> bool:
        """Rank 0: whether a checkpoint is due after `step`."""
        if step - self._begin_step == WARM_UP_STEPS:
            if self.writer is not None:
                self.writer.rehearse(self.session.parts())
            self._steady = self._mark(step)
        if self._every == "auto" and self._interval is None:
            late = time.perf_counter() - self._begin >= MOST_WORK_AT_RISK_S
            return late or step - self._begin_step >= FIRST_STEP
        if self._every == "auto":
            return step - self._last_step >= (self._interval or 1)
        return step % int(self._every) == 0

    def save(self, state: LoopState, *, final: bool, only_best: bool = False) -> None:
        """Gather the generator states, snapshot on rank 0, write in the background; wait if `final`. Collective.

        With `only_best` the write may begin later (`BEST_BUDGET`), where rank 0 holds a copy of the complete state.
        """
        remote = self._remote
        if remote is not None and self.writer is not None:
            self.writer.prepare(state.step)
        flat = flatten(self.session.generator_state())
        gathered = self.workers.all_gather_bytes(_pack(flat.tensors, flat.skeleton))
        if remote is not None:  # the all-gather has completed on every rank, so the directory exists
            remote.begin_save(state.step)
        self.clock.keep(state.step)
        if self.writer is None:
            return
        delay_s = self._delay_of_best(self.writer) if only_best else 0.0
        if not delay_s:
            self._last_step = state.step
        generators = {str(rank): unflatten(*_unpack(payload)) for rank, payload in enumerate(gathered)}
        # mean seconds of a step after the warm-up, without compilation, evaluations and checkpoints
        (first, began), (_, ends) = self._steady, self._mark(state.step)
        step_s = max(0.0, ends - began) / max(1, state.step - first)
        eval_loss = state.last_eval["loss"] if state.last_eval and state.last_eval["step"] == state.step else None
        about = {
            "loop": state.to_json(), "world_size": self.workers.world_size, "precision": self.session.precision,
            "seed": self.session.job.seed,
        }  # fmt: skip
        stall = self.writer.save(
            {**self.session.parts(), "rng": generators}, about, step=state.step, eval_loss=eval_loss,
            extra=self._about, remote=remote, delay_s=delay_s, replaces=state.best_step == state.step,
        )  # fmt: skip
        if not delay_s and self._every == "auto":
            self._solve(stall, step_s, state.step)
        if final:
            self.writer.wait()
        held = {"delay_s": delay_s} if delay_s else {}
        self.reporter.event("checkpoint", step=state.step, stall_s=stall, seconds=dict(self.clock.seconds), **held)

    def _delay_of_best(self, writer: CheckpointWriter) -> float:
        """Seconds until another write keeps within `BEST_BUDGET`; 0 where there is no copy to hold until then, or where
        every checkpoint is wanted."""
        if self._keep == "all" or self._remote is not None or writer.written_at is None or writer.last_write_s is None:
            return 0.0
        rest_s = writer.last_write_s * (1 / BEST_BUDGET - 1)
        return max(0.0, writer.written_at + rest_s - time.monotonic())

    def _mark(self, step: int) -> tuple[int, float]:
        """A step, and the seconds until it that steps took, from an arbitrary zero."""
        return step, time.perf_counter() - sum(self.clock.seconds[purpose] for purpose in BETWEEN_STEPS)

    def _solve(self, stall: float, step_s: float, step: int) -> None:
        least = max(1, int(WORK_AT_RISK_S / max(step_s, 1e-9)))
        most = max(1, min(max(MOST_STEPS, least), int(MOST_WORK_AT_RISK_S / max(step_s, 1e-9))))
        solved = solve_interval(stall_s=stall, step_time_s=step_s, minimum=least, maximum=most)
        interval = int(solved.value)
        if self._interval is None or not 0.75 <= interval / self._interval <= 1.33:
            self.reporter.event("decision", what="checkpoint_every", value=interval, reason=solved.reason, step=step)
        self._interval = interval

    def abandon(self) -> None:
        """Discard the checkpoint being written, since a part of the state is lost."""
        if self.writer is not None:
            self.writer.abandon()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.session.strategy.close_saves()


def solve_interval(*, stall_s: float, step_time_s: float, minimum: int = 1, maximum: int = MOST_STEPS) -> Resolved:
    """The shortest checkpoint interval, in steps from `minimum` to `maximum`, whose stalls take at most `STALL_BUDGET`
    of the run time; if `maximum` exceeds it, the reason states the actual share. `stall_s`: measured seconds for which
    one checkpoint blocks training; `step_time_s`: seconds per step without checkpoints."""

    def share(steps: int) -> float:
        return stall_s / (stall_s + steps * step_time_s)

    step_time_s = max(step_time_s, 1e-9)
    steps = max(1, math.ceil(stall_s * (1 - STALL_BUDGET) / (STALL_BUDGET * step_time_s) - 1e-9))
    while share(steps) > STALL_BUDGET:  # corrects for rounding
        steps += 1
    chosen = min(max(steps, minimum), maximum)
    each = [seconds_text(spent, digits=3) for spent in (stall_s, step_time_s)]
    reason = f"a stall of {each[0]} every {chosen} steps of {each[1]} takes {share(chosen):.2%} of the time"
    if chosen < steps:
        over = f"above the budget of {STALL_BUDGET:.0%}, since the interval is at most {maximum} steps"
        return Resolved(chosen, f"{reason}, {over}")
    if chosen > steps:
        return Resolved(chosen, f"{reason}; the interval is at least {minimum} steps")
    return Resolved(chosen, f"{reason}; the budget is {STALL_BUDGET:.0%}")


def _pack(tensors: dict[str, Any], skeleton: Any) -> bytes:
    """Encode a nested state without pickle: the length of the JSON, the JSON, then the tensors as safetensors."""
    text = json.dumps(skeleton).encode()
    return len(text).to_bytes(8, "little") + text + tensors_to_bytes(tensors)


def _unpack(payload: bytes) -> tuple[dict[str, Any], Any]:
    size = int.from_bytes(payload[:8], "little")
    return tensors_from_bytes(payload[8 + size :]), json.loads(payload[8 : 8 + size])
