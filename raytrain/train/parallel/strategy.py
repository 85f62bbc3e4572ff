"""How the workers hold a model: `Replicated` on each of them, or sharded (`raytrain.train.parallel.fsdp`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from raytrain.runs.folder import RunFolder
from raytrain.train.build import load_module
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import Reduction
from raytrain.train.placing import place
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import Batch, RemoteCheckpoint, Trainable

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader


class ForStep(TypedDict, total=False):
    """Arguments of `TrainingStep` that depend on the strategy."""

    reduction: Reduction
    filler: Callable[[], Batch]
    without_rows: Callable[[], AbstractContextManager[None]]


class ParallelStrategy(Protocol):
    """How the workers hold a model. All workers make every call together, except `release` and `facts`."""

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """Put the module on the device in the master dtype, with rank 0's weights on every worker.

        Args:
            fp32_layers: names of layers that compute in the master dtype.
        """
        ...

    def for_step(self, loader: BatchLoader) -> ForStep:
        """Arguments for `TrainingStep`."""
        ...

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Explain what fails in the first step of a user's own optimizers because of how the model is held."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load weights. Raises CheckpointError naming what does not fit."""
        ...

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer's state."""
        ...

    def full_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """On rank 0 the module with all its weights; `build` makes another instance of the model."""
        ...

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """What processes other than rank 0 write into each checkpoint of `run`; None where they write nothing.

        Args:
            parts: returns the state to save.
        """
        ...

    def close_saves(self) -> None:
        """Wait for this worker's writes. Raises RunError where one failed."""
        ...

    def release(self) -> None:
        """Free the memory of the weights for good; may be called twice."""
        ...

    def facts(self) -> dict[str, Any]:
        """For the record; usually empty."""
        ...


class Replicated:
    """Each worker has the whole module, except for its remote parts."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """As in `ParallelStrategy`; autocast casts weights when a layer computes."""
        module = self._trainable.module
        place(module, device=self._device, master=policy.master_dtype)
        self._workers.broadcast([*module.parameters(), *module.buffers()])

    def for_step(self, loader: BatchLoader) -> ForStep:
        """As in `ParallelStrategy`: the step's defaults."""
        return {}

    def watch(self, optimizers: Sequence[Any]) -> None:
        """As in `ParallelStrategy`: nothing."""

    def load(self, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`."""
        load_module(self._trainable.module, dict(state))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`."""
        optimizer.load_state_dict(dict(state))
        for parameter, held in optimizer.state.items():
            for name, value in held.items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    held[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # fused kernels walk both

    def full_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """As in `ParallelStrategy`: the module itself, with its remote parts."""
        return self._trainable.remote.gather_module(self._trainable.module)

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """As in `ParallelStrategy`: rank 0 has everything but the remote parts."""
        return self._trainable.remote if self._trainable.remote.distributed else None

    def close_saves(self) -> None:
        """As in `ParallelStrategy`: this worker writes nothing."""

    def release(self) -> None:
        """As in `ParallelStrategy`; tensors that the user's code holds too stay in memory."""
        for parameter in self._trainable.module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def facts(self) -> dict[str, Any]:
        """As in `ParallelStrategy`."""
        return {}
