"""The failure rules: pure functions from the recorded faults to a decision (DESIGN section 7).

Rank 0 applies the rules at the start of an attempt, in this order:
  1. raytrain explains the failure itself (wrong device, unreadable data), so a restart would repeat it: stop.
  2. out of memory outside the passes of a step (inside them the step retries by itself): restart with half the
     micro-batch while it is larger than 1. The rules below do not count such a restart.
  3. the same error at the same place in the code, twice at the same step and precision or three times at any step,
     is a bug: stop with its cause. Input and output errors, and collectives that failed (`TRANSIENT_ERRORS`), are
     exempt.
  4. an operation failed inside a reduced-precision step (torch raises RuntimeError) and `precision.fallback` is on:
     continue in fp32, once.
  5. `retry.restarts_without_progress` restarts without a new committed step: stop.
  6. otherwise (a lost worker, the loss of Ray itself): restart from the latest valid checkpoint.

The driver applies the same rules before it starts a new connection to Ray, where Ray itself was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from raytrain.config.sections import RetryConfig
from raytrain.errors import CollectiveFailed
from raytrain.runs.faults import CAUSES, Fault
from raytrain.train.memory.micro_batch import halved

#: What torch raises for an operation without a kernel in the autocast dtype; a TypeError is a mistake in the code.
OPERATION_ERRORS = ("RuntimeError",)
#: Errors of a failing disk, network file system or object store; a missing file is a mistake and not among them.
TRANSIENT_ERRORS = ("OSError", "TimeoutError", "ConnectionError", "ConnectionResetError", CollectiveFailed.__name__)


@dataclass(frozen=True)
class RecoveryDecision:
    """What the next attempt does, and why.

    Attributes:
        action: `go_on` (continue), `raise_precision` (continue in `precision`) or `stop`.
        reason: why, as one sentence.
        precision: the precision to continue in.
        micro_batch: maximum micro-batch size in rows; None keeps the planned size.
    """

    action: Literal["go_on", "raise_precision", "stop"]
    reason: str
    precision: str | None = None
    micro_batch: int | None = None


def decide(faults: list[Fault], *, retry: RetryConfig, fallback: bool, resumed_from: list[int]) -> RecoveryDecision:
    """Decide what follows the newest of `faults`.

    Args:
        faults: the faults of this command, oldest first; for each failed attempt the first recorded one.
        retry: the limits.
        fallback: `precision.fallback`.
        resumed_from: the step that each attempt of this command started from, oldest first, including the next one.
    """
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
        return _after_out_of_memory(newest, what, resumed_from[-1])
    compared = newest.traceback and newest.error not in TRANSIENT_ERRORS
    alike = [fault for fault in faults[:-1] if compared and _same_place(fault, newest)]
    if any((fault.step, fault.precision) == (newest.step, newest.precision) for fault in alike):
        where = "before the first step" if newest.step is None else f"at step {newest.step}"
        return RecoveryDecision("stop", f"the same error occurred twice {where}: {what}")
    if len(alike) >= 2:
        return RecoveryDecision("stop", f"the same error occurred three times: {what}")
    if newest.reduced and fallback and newest.error in OPERATION_ERRORS:
        broke = f"{newest.precision} failed at step {newest.step} ({what})"
        reason = f"attempt {newest.attempt} failed: {broke}; {restarted_from(resumed_from[-1])} in fp32"
        return RecoveryDecision("raise_precision", reason, "fp32")
    without_progress = 0
    for (earlier, later), fault in zip(pairwise(resumed_from), faults, strict=False):
        if _is_halvable(fault):
            continue
        without_progress = 0 if later > earlier else without_progress + 1
    if without_progress >= retry.restarts_without_progress:
        return RecoveryDecision("stop", f"{without_progress} restarts without progress; the last fault was {what}")
    return RecoveryDecision("go_on", f"{failed_attempt(newest)}; {restarted_from(resumed_from[-1])}")


def failed_attempt(fault: Fault) -> str:
    """Which attempt failed, where and why, as words."""
    if fault.error in CAUSES:  # Ray was lost, or a process died: the message names which
        when = "" if fault.step is None else f" after step {fault.step - 1}"
        return f"attempt {fault.attempt} failed{when}: {fault.message}"
    at = "" if fault.step is None else f" at step {fault.step}"
    if fault.error == CollectiveFailed.__name__:  # the record of its cause would come first
        return f"attempt {fault.attempt} failed{at}: rank {fault.rank} lost the other workers ({fault.message})"
    return f"attempt {fault.attempt} failed{at} on rank {fault.rank} ({fault.what})"


def restarted_from(step: int) -> str:
    """Where an attempt starts, as words."""
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


def _after_out_of_memory(fault: Fault, what: str, step: int) -> RecoveryDecision:
    where = f"rank {fault.rank} ran out of memory at step {fault.step} ({what})"
    if fault.micro_batch and fault.micro_batch > 1:
        half = halved(fault.micro_batch)
        where = f"attempt {fault.attempt} failed: {where}"
        return RecoveryDecision("go_on", f"{where}; {restarted_from(step)} with micro-batches of {half}")
    return RecoveryDecision("stop", f"{where} with loop.micro_batch_size 1")


def _same_place(one: Fault, other: Fault) -> bool:
    """Whether two faults have the same type and were raised at the same place in the user's code, or else have the same
    stack frames. Addresses and numbers in their messages may differ."""
    if one.place or other.place:
        return (one.error, one.place) == (other.error, other.place)

    def frames(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]

    return one.error == other.error and frames(one.traceback) == frames(other.traceback)
