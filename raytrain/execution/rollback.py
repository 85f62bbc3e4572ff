"""Going back inside an attempt: after non-finite steps in a row, to later data and a higher precision; after a loss of
state elsewhere, to the same data."""

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


class RollBacks:
    """Rolls back after non-finite steps in a row, as long as that leads anywhere.

    Args:
        limit: times in an attempt.
    """

    def __init__(self, run: RunFolder, *, limit: int) -> None:
        self._run, self._limit = run, limit
        self._times = 0
        self._last: tuple[int, str] | None = None  # step and precision gone on with

    def back(self, session: Session, outcome: LoopOutcome) -> Session | LoopOutcome:
        """The session to go on with, or how the run ends: too often, or nothing is left to try. Collective."""
        self._times += 1
        if self._times > self._limit:
            return LoopOutcome("failed", f"{outcome.reason}, after {self._times - 1} roll-backs (retry.rollbacks)")
        higher = _next_precision(session)
        last = self._last
        if last is not None and last == (session.state.step - outcome.bad_steps, higher):  # with the very same weights
            return LoopOutcome(
                "failed",
                f"{outcome.reason}; no step since step {last[0]} was finite, on other data either, and {higher} "
                "is not raised any further: a smaller optim.lr, a longer optim.warmup_steps or a look at the data and "
                "at model.init_from may help",
            )
        fresh, decision = roll_back(session, self._run, outcome=outcome)
        self._last = decision["value"], higher
        return fresh


def roll_back(session: Session, run: RunFolder, *, outcome: LoopOutcome) -> tuple[Session, dict[str, Any]]:
    """The newest good checkpoint (or the start), the data after the bad window, the next higher precision.

    Collective over the workers; rank 0 has written its last checkpoint by now. `session.say` is told before anything is
    built, so that another attempt knows of it whatever happens.

    Args:
        session: where the steps failed; it is of no use afterwards.
        run: the run folder; what is later than the state returned to is removed from it.
        outcome: why the loop returned.

    Returns:
        The session to go on with, and the fields of the decision event.
    """
    job, workers = session.job, session.workers
    bad_step, cursor, higher = session.state.step, session.state.cursor, _next_precision(session)
    loaded, _ = _same_checkpoint(run, job, workers)
    decision = {
        "what": "rollback",
        "value": loaded.step if loaded else 0,
        "precision": higher,
        **asdict(cursor),
        "reason": f"{outcome.reason} before step {bad_step}; data up to epoch {cursor.epoch} row {cursor.position} is "
        "skipped",
    }
    session.say("decision", **decision)
    if workers.rank == 0:
        run.flush()
    _end(session)
    fresh = Session(job, workers=workers, local_rank=session.local_rank, source=session.source, initial=loaded is None)
    _take_over(fresh, session, precision=higher, loaded=loaded, cursor=cursor)
    _forget_after(fresh, run)
    return fresh, decision


def skipped_to(rows: Iterable[Mapping[str, Any]], step: int) -> Cursor | None:
    """Where the data goes on after the checkpoint of `step` (0: the start), if a roll-back to it skipped some.

    Args:
        rows: events of the run. What went back further than a roll-back has passed its data in another way.
    """
    found: Mapping[str, Any] | None = None
    for row in rows:
        rolled = row["kind"] == "decision" and row.get("what") == "rollback" and "position" in row
        begun = row.get("from_step") if row["kind"] == "attempt" else None
        begun = row["value"] if row.get("what") == "rewind" else begun
        if rolled:
            found = row
        elif found is not None and begun is not None and begun < found["value"]:
            found = None
    return None if found is None or found["value"] != step else Cursor(found["epoch"], found["position"])


class Rewinds:
    """Goes back to the newest checkpoint when state elsewhere is lost, as long as that leads anywhere.

    Args:
        limit: times without a new step in between.
    """

    def __init__(self, run: RunFolder, *, limit: int) -> None:
        self._run, self._limit = run, limit
        self._furthest = self._times = 0

    def back(self, session: Session, error: StateLost) -> tuple[Session, dict[str, Any]]:
        """The session to go on with, and the decision event; again where more is lost meanwhile. Collective.

        Raises:
            RunError: too often without progress.
        """
        began = time.perf_counter()
        if session.state.step > self._furthest:
            self._furthest, self._times = session.state.step, 0
        while True:
            _forget_frames(error)
            self._times += 1
            if self._times > self._limit:
                raise RunError(f"{error}; {self._limit} times without a step (retry.restarts_without_progress)")
            try:
                fresh, decision = rewind(session, self._run, reason=str(error))
            except StateLost as again:
                error = again
                continue
            return fresh, {**decision, "seconds": time.perf_counter() - began}


def rewind(session: Session, run: RunFolder, *, reason: str) -> tuple[Session, dict[str, Any]]:
    """The newest good checkpoint (or the start) again, after state elsewhere was lost: the same data, the same series.

    Collective over the workers, which meet anew: the session is built first, and brings their new groups.

    Raises:
        StateLost: once more, meanwhile.
    """
    job, workers = session.job, session.workers
    _end(session)
    fresh = Session(job, workers=workers, local_rank=session.local_rank, source=session.source, initial=False)
    loaded, cursor = _same_checkpoint(run, job, workers)
    if loaded is None and job.model.init_from is not None:  # which experts elsewhere read while the model is built
        _end(fresh)
        fresh = Session(job, workers=workers, local_rank=session.local_rank, source=session.source)
    _take_over(fresh, session, precision=session.precision or "fp32", loaded=loaded, cursor=cursor)
    _forget_after(fresh, run)
    lost = session.state.step - fresh.state.step
    deaths, note = fresh.trainable.remote.deaths, fresh.trainable.remote.note
    more = [f"{death.who} died ({death.why})" for death in deaths if f"{death.who} died" not in reason]
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


def _end(session: Session) -> None:
    """What follows has its memory to itself."""
    session.close()
    session.release()


def _forget_frames(error: BaseException | None) -> None:
    """The places that an error came through hold micro-batches and what backward needs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _take_over(
    fresh: Session, session: Session, *, precision: str, loaded: LoadedCheckpoint | None, cursor: Cursor | None
) -> None:
    """Bring a session to where `session`'s attempt goes on."""
    fresh.say = session.say
    fresh.prepare(precision)
    fresh.sizing = session.sizing
    if loaded is not None:
        fresh.restore(loaded)
    if cursor is not None:
        fresh.state.cursor = cursor


def _forget_after(session: Session, run: RunFolder) -> None:
    """Rank 0: remove what is later than the state of a session."""
    if session.workers.rank == 0:
        run.truncate_metrics(session.state.step)
        discard_after(run, session.state.step)


def _same_checkpoint(run: RunFolder, job: TrainJob, workers: Workers) -> tuple[LoadedCheckpoint | None, Cursor | None]:
    """The newest good one as rank 0 sees it and where the data goes on after it, if elsewhere, on every worker: asked
    one by one they might see different ones."""
    place, loaded, message = place_of(job, rank=workers.rank, world_size=workers.world_size), None, None
    if workers.rank == 0:
        loaded = newest_valid(run, place=place).checkpoint
        step = loaded.step if loaded else 0
        cursor = skipped_to(run.read_rows(run.events), step)
        message = {"step": step, "cursor": cursor and asdict(cursor)}
    told = workers.broadcast_object(message)
    if workers.rank and told["step"]:
        loaded = load(run.checkpoint_dir(told["step"]), check_hashes=False, place=place)
    return loaded, Cursor(**told["cursor"]) if told["cursor"] else None
