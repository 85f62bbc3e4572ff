"""Failure rules, pure: faults in, a decision out (DESIGN section 7). Rank 0 applies them at the start of an attempt.

The rules, in order:
  1. a failure that raytrain explains itself (wrong device, unreadable data) will not go away: stop.
  2. out of memory (outside the passes of a step, which undo it by themselves): half the micro-batch, as often as there
     is a half; such a restart is not counted by the rules below.
  3. the same traceback at the same step twice, under the same precision, or three times at any step: a bug; stop with
     its cause. (Not an error of reading or writing, `PASSING_ERRORS`: that may pass.)
  4. an operation that failed inside a reduced-precision step (torch raises RuntimeError), with `precision.fallback`:
     go on in fp32, once.
  5. `retry.restarts_without_progress` restarts without a new committed step: stop.
  6. otherwise a lost worker: restart from the newest good checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from raytrain.config.sections import RetryConfig
from raytrain.runs.faults import Fault
from raytrain.train.memory.micro_batch import halved

#: What torch raises for an operation without a kernel in the autocast dtype; a TypeError is somebody's mistake.
OPERATION_ERRORS = ("RuntimeError",)
#: Of a disk, a network file system or an object store out of order; a file that is not there is somebody's mistake.
PASSING_ERRORS = ("OSError", "TimeoutError", "ConnectionError", "ConnectionResetError")


@dataclass(frozen=True)
class RecoveryDecision:
    """What the next attempt does: `go_on`, `raise_precision` (to `precision`) or `stop`; and why. Its micro-batches are
    of at most `micro_batch` rows; None = as planned."""

    action: Literal["go_on", "raise_precision", "stop"]
    reason: str
    precision: str | None = None
    micro_batch: int | None = None


def decide(faults: list[Fault], *, retry: RetryConfig, fallback: bool, resumed_from: list[int]) -> RecoveryDecision:
    """The decision after the newest of `faults`.

    Args:
        faults: of this command, oldest first (one for each failed attempt: the first that was recorded).
        retry: the limits.
        fallback: `precision.fallback`.
        resumed_from: the step each attempt of this command started from, oldest first, the coming one last.
    """
    if not faults:
        return RecoveryDecision("go_on", "no fault so far")
    decision = _decide(faults, retry=retry, fallback=fallback, resumed_from=resumed_from)
    halves = [halved(fault.micro_batch) for fault in faults if fault.out_of_memory and fault.micro_batch]
    return replace(decision, micro_batch=min(halves)) if halves else decision


def _decide(faults: list[Fault], *, retry: RetryConfig, fallback: bool, resumed_from: list[int]) -> RecoveryDecision:
    newest = faults[-1]
    what = f"{newest.error}: {newest.message}" if newest.message else newest.error
    if newest.final:
        return RecoveryDecision("stop", what)
    if _has_half(newest):
        return _after_out_of_memory(newest, what, resumed_from[-1])
    compared = newest.traceback and newest.error not in PASSING_ERRORS
    alike = [fault for fault in faults[:-1] if compared and _same_place(fault, newest)]
    if any((fault.step, fault.precision) == (newest.step, newest.precision) for fault in alike):
        return RecoveryDecision("stop", f"the same error twice at step {newest.step}, so it is no accident: {what}")
    if len(alike) >= 2:
        return RecoveryDecision("stop", f"the same error three times, so it is no accident: {what}")
    if newest.reduced and fallback and newest.error in OPERATION_ERRORS:
        return RecoveryDecision("raise_precision", f"{newest.precision} failed at step {newest.step} ({what})", "fp32")
    without_progress = 0
    for (earlier, later), fault in zip(pairwise(resumed_from), faults, strict=False):
        if _has_half(fault):
            continue
        without_progress = 0 if later > earlier else without_progress + 1
    if without_progress >= retry.restarts_without_progress:
        return RecoveryDecision("stop", f"{without_progress} restarts without progress; the last fault was {what}")
    return RecoveryDecision("go_on", f"rank {newest.rank} {_when(newest)} ({what}); {_from(resumed_from[-1])}")


def _when(fault: Fault) -> str:
    return "failed" if fault.step is None else f"failed at step {fault.step}"


def _from(step: int) -> str:
    return f"restarted from the checkpoint of step {step}" if step else "there is no checkpoint yet: begun again"


def origins(faults: list[Fault], rows: Iterable[Mapping[str, Any]], *, step: int) -> list[int]:
    """The step each failed attempt had started from, and last `step`, which the coming one starts from.

    An attempt says so in the events once it has everything. One that did not come as far would have started where the
    next one does: it has made no progress.
    """
    begun = {row["attempt"]: int(row["from_step"]) for row in rows if row["kind"] == "attempt"}
    found = [step]
    for fault in reversed(faults):
        found.append(begun.get(fault.attempt, found[-1]))
    return found[::-1]


def _has_half(fault: Fault) -> bool:
    """Out of memory where there were micro-batches, which can be smaller."""
    return fault.out_of_memory and fault.micro_batch is not None


def _after_out_of_memory(fault: Fault, what: str, step: int) -> RecoveryDecision:
    where = f"rank {fault.rank} ran out of memory at step {fault.step} ({what})"
    if fault.micro_batch and fault.micro_batch > 1:
        half = halved(fault.micro_batch)
        return RecoveryDecision("go_on", f"{where}; {_from(step)} with micro-batches of {half}")
    return RecoveryDecision(
        "stop",
        f"{where} with loop.micro_batch_size 1; a smaller model or shorter samples (model.*), optim.name: sgd, "
        "loop.activation_checkpointing: true or data.storage: stream need less memory",
    )


def _same_place(one: Fault, other: Fault) -> bool:
    """Failures are alike when type and frames are; addresses and numbers in the message may differ."""

    def frames(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]

    return one.error == other.error and frames(one.traceback) == frames(other.traceback)
