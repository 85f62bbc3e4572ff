"""The verb `export`, and the function `export` for Python: the weights of any checkpoint of a run, without Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jobs.driver.build import build
from jobs.job.facts import path_from_here, resolved, run_named
from jobs.job.spec import load_spec
from raytrain.checkpoint.reader import CheckpointWeights
from raytrain.config.sections import PLACEHOLDER
from raytrain.config.user_code import make_importable
from raytrain.errors import CheckpointError, InputError
from raytrain.execution.export import Export, checkpoint_of, export_checkpoint
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store, typed_path

__all__ = ["export"]

#: A running run may delete a checkpoint while it is read; then another one is chosen, this many times.
TRIES = 3


def export(run: str | Path, *, step: int | str | None = None, to: str | Path | None = None) -> str:
    """Write the weights of a checkpoint of a run, and return the folder that holds them.

    Args:
        run: the run folder, or `latest`; the run may be finished, interrupted, failed or still running.
        step: "best", "last" or a number; None is what a finished run exports (`save.export`).
        to: a new or empty folder or URI; None is `exports/step_N` in the run folder.

    Raises:
        InputError: there is no such run or checkpoint, or the folder holds files already.
        CheckpointError: the checkpoint is damaged.

    Example:
        >>> from jobs.export import export
        >>> from safetensors.torch import load_file
        >>> folder = export("runs/latest", step="last", to="exported")
        >>> tensors = load_file(f"{folder}/model.safetensors")
        >>> sorted(tensors)[:2]
        ['layers.0.bias', 'layers.0.weight']
    """
    return _exported(str(run), step=step, target=None if to is None else str(to))[0]


def _exported(path: str, *, step: int | str | None, target: str | None) -> tuple[str, dict[str, str]]:
    run = run_named(path)
    wanted: int | str = planned_step(run) if step is None else str(step)
    if step is not None and wanted not in ("best", "last"):
        if not wanted.isdecimal():
            raise InputError("--step", got=wanted, expected="best, last, or the step of a checkpoint")
        wanted = int(wanted)
    return export_weights_of(run, wanted, target and typed_path(target, key="--to"))


def export_verb(path: str, *, step: str | None, target: str | None) -> int:
    """Export a checkpoint, print where to and what, and return the exit code 0.

    Args, Raises: as `export`; `target` is its `to`.
    """
    folder, notes = _exported(path, step=step, target=target)
    loss = f", {notes['loss_kind']} loss {float(notes['loss']):.6g}" if "loss" in notes else ""
    print(f"weights of step {notes['step']}{loss}: {path_from_here(folder)}")
    return 0


def export_weights_of(run: RunFolder, step: int | str, target: str | None) -> tuple[str, dict[str, str]]:
    """Export the checkpoint of `step` (a number, "best" or "last"); returns the folder and the weights' metadata."""
    for left in reversed(range(TRIES)):
        info = checkpoint_of(run, step)
        folder = target or join(run.path, f"exports/step_{info.step:08d}")
        folder = open_store(folder).uri
        store = open_store(folder)
        held = [entry.name for entry in store.entries("")]
        if held or (store.is_local and os.path.exists(store.uri) and not os.path.isdir(store.uri)):
            seen = f"{folder}, which holds {held[0]}" if held else f"{folder}, which is a file"
            raise InputError("--to", got=seen, expected="a new or empty folder")
        try:
            return folder, export_checkpoint(info, folder, build_export=lambda found: _own_export(run, found))
        except CheckpointError:
            still_there = any(open_store(info.path).entries(""))
            if still_there or not left:
                raise
    raise AssertionError("the last try returns or raises")


def planned_step(run: RunFolder) -> str:
    """What a finished run exports, if it has been evaluated; else the last step."""
    plan: dict[str, Any] = run.read_json(run.plan) if run.exists(run.plan) else {}
    wanted = plan.get("choices", {}).get("export", {}).get("value", "last")
    if wanted == "best":
        try:
            checkpoint_of(run, "best")
        except InputError:
            return "last"
    return wanted


def _own_export(run: RunFolder, found: CheckpointWeights) -> Export:
    """Build the run's model, and return its `Trainable.export`."""
    mapping = run.recorded_job()
    module = mapping.get("model", {}).get("module")
    if isinstance(module, str) and module.startswith(PLACEHOLDER):
        raise InputError(
            "model.module", got=f"{module}, which a run folder cannot hold", expected="a model.builder",
            remedy="its format is written by code of the object; `model.init_from` loads the checkpoint itself",
        )  # fmt: skip
    make_importable(os.getcwd())
    trainable, _where = build(resolved(load_spec(mapping=mapping).spec), found.manifest["extra"]["source_facts"])
    if trainable.export is None:
        raise InputError(
            "model.builder", got="a model without a format of its own", expected="the model that the run trained",
            remedy="the code of the builder has changed since",
        )  # fmt: skip
    return trainable.export
