"""How the workers hold a model: replicated on each, or sharded (`fsdp`); and what a worker without rows computes.

A session asks its strategy for the wrapped module, the reduction and how state is saved and loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder
from raytrain.train.job import load_module
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import Reduction
from raytrain.train.placing import place
from raytrain.train.precision import PrecisionPolicy
from raytrain.trainable import Batch, RemoteCheckpoint, Trainable

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader


#: Rows among which `Filler` looks for one with a weight.
FILLER_ROWS = 1000


class Filler:
    """The batch for passes in which a worker has no rows: the first training row with a weight, on the device. Its loss
    is multiplied by zero; that of a row without a weight (every label is -100) would be NaN."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._batch: Batch | None = None

    def __call__(self) -> Batch:
        """The batch, found in the first call. Raises RunError where the first rows all have no weight."""
        if self._batch is not None:
            return self._batch
        order = self._loader.batches.split.eval_order()[:FILLER_ROWS]
        for at in range(len(order)):
            micro = self._loader.one(order[at : at + 1])
            if micro.weight > 0:
                self._batch = micro.batch
                return micro.batch
        raise RunError(
            f"the first {len(order)} rows hold nothing to average over (every label is -100), and a worker"
            " without rows needs one (scale.strategy fsdp, scale.sync_batchnorm); fix data.source"
        )


# ---------------------------------------------------------------- strategy


class ForStep(TypedDict, total=False):
    reduction: Reduction
    filler: Callable[[], Batch]
    without_rows: Callable[[], AbstractContextManager[None]]


class Replicated:
    """Each worker has the whole module, except for its remote parts; `raytrain.train.parallel.fsdp.Sharded` overrides
    how. All workers make every call together, except `release` and `facts`."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """Put the module on the device in the master dtype, with rank 0's weights on every worker; layers of the names
        `fp32_layers` compute in the master dtype."""
        module = self._trainable.module
        place(module, device=self._device, master=policy.master_dtype)
        self._workers.broadcast([*module.parameters(), *module.buffers()])

    def for_step(self, loader: BatchLoader) -> ForStep:
        return {}

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Explain what fails in the first step of a user's own optimizers because of how the model is held."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load weights. Raises CheckpointError naming what does not fit."""
        load_module(self._trainable.module, dict(state))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
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
        """On rank 0 the module with all its weights; `build` makes another instance of the model."""
        return self._trainable.remote.gather_module(self._trainable.module)

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """What processes other than rank 0 write into each checkpoint of `run`, of the state that `parts` returns; None
        where they write nothing."""
        return self._trainable.remote if self._trainable.remote.distributed else None

    def close_saves(self) -> None:
        """Wait for this worker's writes. Raises RunError where one failed."""

    def release(self) -> None:
        """Free the memory of the weights for good; may be called twice. Tensors that the user's code holds too stay in
        memory."""
        for parameter in self._trainable.module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def facts(self) -> dict[str, Any]:
        return {}
