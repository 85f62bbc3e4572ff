"""What a finished run leaves for others: weights for plain PyTorch, and for a language model a sample of its text."""

from __future__ import annotations

from torch import nn

from raytrain.checkpoint import export_weights
from raytrain.infer.generate import language_sample
from raytrain.run_folder import RunFolder
from raytrain.session import Session


def export(session: Session, module: nn.Module, run: RunFolder) -> None:
    """Write `weights/model.safetensors`, and `sample.json` where the model writes text. Rank 0, at the end.

    `module` is the session's with all its weights.
    """
    export_weights(module.state_dict(), run.weights, metadata={"step": str(session.state.step)})
    if session.source.decode is None:
        return
    sample = language_sample(module, session.source, context=session.job.model.keys.get("context"))
    if sample is not None:
        run.write_json(run.sample, {**sample, "step": session.state.step})
