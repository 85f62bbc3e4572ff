"""Returns to an earlier checkpoint within an attempt.

A rollback follows consecutive non-finite steps: it skips the data of those steps and may raise the precision. A rewind
follows the loss of remote state: it repeats the same data.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from raytrain.checkpoint.reader import LoadedCheckpoint, load, newest_valid
from raytrain.checkpoint.retention import discard_after
from raytrain.data.rows.batches import Cursor
from raytrain.errors import RunError, StateLost
from raytrain.runs.folder import RunFolder
from raytrain.train.job import TrainJob, place_of
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision.policy import HIGHER_PRECISION
from raytrain.train.session import Session
from raytrain.train.state import LoopOutcome


class RollbackPolicy:
    """Rolls back after consecutive non-finite steps, until the limit is reached or nothing is left to try.

    Args:
        limit: maximum number of rollbacks in an attempt.
    """

    def __init__(self, run: RunFolder, *, limit: int) -> None:
        self._run, self._limit = run, limit
        self._times = 0
        self._last: tuple[int, str] | None = None  # step and precision of the last rollback

    def recover(self, session: Session, outcome: LoopOutcome) -> Session | LoopOutcome:
        """Return the session that continues the run, or the failed outcome if no rollback can help. Collective."""
        self._times += 1
        if self._times > self._limit:
            return LoopOutcome("failed", f"{outcome.reason}, after {self._times - 1} rollbacks (retry.rollbacks)")
        higher = _next_precision(session)
        last = self._last
        if last is not None and last == (session.state.step - outcome.bad_steps, higher):  # the same weights again
            return LoopOutcome(
                "failed",
                f"{outcome.reason}; no step after step {last[0]} was finite, even with different data, and {higher} "
                "is not raised any further: try a smaller optim.lr or a longer optim.warmup_steps, and check the data "
                "and model.init_from",
            )
        fresh, decision = roll_back(session, self._run, outcome=outcome)
        self._last = decision["value"], higher
        return fresh


def roll_back(session: Session, run: RunFolder, *, outcome: LoopOutcome) -> tuple[Session, dict[str, Any]]:
    """Build a session from the latest valid checkpoint (or step 0), skipping data and raising the precision.

    Collective. Rank 0 has finished its last checkpoint write before the call. The decision event is written before the
    new session is built, so that a later attempt knows of the rollback even if this one fails.

    Args:
        session: the session whose steps failed; it is closed.
        run: the run folder; metrics and checkpoints after the restored step are removed.
        outcome: why the loop returned.

    Returns:
        The new session, and the fields of the decision event.
    """
    job, workers = session.job, session.workers
    bad_step, cursor, higher = session.state.step, session.state.cursor, _next_precision(session)
    loaded, _ = _agree_on_checkpoint(run, job, workers)
    decision = {
        "what": "rollback",
        "value": loaded.step if loaded else 0,
        "precision": higher,
        "skipped": outcome.bad_steps,
        **asdict(cursor),
        "reason": f"{outcome.reason} before step {bad_step}; data up to epoch {cursor.epoch} row {cursor.position} is "
        "skipped",
    }
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
    """Rewinds to the latest valid checkpoint when remote state is lost, until the limit is reached.

    Args:
        limit: maximum number of rewinds without a new step between them.
    """

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
            _clear_frames(error)
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
    """Close a session and free its memory for the next one."""
    session.close()
    session.release()


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of an error: they keep micro-batches and autograd graphs alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
