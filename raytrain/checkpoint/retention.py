"""How often to save, and which checkpoints stay."""

from __future__ import annotations

import math
from typing import Literal

from raytrain.checkpoint.reader import COMPLETE, best_checkpoint, list_checkpoints
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store


def discard(path: str) -> None:
    """Deletes a checkpoint directory, COMPLETE first: half deleted, it never looks complete."""
    store = open_store(path)
    store.delete(COMPLETE)
    store.delete_tree("")


def retain(run: RunFolder, *, keep: int | Literal["all"], newest: int) -> list[int]:
    """Keeps the newest `keep` checkpoints up to step `newest`, and the best of them by eval loss; returns the steps
    that it deleted.

    What is later was spared by `discard_after` and is none of this course. Directories without COMPLETE go too: their
    writer is gone. Call it only while nothing is being written.
    """
    infos = [info for info in list_checkpoints(run) if info.step <= newest]
    whole = [info for info in infos if info.complete]
    kept = {info.step for info in (whole if keep == "all" else whole[-max(1, keep) :])}
    best = best_checkpoint(whole) if keep != "all" else None
    if best is not None:
        kept.add(best.step)
    gone = [info for info in infos if info.step not in kept]
    for info in gone:
        discard(info.path)
    return [info.step for info in gone]


def discard_after(run: RunFolder, step: int) -> list[int]:
    """Deletes the checkpoints past the one that an attempt starts from; returns their steps.

    They belong to a course that was given up, or are damaged; a later resume must not find them. Where there is none to
    start from (step 0), the complete ones stay: whatever kept them from being loaded, they are all that is left.
    """
    gone = [info for info in list_checkpoints(run) if info.step > step and (step or not info.complete)]
    for info in gone:
        discard(info.path)
    return [info.step for info in gone]


def solve_interval(
    *,
    stall_s: float,
    step_time_s: float,
    write_s: float = 0.0,
    budget: float = 0.03,
    minimum: int = 1,
    maximum: int = 10_000,
) -> Resolved:
    """The smallest number of steps between checkpoints whose stall takes at most `budget` of the time.

    Args:
        stall_s: how long one checkpoint holds up the training, as measured.
        step_time_s: seconds per step without checkpoints.
        write_s: how long the background write takes; a shorter interval would wait for it.
        minimum, maximum: bounds in steps; where `maximum` is the smaller need, the reason says what it costs.
    """
    if not step_time_s > 0 or not 0 < budget < 1 or not 1 <= minimum <= maximum:
        raise ValueError(f"no interval for {step_time_s=}, {budget=}, {minimum=}, {maximum=}")

    def share(steps: int) -> float:
        return stall_s / (stall_s + steps * step_time_s)

    steps = max(1, math.ceil(stall_s * (1 - budget) / (budget * step_time_s) - 1e-9))
    while share(steps) > budget:  # the last bit of the rounding
        steps += 1
    steps = max(steps, math.ceil(write_s / step_time_s))
    chosen = min(max(steps, minimum), maximum)
    reason = f"a stall of {stall_s:.3g} s each {chosen} steps of {step_time_s:.3g} s is {share(chosen):.2%}"
    if chosen < steps:
        over = f"more than the {budget:.0%} meant, but at most {maximum} steps apart"
        return Resolved(chosen, f"{reason} of the time, {over}")
    if chosen > steps:
        return Resolved(chosen, f"{reason} of the time; at least {minimum} steps apart")
    return Resolved(chosen, f"{reason} of the time, at most {budget:.0%} meant")
