"""How a model lies on the workers: whole on each of them, or each with its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import torch
from torch import nn

from raytrain.runs.folder import RunFolder
from raytrain.train.loader import BatchLoader
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import Reduction
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.train.restore import load_module
from raytrain.trainable import Batch, RemoteCheckpoint, Trainable


class ForStep(TypedDict, total=False):
    """What a layout gives `TrainingStep`."""

    reduction: Reduction
    filler: Callable[[], Batch]


class ParallelStrategy(Protocol):
    """Every verb is one of all workers at the same moment."""

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """The module on the device in the master format, rank 0's weights everywhere.

        Args:
            fp32_layers: names of layers that compute in the master format.
        """
        ...

    def for_step(self, loader: Callable[[], BatchLoader]) -> ForStep:
        """What a step needs to know of it; `loader` is asked when it runs."""
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

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
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


class Replicated:
    """The module is on each worker, but for what lives elsewhere."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """As in `ParallelStrategy`: autocast casts what a layer computes with, when it does."""
        module = self._trainable.module
        module.to(device=self._device, dtype=policy.master_dtype)
        module.train()
        self._workers.broadcast([*module.parameters(), *module.buffers()])

    def for_step(self, loader: Callable[[], BatchLoader]) -> ForStep:
        """As in `ParallelStrategy`: flat buffers and no filler, as a step does by itself."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`."""
        load_module(self._trainable.module, dict(state))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`."""
        optimizer.load_state_dict(dict(state))

    def whole_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """As in `ParallelStrategy`: the module itself, with what lives elsewhere."""
        remote = self._trainable.remote
        return self._trainable.module if remote is None else remote.gather_module()

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """As in `ParallelStrategy`: rank 0 has everything but what lives elsewhere."""
        return self._trainable.remote

    def close_saves(self) -> None:
        """As in `ParallelStrategy`: nothing is written here."""

    def release(self) -> None:
        """As in `ParallelStrategy`; tensors that a builder took from elsewhere stay with whoever else holds them."""
        for parameter in self._trainable.module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def facts(self) -> dict[str, Any]:
        """As in `ParallelStrategy`."""
        return {}


def strategy_of(strategy: str, trainable: Trainable, *, workers: Workers, device: torch.device) -> ParallelStrategy:
    """The layout of a resolved `scale.strategy`."""
    if strategy != "fsdp":
        return Replicated(trainable, workers=workers, device=device)
    from raytrain.train.parallel.fsdp.strategy import Sharded  # torch's part of it takes a second to import

    return Sharded(trainable, workers=workers, device=device)
