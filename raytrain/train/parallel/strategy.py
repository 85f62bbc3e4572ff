"""How a model lies on the workers: whole on each of them, or each with its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import torch
from torch import nn

from raytrain.elsewhere import SavedElsewhere
from raytrain.runs.folder import RunFolder
from raytrain.train.feed import Feed
from raytrain.train.job import load_module
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import Reduction
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import Batch, Trainable


class ForStep(TypedDict, total=False):
    """What a layout gives `TrainingStep`."""

    reduction: Reduction
    filler: Callable[[], Batch]


class Layout(Protocol):
    """Every verb is one of all workers at the same moment."""

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """The module on the device in the master format, rank 0's weights everywhere.

        Args:
            fp32_layers: names of layers that compute in the master format.
        """
        ...

    def for_step(self, feed: Callable[[], Feed]) -> ForStep:
        """What a step needs to know of it; `feed` is asked when it runs."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load weights. Raises CheckpointError with what does not fit."""
        ...

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer's state."""
        ...

    def whole_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """On rank 0 the module with all its weights; `build` gives another of the same model."""
        ...

    def saved_elsewhere(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> SavedElsewhere | None:
        """What other processes than rank 0 write into each checkpoint of `run`; `parts` gives the state."""
        ...

    def close_saves(self) -> None:
        """What this worker was writing is written. Raises RunError where it could not be."""
        ...

    def release(self) -> None:
        """Give the memory of the weights up, for good; may be done twice. Each worker for itself."""
        ...

    def facts(self) -> dict[str, Any]:
        """For the record; mostly nothing."""
        ...


class Whole:
    """The module is on each worker, but for what lives elsewhere."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """As in `Layout`: autocast casts what a layer computes with, when it does."""
        module = self._trainable.module
        module.to(device=self._device, dtype=policy.master_dtype)
        module.train()
        self._workers.broadcast_([*module.parameters(), *module.buffers()])

    def for_step(self, feed: Callable[[], Feed]) -> ForStep:
        """As in `Layout`: flat buffers and no filler, as a step does by itself."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """As in `Layout`."""
        load_module(self._trainable.module, dict(state))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As in `Layout`."""
        optimizer.load_state_dict(dict(state))

    def whole_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """As in `Layout`: the module itself, with what lives elsewhere."""
        elsewhere = self._trainable.elsewhere
        return self._trainable.module if elsewhere is None else elsewhere.whole()

    def saved_elsewhere(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> SavedElsewhere | None:
        """As in `Layout`: rank 0 has everything but what lives elsewhere."""
        return self._trainable.elsewhere

    def close_saves(self) -> None:
        """As in `Layout`: nothing is written here."""

    def release(self) -> None:
        """As in `Layout`; tensors that a builder took from elsewhere stay with whoever else holds them."""
        for parameter in self._trainable.module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def facts(self) -> dict[str, Any]:
        """As in `Layout`."""
        return {}


def layout_of(strategy: str, trainable: Trainable, *, workers: Workers, device: torch.device) -> Layout:
    """The layout of a resolved `scale.strategy`."""
    if strategy != "fsdp":
        return Whole(trainable, workers=workers, device=device)
    from raytrain.train.parallel.fsdp.shards import Shards  # torch's part of it takes a second to import

    return Shards(trainable, workers=workers, device=device)
