"""Loads what a checkpoint holds into a model, or says which names and shapes do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from raytrain.checkpoint.reader import STATE, LoadedCheckpoint
from raytrain.errors import CheckpointError
from raytrain.trainable import Trainable


def restore_remote(trainable: Trainable, loaded: LoadedCheckpoint) -> None:
    """Have state in other processes loaded, or say that the checkpoint has some and this run no place for it.

    Raises:
        CheckpointError: the one holds such state and the other does not.
    """
    if trainable.remote is not None:
        trainable.remote.restore(loaded.path, step=loaded.step)
        return
    own = {STATE}.union(*loaded.manifest["parts"].values())
    others = sorted(set(loaded.manifest["files"]) - own)
    if others:
        raise CheckpointError(
            f"{loaded.path} holds {', '.join(others)}, state of processes beside the workers: resume it with such "
            "processes (experts.hosts a number, or colocated)"
        )


def load_module(module: nn.Module, state: dict[str, Any]) -> None:
    """Load weights, or say which names and shapes do not fit.

    Raises:
        CheckpointError: first five differences, by name.
    """
    refuse_other_model(differences(module.state_dict(), state, shapes=lambda one: {one.shape}))
    module.load_state_dict(state)


def differences(
    own: Mapping[str, Any], state: Mapping[str, Any], *, shapes: Callable[[torch.Tensor], set[torch.Size]]
) -> list[str]:
    """What of a module's saved state does not fit `own`, by name; `shapes` says which a tensor of `own` may have."""
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in the model" for name in state if name not in own]
    return wrong + [
        f"{name} has shape {tuple(state[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in state and hasattr(own[name], "shape") and state[name].shape not in shapes(own[name])
    ]


def refuse_other_model(wrong: list[str]) -> None:
    """Raises CheckpointError with the first five differences; nothing where there are none."""
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError("the checkpoint belongs to another model: " + "; ".join(wrong[:5]) + more)
