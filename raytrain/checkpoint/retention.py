"""Deletes checkpoints: which ones are kept, and which are discarded before an attempt."""

from __future__ import annotations

from typing import Literal

from raytrain.checkpoint.reader import COMPLETE, best_checkpoint, list_checkpoints
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store


def discard(path: str) -> None:
    """Deletes a checkpoint directory, COMPLETE first, so that a partly deleted one never looks complete."""
    store = open_store(path)
    store.delete(COMPLETE)
    store.delete_tree("")


def retain(run: RunFolder, *, keep: int | Literal["all"], newest: int) -> list[int]:
    """Keeps the newest `keep` checkpoints up to step `newest`, and the best of them by eval loss; returns the steps
    that it deleted.

    Later checkpoints are not considered: they belong to an earlier course of the run that `discard_after` kept.
    Directories without COMPLETE are deleted too, since their writer has exited. Call it only while nothing is being
    written.
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
    """Deletes the checkpoints after the one that an attempt starts from; returns their steps.

    They belong to steps that were rolled back, or are damaged; a later resume must not find them. If an attempt starts
    from step 0, complete ones are kept: they could not be loaded, but they are all that is left.
    """
    gone = [info for info in list_checkpoints(run) if info.step > step and (step or not info.complete)]
    for info in gone:
        discard(info.path)
    return [info.step for info in gone]
