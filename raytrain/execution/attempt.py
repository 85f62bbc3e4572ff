"""Starts an attempt: takes its number, applies the failure rules and chooses the checkpoint that all workers load."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from raytrain.checkpoint.reader import LoadedCheckpoint, list_checkpoints, load, newest_valid
from raytrain.data.rows.batches import Cursor
from raytrain.execution.recovery.failure_policy import RecoveryDecision, decide, origins, restarted_from
from raytrain.execution.recovery.rollback import skipped_to
from raytrain.execution.reporter import Superseded
from raytrain.runs.commands import start_anew
from raytrain.runs.faults import Fault
from raytrain.runs.folder import RunFolder
from raytrain.train.job import TrainJob, place_of
from raytrain.train.parallel.collectives import Workers


@dataclass(frozen=True)
class AttemptStart:
    """The start of an attempt, the same on every worker.

    Attributes:
        attempt: the attempt number.
        decision: the decision of the failure rules after the newest fault.
        checkpoint: the checkpoint to restore; None starts at step 0.
        from_step: step of that checkpoint, or 0 without one. If no checkpoint could be read, the last step that an
            attempt started from.
        cursor: where the data continues, if a rollback skipped data after the checkpoint was written.
        refused_checkpoints: why newer checkpoints were not used.
        damaged: step and reason of those that were complete, newest first.
    """

    attempt: int
    decision: RecoveryDecision
    checkpoint: LoadedCheckpoint | None
    from_step: int
    cursor: Cursor | None
    refused_checkpoints: list[str]
    damaged: list[tuple[int, str]]

    @property
    def damage(self) -> str:
        """A line for people where complete checkpoints are not used; "" otherwise."""
        if not self.damaged:
            return ""
        found = "; ".join(f"the checkpoint of step {step} ({reason})" for step, reason in self.damaged)
        start = f"that of step {self.from_step}" if self.from_step else "step 0: there is no valid one"
        return f"damaged and not used: {found}; training starts from {start}"


def take_attempt_number(job: TrainJob, run: RunFolder, *, faults: list[Fault]) -> int:
    """Rank 0: return the number that the driver took for these workers; after a restart by Ray, take the next free one.

    Raises:
        Superseded: another command has taken over the run folder.
    """
    claimed, newest = job.claimed_attempt, run.current_attempt()
    if newest > claimed and run.owner_of(newest) != job.owner:
        raise Superseded(f"attempt {newest} of another command has taken over {run.path}")
    if newest == claimed and all(fault.attempt < claimed for fault in faults):
        return claimed
    return run.next_attempt(job.owner)


def agree_on_start(
    job: TrainJob, run: RunFolder, *, workers: Workers, attempt: int, faults: list[Fault]
) -> AttemptStart:
    """Rank 0 reads the run folder and decides, then all workers load the same checkpoint. Collective.

    Args:
        attempt, faults: used on rank 0 only.

    Raises:
        OSError: a checkpoint could not be read. That does not make it invalid, so no older one is used in its place.
    """
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
            decision = RecoveryDecision("stop", all_damaged(run, [reason for _, reason in damaged]))
        if unread is not None and decision.action != "stop":
            raise unread
        cursor = skipped_to(rows, step)
        message = {"attempt": attempt, "decision": vars(decision), "from_step": step}
        message |= {"cursor": cursor and asdict(cursor), "refused_checkpoints": refused}
        message["damaged"] = damaged
    agreed = workers.broadcast_object(message)
    step, decision = agreed["from_step"], RecoveryDecision(**agreed["decision"])
    if workers.rank and step and decision.action != "stop":  # rank 0 has verified every byte
        loaded = load(run.checkpoint_dir(step), check_hashes=False, place=place)
    return AttemptStart(
        attempt=agreed["attempt"],
        decision=decision,
        checkpoint=loaded,
        from_step=step,
        cursor=Cursor(**agreed["cursor"]) if agreed["cursor"] else None,
        refused_checkpoints=agreed["refused_checkpoints"],
        damaged=agreed["damaged"],
    )


def all_damaged(run: RunFolder, reasons: list[str]) -> str:
    """Why a resumed run without a valid checkpoint stops: to start at step 0 would replace its metrics and weights."""
    return (
        f"no checkpoint of {run.path} is valid ({'; '.join(reasons)}), and its metrics and weights are kept; "
        f"{start_anew(run)}"
    )
