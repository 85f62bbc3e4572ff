"""How an attempt begins: its number, what the failure rules say, and the checkpoint that everybody starts from."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from raytrain.checkpoint.reader import LoadedCheckpoint, load, newest_valid
from raytrain.data.rows.batches import Cursor
from raytrain.execution.failure_policy import RecoveryDecision, decide, origins
from raytrain.execution.reporter import Superseded
from raytrain.execution.rollback import skipped_to
from raytrain.runs.faults import Fault
from raytrain.runs.folder import RunFolder
from raytrain.train.job import TrainJob, place_of
from raytrain.train.parallel.collectives import Workers


@dataclass(frozen=True)
class AttemptStart:
    """What all workers know before they build anything.

    Attributes:
        attempt: its number.
        decision: after the newest fault.
        loaded: the checkpoint to start from, None for the start.
        step: of that checkpoint, 0 for the start; where nothing could be read, the last that an attempt began with.
        cursor: where the data goes on, if a roll-back has skipped some that the checkpoint does not know of.
        refused: why newer checkpoints were passed over.
    """

    attempt: int
    decision: RecoveryDecision
    loaded: LoadedCheckpoint | None
    step: int
    cursor: Cursor | None
    refused: list[str]


def attempt_number(job: TrainJob, run: RunFolder, *, faults: list[Fault]) -> int:
    """The number the driver took, for its first attempt; a new one after each restart by Ray. Rank 0's.

    Raises:
        Superseded: another command has taken the run folder over.
    """
    first, newest = job.first_attempt, run.current_attempt()
    if newest > first and run.owner_of(newest) != job.owner:
        raise Superseded(f"attempt {newest} of another command has taken over {run.path}")
    if newest == first and not faults:
        return first
    return run.next_attempt(job.owner)


def begin(job: TrainJob, run: RunFolder, *, workers: Workers, attempt: int, faults: list[Fault]) -> AttemptStart:
    """Rank 0 reads and decides, the others hear of it; then all have the same checkpoint. Collective.

    Args:
        attempt, faults: rank 0's.

    Raises:
        OSError: a checkpoint could not be read, which says nothing about it: nothing is given up for that.
    """
    message, loaded = None, None
    place = place_of(job, rank=workers.rank, world_size=workers.world_size)
    if workers.rank == 0:
        rows = run.read_rows(run.events)
        unread: OSError | None = None
        try:
            loaded, refused = newest_valid(run, place=place)
            step = loaded.step if loaded else 0
        except OSError as error:  # who has tried often enough ends all the same: no attempt gets any further than this
            refused, unread = [], error
            step = max((row["from_step"] for row in rows if row["kind"] == "attempt"), default=0)
        starts = origins(faults, rows, step=step)
        decision = decide(faults, retry=job.retry, fallback=job.precision.fallback, resumed_from=starts)
        if unread is not None and decision.action != "stop":
            raise unread
        cursor = skipped_to(rows, step)
        message = {"attempt": attempt, "step": step, "cursor": cursor and asdict(cursor), "refused": refused}
        message["decision"] = vars(decision)
    told = workers.broadcast_object(message)
    if workers.rank and told["step"] and told["decision"]["action"] != "stop":  # rank 0 has verified every byte of it
        loaded = load(run.checkpoint_dir(told["step"]), check_hashes=False, place=place)
    told["decision"] = RecoveryDecision(**told["decision"])
    told["cursor"] = Cursor(**told["cursor"]) if told["cursor"] else None
    return AttemptStart(**told, loaded=loaded)
