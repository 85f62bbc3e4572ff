"""Exports weights for plain PyTorch, of a run that ends or of any checkpoint, and a text sample of a language model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from raytrain.checkpoint.reader import (
    CheckpointInfo,
    CheckpointWeights,
    best_checkpoint,
    list_checkpoints,
    read_weights,
)
from raytrain.checkpoint.safetensors import encoded_header
from raytrain.errors import CheckpointError, InputError
from raytrain.infer.generate import language_sample
from raytrain.models.huggingface import open_tokenizer
from raytrain.models.weights.stored import as_tensors, export_weights
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store, split
from raytrain.train.job import load_module
from raytrain.train.session import Session
from raytrain.train.state import LoopState

Export = Callable[[dict[str, Tensor], str], None]
"""`Trainable.export`."""

NAME = "model.safetensors"


def export(session: Session, module: nn.Module, run: RunFolder) -> None:
    """Write `weights/model.safetensors`, and `sample.json` if the model generates text. Called on rank 0 at the end.

    The weights are those of the last step, or of the best evaluation if the plan says so (`save.export`). The weights
    folder also receives the files that `Trainable.export` writes, and the tokenizer's. `module` is the session's with
    its full weights; it is left with those that were exported, of which the sample is taken.
    """
    state, step = session.state, session.state.step
    best = state.best_step if session.job.plan.value("export", "last") == "best" else None
    if best is not None and best != step:
        try:
            load_module(module, read_weights(run.checkpoint_dir(best)).tensors)
            step = best
        except (CheckpointError, OSError) as error:
            reason = f"the checkpoint of the best evaluation, step {best}, cannot be read: {error}"
            session.say("decision", what="export", value="last", step=step, reason=reason)
    write_weights(
        module.state_dict(), split(run.weights)[0], own=session.trainable.export,
        tokenizer=session.source.tokenizer, notes=notes_of(state, step=step),
    )  # fmt: skip
    if session.source.decode is None:
        return
    sample = language_sample(module, session.source, context=session.job.model.keys.get("context"))
    if sample is not None:
        run.write_json(run.sample, {**sample, "step": step})


def notes_of(state: LoopState, *, step: int) -> dict[str, str]:
    """Metadata of the weights of `step`: the step, its loss, and whether that is of the eval split or of training.
    `state` is that of the loop after `step`, or at its end."""
    losses = {"eval": None, "train": state.final_loss}
    if step == state.best_step:
        losses["eval"] = state.best_eval_loss
    elif state.last_eval and state.last_eval["step"] == step:
        losses["eval"] = state.last_eval["loss"]
    kind = "train" if losses["eval"] is None else "eval"
    loss = losses[kind]
    return {"step": str(step), **({} if loss is None else {"loss": repr(float(loss)), "loss_kind": kind})}


def write_weights(
    state: Mapping[str, Any], target: str, *, own: Export | None, tokenizer: str | None, notes: Mapping[str, str]
) -> None:
    """Write a folder of weights for plain PyTorch; `model.safetensors` comes last, so the others are complete with it.

    Args:
        state: the complete state_dict, on any device.
        own: writes the files of the model's own format; None writes `model.safetensors` alone.
        tokenizer: folder of the tokenizer whose files are added.
        notes: metadata of the safetensors file.
    """
    if own is None and tokenizer is None:
        export_weights(state, join(target, NAME), metadata=notes)
        return
    store = open_store(target)
    store.make_dir("")
    with tempfile.TemporaryDirectory(prefix=".raytrain-", dir=store.uri if store.is_local else None) as folder:
        if own is None:
            export_weights(state, os.path.join(folder, NAME), metadata=notes)
        else:
            tensors, about = as_tensors(state)
            own({name: tensor.cpu() for name, tensor in tensors.items()}, folder)
            if os.path.exists(os.path.join(folder, NAME)):  # a model may write another kind of file
                # the header stands before the tensors, so that the file is copied to change it
                path = os.path.join(folder, NAME)
                with open(path, "rb") as file, open(f"{path}.tmp", "wb") as copy:
                    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                    header["__metadata__"] = {**notes, **about, **header.get("__metadata__", {})}
                    copy.write(encoded_header(header))
                    shutil.copyfileobj(file, copy, 16 * 2**20)
                os.replace(f"{path}.tmp", path)
        if tokenizer is not None:
            open_tokenizer(tokenizer).save_pretrained(folder)
        for name in sorted(os.listdir(folder), key=lambda name: name.endswith(".safetensors")):
            source = os.path.join(folder, name)
            os.chmod(source, 0o644)  # safetensors creates files that only their owner can read
            if store.is_local:
                os.replace(source, os.path.join(store.uri, name))
                continue
            with open(source, "rb") as file, store.open_write(name) as copy:
                shutil.copyfileobj(file, copy, 16 * 2**20)


def checkpoint_of(run: RunFolder, step: int | str) -> CheckpointInfo:
    """The complete checkpoint of a step, "best" (by eval loss, the first of equals) or "last". Raises InputError if
    there is none; the message lists those that exist."""
    found = [info for info in list_checkpoints(run) if info.complete]
    if not found:
        raise InputError("run folder", got=f"{run.path} without a complete checkpoint", expected="at least one")
    steps = ", ".join(str(info.step) for info in found)
    if step == "last":
        return found[-1]
    if step == "best":
        best = best_checkpoint(found)
        if best is None:
            expected = f"last, or one of the steps {steps}"
            raise InputError("--step", got="best, but no checkpoint has an eval loss", expected=expected)
        return best
    named = next((info for info in found if info.step == step), None)
    if named is None:
        raise InputError("--step", got=str(step), expected=f"best, last, or one of the steps {steps}")
    return named


def export_checkpoint(
    info: CheckpointInfo, target: str, *, build_export: Callable[[CheckpointWeights], Export]
) -> dict[str, str]:
    """Write the weights of a checkpoint to a folder, in the format of a finished run's `weights/`; returns the
    metadata: step, loss and loss_kind.

    Args:
        build_export: builds the run's model and returns its `Trainable.export`; called only where the model has a
            format of its own.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
    """
    found = read_weights(info.path)
    about = found.manifest["extra"]
    notes = notes_of(LoopState.from_json(found.state["loop"]), step=info.step)
    own = build_export(found) if about.get("own_format") else None
    write_weights(found.tensors, target, own=own, tokenizer=about.get("tokenizer"), notes=notes)
    return notes
