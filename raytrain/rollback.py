"""Rolling back inside an attempt: after non-finite steps in a row, an earlier state, later data, a higher precision."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from raytrain.checkpoint import LoadedCheckpoint, discard_after, load, newest_good
from raytrain.errors import RunError, StateLost
from raytrain.gradients import Workers
from raytrain.loop_state import Outcome
from raytrain.precision import HIGHER_PRECISION
from raytrain.run_folder import RunFolder
from raytrain.session import Session
from raytrain.train_job import TrainJob, place_of


def roll_back(session: Session, run: RunFolder, *, outcome: Outcome) -> tuple[Session, dict[str, Any]]:
    """The newest good checkpoint (or the start), the data after the bad window, the next higher precision.

    Collective over the workers; rank 0 has written its last checkpoint by now.

    Args:
        session: where the steps failed.
        run: the run folder; what is later than the state returned to is removed from it.
        outcome: why the loop returned.

    Returns:
        The session to go on with, and the fields of the decision event.
    """
    job, workers = session.job, session.workers
    bad_step, cursor = session.state.step, session.state.cursor
    higher = session.precision or "fp32"
    if job.precision.fallback:
        higher = HIGHER_PRECISION.get(higher, higher)
    loaded = _same_checkpoint(run, job, workers)
    session.close()
    session.switches.end()  # of a module that was given as an object, which the next session has too
    fresh = Session(
        job, workers=workers, local_rank=session.local_rank, source=session.source, initial=loaded is None
    )
    fresh.prepare(higher)
    fresh.sizing = session.sizing
    if loaded is not None:
        fresh.restore(loaded)
    fresh.state.cursor = cursor
    if workers.rank == 0:
        run.truncate_metrics(fresh.state.step)
        discard_after(run, fresh.state.step)
    reason = (
        f"{outcome.reason} before step {bad_step}; data up to epoch {cursor.epoch} row {cursor.position} is skipped"
    )
    return fresh, {"what": "rollback", "value": fresh.state.step, "precision": higher, "reason": reason}


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
    session.close()
    fresh = Session(job, workers=workers, local_rank=session.local_rank, source=session.source)
    loaded = _same_checkpoint(run, job, workers)
    fresh.prepare(session.precision or "fp32")
    fresh.sizing = session.sizing
    if loaded is not None:
        fresh.restore(loaded)
    if workers.rank == 0:
        run.truncate_metrics(fresh.state.step)
        discard_after(run, fresh.state.step)
    lost = session.state.step - fresh.state.step
    deaths, note = [], ""
    if fresh.trainable.elsewhere is not None:
        deaths, note = fresh.trainable.elsewhere.deaths, fresh.trainable.elsewhere.note
    more = [f"{death.who} died ({death.why})" for death in deaths if f"{death.who} died" not in reason]
    return fresh, {
        "what": "rewind",
        "value": fresh.state.step,
        "lost_steps": lost,
        "reason": "; ".join([reason, *more, *([note] if note else [])]),
        "died": [asdict(death) for death in deaths],
    }


def _same_checkpoint(run: RunFolder, job: TrainJob, workers: Workers) -> LoadedCheckpoint | None:
    """The newest good one as rank 0 sees it, on every worker: asked one by one they might see different ones."""
    place = place_of(job, rank=workers.rank, world=workers.world)
    loaded = newest_good(run, place=place).checkpoint if workers.rank == 0 else None
    step = json.loads(workers.gather_bytes(json.dumps(loaded and loaded.step).encode())[0])
    if workers.rank and step is not None:
        loaded = load(run.checkpoint_dir(step), check_hashes=False, place=place)
    return loaded
