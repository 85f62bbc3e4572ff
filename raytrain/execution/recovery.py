"""After a failure: rules from faults to a decision, the return to a checkpoint, the start of the next attempt.

`worker.py` calls `agree_on_start` first of all and `roll_back` after non-finite steps; the driver uses `decide` where
Ray was lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from cluster.wording import counted
from raytrain.checkpoint.reader import LoadedCheckpoint, list_checkpoints, load, newest_valid
from raytrain.checkpoint.writer import discard_after
from raytrain.config.sections import RetryConfig
from raytrain.data.rows.batches import Cursor
from raytrain.errors import CollectiveFailed, RunError, StateLost
from raytrain.execution.reporter import Superseded
from raytrain.plan.batch import halved
from raytrain.runs.faults import CAUSES, Fault
from raytrain.runs.folder import RunFolder, start_anew
from raytrain.train.job import TrainJob, place_of
from raytrain.train.memory.device import let_go
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision import HIGHER_PRECISION
from raytrain.train.session import Session
from raytrain.train.state import LoopOutcome

#: What torch raises for an operation without a kernel in the autocast dtype; a TypeError is a mistake in the code.
OPERATION_ERRORS = ("RuntimeError",)
#: Errors of a failing disk, network file system or object store; a missing file is a mistake and not among them.
TRANSIENT_ERRORS = ("OSError", "TimeoutError", "ConnectionError", "ConnectionResetError", CollectiveFailed.__name__)


@dataclass(frozen=True)
class RecoveryDecision:
    """What the next attempt does, and why."""

    action: Literal["go_on", "raise_precision", "stop"]  # raise_precision: continue in `precision`
    reason: str
    precision: str | None = None
    micro_batch: int | None = None  # most rows of a micro-batch; None keeps the planned size


def decide(faults: list[Fault], *, retry: RetryConfig, fallback: bool, resumed_from: list[int]) -> RecoveryDecision:
    """Decide what follows the newest of the faults of this command, oldest first; for each failed attempt the first
    recorded one. `resumed_from` are the steps that its attempts started from, the next one included; `fallback` is
    `precision.fallback`."""
    if not faults:
        return RecoveryDecision("go_on", "no faults")
    decision = _decide(faults, retry=retry, fallback=fallback, resumed_from=resumed_from)
    halves = [halved(fault.micro_batch) for fault in faults if fault.out_of_memory and fault.micro_batch]
    return replace(decision, micro_batch=min(halves)) if halves else decision


def _decide(faults: list[Fault], *, retry: RetryConfig, fallback: bool, resumed_from: list[int]) -> RecoveryDecision:
    newest = faults[-1]
    what = newest.what
    if newest.final:
        return RecoveryDecision("stop", what)
    if _is_halvable(newest):
        where = f"rank {newest.rank} ran out of memory at step {newest.step} ({what})"
        if newest.micro_batch and newest.micro_batch > 1:
            half = halved(newest.micro_batch)
            where = f"attempt {newest.attempt} failed: {where}; {restarted_from(resumed_from[-1])}"
            return RecoveryDecision("go_on", f"{where} with micro-batches of {half}")
        return RecoveryDecision("stop", f"{where} with loop.micro_batch_size 1")
    compared = newest.traceback and newest.error not in TRANSIENT_ERRORS
    alike = [fault for fault in faults[:-1] if compared and _place(fault) == _place(newest)]
    if any((fault.step, fault.precision) == (newest.step, newest.precision) for fault in alike):
        where = "before the first step" if newest.step is None else f"at step {newest.step}"
        return RecoveryDecision("stop", f"the same error occurred twice {where}: {what}")
    if len(alike) >= 2:
        return RecoveryDecision("stop", f"the same error occurred three times: {what}")
    if newest.reduced and fallback and newest.error in OPERATION_ERRORS:
        broke = f"{newest.precision} failed at step {newest.step} ({what})"
        reason = f"attempt {newest.attempt} failed: {broke}; {restarted_from(resumed_from[-1])} in fp32"
        return RecoveryDecision("raise_precision", reason, "fp32")
    without_progress = 0  # attempts in succession
    for (earlier, later), fault in zip(pairwise(resumed_from), faults, strict=False):
        if _is_halvable(fault):
            continue
        without_progress = 0 if later > earlier else without_progress + 1
    if without_progress >= retry.restarts_without_progress:
        limit = f"retry.restarts_without_progress is {retry.restarts_without_progress}"
        ended = f"{counted(without_progress, 'attempt')} ended without progress, and {limit}"
        return RecoveryDecision("stop", f"{ended}; the last fault was {what}")
    return RecoveryDecision("go_on", f"{failed_attempt(newest)}; {restarted_from(resumed_from[-1])}")


def failed_attempt(fault: Fault) -> str:
    if fault.error in CAUSES:  # Ray was lost, or a process died: the message names which
        when = "" if fault.step is None else f" after step {fault.step - 1}"
        return f"attempt {fault.attempt} failed{when}: {fault.message}"
    at = "" if fault.step is None else f" at step {fault.step}"
    if fault.error == CollectiveFailed.__name__:  # the record of its cause would come first
        return f"attempt {fault.attempt} failed{at}: rank {fault.rank} lost the other workers ({fault.message})"
    return f"attempt {fault.attempt} failed{at} on rank {fault.rank} ({fault.what})"


def restarted_from(step: int) -> str:
    start = f"the checkpoint of step {step}" if step else "step 0: there is no valid checkpoint yet"
    return f"restarted from {start}"


def origins(faults: list[Fault], rows: Iterable[Mapping[str, Any]], *, step: int) -> list[int]:
    """The step that each failed attempt started from, followed by `step`, from which the next one starts.

    An attempt records its start in the events once it is set up. An attempt that failed earlier made no progress: it
    counts as started from the same step as the attempt after it.
    """
    starts = {row["attempt"]: int(row["from_step"]) for row in rows if row["kind"] == "attempt"}
    found = [step]
    for fault in reversed(faults):
        found.append(starts.get(fault.attempt, found[-1]))
    return found[::-1]


def _is_halvable(fault: Fault) -> bool:
    """Whether the fault is an out-of-memory error in code that uses micro-batches, which can be made smaller."""
    return fault.out_of_memory and fault.micro_batch is not None


def _place(fault: Fault) -> tuple[str, str | list[str]]:
    """The type of an error, and where it was raised: the place in the user's code, or else the stack frames. Addresses
    and numbers in messages may differ."""
    lines = [line.strip() for line in fault.traceback.splitlines()]
    return fault.error, fault.place or [line for line in lines if line.startswith("File ")]


# ---------------------------------------------------------------- rollback


class RollbackPolicy:
    """Rolls back after consecutive non-finite steps, at most `limit` times in an attempt, or until nothing is left to
    try."""

    def __init__(self, run: RunFolder, *, limit: int) -> None:
        self._run, self._limit = run, limit
        self._times = 0
        self._last: tuple[int, str] | None = None  # step and precision of the last rollback

    def recover(self, session: Session, outcome: LoopOutcome) -> Session | LoopOutcome:
        """Return the session that continues the run, or the failed outcome if no rollback can help. Collective."""
        self._times += 1
        if self._times > self._limit:
            return LoopOutcome("failed", f"{outcome.reason}, after {self._limit} rollbacks (retry.rollbacks)")
        higher = _next_precision(session)
        last = self._last
        if last is not None and last == (session.state.step - outcome.bad_steps, higher):  # the same weights again
            why = f"no step after step {last[0]} was finite, even with different data, and {higher} is not raised any"
            remedy = "try a smaller optim.lr or a longer optim.warmup_steps, and check the data and model.init_from"
            return LoopOutcome("failed", f"{outcome.reason}; {why} further: {remedy}")
        fresh, decision = roll_back(session, self._run, outcome=outcome)
        self._last = decision["value"], higher
        return fresh


def roll_back(session: Session, run: RunFolder, *, outcome: LoopOutcome) -> tuple[Session, dict[str, Any]]:
    """Build a session from the latest valid checkpoint (or step 0), skipping data and raising the precision; returns it
    and the fields of the decision event.

    Collective. Rank 0 has finished its last checkpoint write before the call. The decision event is written before the
    new session is built, so that a later attempt knows of the rollback even if this one fails. `session` is closed;
    metrics and checkpoints after the restored step are removed.
    """
    job, workers = session.job, session.workers
    bad_step, cursor, higher = session.state.step, session.state.cursor, _next_precision(session)
    loaded, _ = _agree_on_checkpoint(run, job, workers)
    skipped = f"data up to epoch {cursor.epoch} row {cursor.position} is skipped"
    decision = {
        "what": "rollback", "value": loaded.step if loaded else 0, "precision": higher, "skipped": outcome.bad_steps,
        **asdict(cursor), "reason": f"{outcome.reason} before step {bad_step}; {skipped}",
    }  # fmt: skip
    session.say("decision", **decision)
    if workers.rank == 0:
        run.flush()
    _close(session)
    fresh = _replacement(session, initial=loaded is None)
    _continue_from(fresh, session, precision=higher, loaded=loaded, cursor=cursor)
    _discard_after(fresh, run)
    return fresh, decision


def skipped_to(rows: Iterable[Mapping[str, Any]], step: int) -> Cursor | None:
    """The data cursor to continue from after restoring `step` (0: the start); None if no rollback skipped data.

    Args:
        rows: events of the run. An attempt or rewind that starts before the step of a rollback cancels that rollback.
    """
    found: Mapping[str, Any] | None = None
    for row in rows:
        rolled = row["kind"] == "decision" and row.get("what") == "rollback" and "position" in row
        start = row.get("from_step") if row["kind"] == "attempt" else None
        start = row["value"] if row.get("what") == "rewind" else start
        if rolled:
            found = row
        elif found is not None and start is not None and start < found["value"]:
            found = None
    return None if found is None or found["value"] != step else Cursor(found["epoch"], found["position"])


class RewindPolicy:
    """Rewinds to the latest valid checkpoint when remote state is lost, at most `limit` times without a new step."""

    def __init__(self, run: RunFolder, *, limit: int) -> None:
        self._run, self._limit = run, limit
        self._furthest = self._times = 0

    def recover(self, session: Session, error: StateLost) -> tuple[Session, dict[str, Any]]:
        """Return the session that continues the run, and the fields of the decision event. Collective.

        If more remote state is lost during the rewind, the rewind is repeated.

        Raises:
            RunError: the limit of rewinds without progress is reached.
        """
        began = time.perf_counter()
        if session.state.step > self._furthest:
            self._furthest, self._times = session.state.step, 0
        while True:
            let_go(error, session.device)
            self._times += 1
            if self._times > self._limit:
                raise RunError(f"{error}; {self._limit} rewinds without a new step (retry.restarts_without_progress)")
            try:
                fresh, decision = rewind(session, self._run, reason=str(error))
            except StateLost as again:
                error = again
                continue
            return fresh, {**decision, "seconds": time.perf_counter() - began}


def rewind(session: Session, run: RunFolder, *, reason: str) -> tuple[Session, dict[str, Any]]:
    """Build a session from the latest valid checkpoint (or step 0) after remote state was lost; the data repeats.

    Collective. The session is built before the checkpoint is read, since it forms the process groups that the workers
    use for that.

    Raises:
        StateLost: more remote state was lost during the rewind.
    """
    job, workers = session.job, session.workers
    _close(session)
    fresh = _replacement(session, initial=False)
    loaded, cursor = _agree_on_checkpoint(run, job, workers)
    if loaded is None and job.model.init_from is not None:  # remote experts read it while the model is built
        _close(fresh)
        fresh = _replacement(session, initial=True)
    _continue_from(fresh, session, precision=session.precision or "fp32", loaded=loaded, cursor=cursor)
    _discard_after(fresh, run)
    lost = session.state.step - fresh.state.step
    deaths, note = fresh.trainable.remote.deaths, fresh.trainable.remote.note
    fresh.trainable.remote.lost_steps = lost
    happened = [f"{death.who} {'did not respond' if death.silent else 'died'}" for death in deaths]
    more = [f"{what} ({death.why})" for what, death in zip(happened, deaths, strict=True) if what not in reason]
    return fresh, {
        "what": "rewind",
        "value": fresh.state.step,
        "lost_steps": lost,
        "reason": "; ".join([reason, *more, *([note] if note else [])]),
        "died": [asdict(death) for death in deaths],
    }


def _next_precision(session: Session) -> str:
    current = session.precision or "fp32"
    return HIGHER_PRECISION.get(current, current) if session.job.precision.fallback else current


def _replacement(session: Session, *, initial: bool) -> Session:
    """A session for the same job and rows, with the settings of this one; see `Session`."""
    return Session(
        session.job, workers=session.workers, local_rank=session.local_rank, source=session.source, initial=initial,
        settings=session.settings,
    )  # fmt: skip


def _close(session: Session) -> None:
    session.close()
    session.release()


def _continue_from(
    fresh: Session, session: Session, *, precision: str, loaded: LoadedCheckpoint | None, cursor: Cursor | None
) -> None:
    """Bring the fresh session to the state that the attempt of `session` continues from."""
    fresh.say = session.say
    fresh.prepare(precision)
    fresh.sizing = session.sizing
    if loaded is not None:
        fresh.restore(loaded)
    if cursor is not None:
        fresh.state.cursor = cursor


def _discard_after(session: Session, run: RunFolder) -> None:
    """Rank 0: remove the metrics and checkpoints that are later than the state of a session."""
    if session.workers.rank == 0:
        run.truncate_metrics(session.state.step)
        discard_after(run, session.state.step)


def _agree_on_checkpoint(
    run: RunFolder, job: TrainJob, workers: Workers
) -> tuple[LoadedCheckpoint | None, Cursor | None]:
    """The latest valid checkpoint, and the data cursor of a rollback to it, the same on every worker. Collective.

    Rank 0 chooses the checkpoint: workers that look one by one might find different ones.
    """
    place, loaded, message = place_of(job, rank=workers.rank, world_size=workers.world_size), None, None
    if workers.rank == 0:
        loaded = newest_valid(run, place=place).checkpoint
        step = loaded.step if loaded else 0
        cursor = skipped_to(run.read_rows(run.events), step)
        message = {"step": step, "cursor": cursor and asdict(cursor)}
    agreed = workers.broadcast_object(message)
    if workers.rank and agreed["step"]:
        loaded = load(run.checkpoint_dir(agreed["step"]), check_hashes=False, place=place)
    return loaded, Cursor(**agreed["cursor"]) if agreed["cursor"] else None


# ---------------------------------------------------------------- attempt
# Starts an attempt: takes its number, applies the failure rules and chooses the checkpoint that all workers load.


@dataclass(frozen=True)
class AttemptStart:
    """The start of an attempt, the same on every worker.

    Attributes:
        from_step: step of the checkpoint, or 0 without one. If none could be read, the last step that an attempt
            started from.
        cursor: where the data continues, if a rollback skipped data after the checkpoint was written.
    """

    attempt: int
    decision: RecoveryDecision  # of the failure rules after the newest fault
    checkpoint: LoadedCheckpoint | None
    from_step: int
    cursor: Cursor | None
    refused_checkpoints: list[str]  # why newer checkpoints were not used
    damaged: list[tuple[int, str]]  # step and reason of those that were complete, newest first

    @property
    def damage(self) -> str:
        """A line for people where complete checkpoints are not used; "" otherwise."""
        if not self.damaged:
            return ""
        found = "; ".join(f"the checkpoint of step {step} ({reason})" for step, reason in self.damaged)
        start = f"that of step {self.from_step}" if self.from_step else "step 0: there is no valid one"
        return f"damaged and not used: {found}; training starts from {start}"


def take_attempt_number(job: TrainJob, run: RunFolder, *, faults: list[Fault]) -> int:
    """Rank 0: return the number that the driver took for these workers; after a restart by Ray, take the next free
    one. Raises Superseded: another command has taken over the run folder."""
    claimed, newest = job.claimed_attempt, run.current_attempt()
    if newest > claimed and run.owner_of(newest) != job.owner:
        raise Superseded(f"attempt {newest} of another command has taken over {run.path}")
    if newest == claimed and all(fault.attempt < claimed for fault in faults):
        return claimed
    return run.next_attempt(job.owner)


def agree_on_start(
    job: TrainJob, run: RunFolder, *, workers: Workers, attempt: int, faults: list[Fault]
) -> AttemptStart:
    """Rank 0 reads the run folder and decides, then all workers load the same checkpoint. Collective; `attempt` and
    `faults` are used on rank 0 only. Raises OSError if a checkpoint could not be read: that does not make it invalid,
    so no older one is used in its place."""
    message, loaded = None, None
    place = place_of(job, rank=workers.rank, world_size=workers.world_size)
    if workers.rank == 0:
        rows = run.read_rows(run.events)
        unread: OSError | None = None
        try:
            loaded, refused = newest_valid(run, place=place)
            step = loaded.step if loaded else 0
        except OSError as error:  # raised below, unless the failure rules stop the run
            refused, unread = [], error
            step = max((row["from_step"] for row in rows if row["kind"] == "attempt"), default=0)
        tried = zip(reversed(list_checkpoints(run)), refused, strict=False)
        damaged = [(info.step, reason) for info, reason in tried if info.complete]
        starts = origins(faults, rows, step=step)
        decision = decide(faults, retry=job.retry, fallback=job.precision.fallback, resumed_from=starts)
        if faults and faults[-1].attempt < attempt - 1 and decision.action == "go_on":  # an elastic run's change
            decision = replace(decision, reason=f"attempt {attempt - 1} did not fail; {restarted_from(step)}")
        if damaged and loaded is None and attempt == job.first_attempt:  # a resumed run: keep what it has
            why = f"no checkpoint of {run.path} is valid ({'; '.join(reason for _, reason in damaged)})"
            kept = f"{why}, and its metrics and weights are kept; {start_anew(run)}"
            decision = RecoveryDecision("stop", kept)  # to start at step 0 would replace them
        if unread is not None and decision.action != "stop":
            raise unread
        cursor = skipped_to(rows, step)
        message = {
            "attempt": attempt, "decision": vars(decision), "from_step": step, "cursor": cursor and asdict(cursor),
            "refused_checkpoints": refused, "damaged": damaged,
        }  # fmt: skip
    agreed = workers.broadcast_object(message)
    step, decision = agreed["from_step"], RecoveryDecision(**agreed["decision"])
    if workers.rank and step and decision.action != "stop":  # rank 0 has verified every byte
        loaded = load(run.checkpoint_dir(step), check_hashes=False, place=place)
    cursor = Cursor(**agreed["cursor"]) if agreed["cursor"] else None
    refused, damaged = agreed["refused_checkpoints"], agreed["damaged"]
    return AttemptStart(agreed["attempt"], decision, loaded, step, cursor, refused, damaged)
