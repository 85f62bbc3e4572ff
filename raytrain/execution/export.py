"""Exports a finished run: weights for plain PyTorch, and a text sample for a language model."""

from __future__ import annotations

import os
import shutil
import tempfile

from torch import nn

from raytrain.infer.generate import language_sample
from raytrain.models.huggingface.tokenizer import open_tokenizer
from raytrain.models.weights.stored import export_weights
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store
from raytrain.train.session import Session


def export(session: Session, module: nn.Module, run: RunFolder) -> None:
    """Write `weights/model.safetensors`, and `sample.json` if the model generates text. Called on rank 0 at the end.

    The weights folder also receives the files that `Trainable.export` writes, and the tokenizer's.

    Args:
        module: the session's module with its full weights.
    """
    own, tokenizer = session.trainable.export, session.source.tokenizer
    if own is None:
        export_weights(module.state_dict(), run.weights, metadata={"step": str(session.state.step)})
    if own is not None or tokenizer is not None:
        with tempfile.TemporaryDirectory(prefix="raytrain-", dir=run.path if run.is_local else None) as folder:
            if own is not None:
                own({name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}, folder)
            if tokenizer is not None:
                open_tokenizer(tokenizer).save_pretrained(folder)
            _publish(folder, os.path.dirname(run.weights))
    if session.source.decode is None:
        return
    sample = language_sample(module, session.source, context=session.job.model.keys.get("context"))
    if sample is not None:
        run.write_json(run.sample, {**sample, "step": session.state.step})


def _publish(folder: str, target: str) -> None:
    """Copy the files of `folder` to `target`, the weights last: if they exist, the export is complete."""
    store = open_store(target)
    store.make_dir("")
    for name in sorted(os.listdir(folder), key=lambda name: name.endswith(".safetensors")):
        source = os.path.join(folder, name)
        os.chmod(source, 0o644)  # safetensors creates files that only their owner can read
        if store.is_local:
            os.replace(source, os.path.join(store.uri, name))
            continue
        with open(source, "rb") as file, store.open_write(name) as copy:
            shutil.copyfileobj(file, copy, 16 * 2**20)
