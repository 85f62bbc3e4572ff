"""The `fsdp` strategy: each worker holds shards of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytrain.runs.folder import RunFolder
from raytrain.train.build import load_module
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.filler import Filler
from raytrain.train.parallel.fsdp.checkpoint import ShardSaver
from raytrain.train.parallel.fsdp.passes import ShardedPasses, watch_first_step
from raytrain.train.parallel.fsdp.reduction import ShardedReduction, local
from raytrain.train.parallel.fsdp.state import full_state, load_optimizer, load_sharded
from raytrain.train.parallel.fsdp.wrap import ShardingSizes, shard
from raytrain.train.parallel.order import BlockOrder
from raytrain.train.parallel.strategy import ForStep
from raytrain.train.placing import place
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import RemoteCheckpoint, Trainable

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader


class Sharded:
    """`raytrain.train.parallel.strategy.ParallelStrategy` by torch's FSDP2."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device
        self._sharded: ShardingSizes | None = None
        self._master = torch.float32
        self._saver: ShardSaver | None = None

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """As in `ParallelStrategy`; the device holds shards and one gathered block at a time, never the whole
        module."""
        module = self._trainable.module
        place(module, device=None, master=policy.master_dtype)
        self._workers.broadcast([*module.parameters(), *module.buffers()])
        order = BlockOrder(self._workers, device=self._device)
        self._sharded = shard(
            self._trainable, device=self._device, policy=policy, workers=self._workers, fp32_layers=fp32_layers,
            order=order,
        )  # fmt: skip
        self.passes = ShardedPasses(module, order)
        self._master = policy.master_dtype

    def for_step(self, loader: BatchLoader) -> ForStep:
        """As in `ParallelStrategy`."""
        reduction = ShardedReduction(self._trainable, workers=self._workers, device=self._device, passes=self.passes)
        return {"reduction": reduction, "filler": Filler(loader)}

    def watch(self, optimizers: Sequence[Any]) -> None:
        """As in `ParallelStrategy`."""
        for optimizer in optimizers:
            watch_first_step(optimizer)

    def load(self, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`: complete weights, or this worker's rows of them."""
        load_sharded(self._trainable.module, state)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As in `ParallelStrategy`."""
        load_optimizer(optimizer, state)

    def full_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """As in `ParallelStrategy`: another module of the model on rank 0's CPU, with the weights of all shards."""
        first = self._workers.rank == 0
        state = full_state(self._trainable.module, keep=first)
        if not first:
            return None
        module = build().module
        place(module, device=None, master=self._master)
        load_module(module, state)
        return module

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """As in `ParallelStrategy`: every worker writes its own rows."""
        self._saver = ShardSaver(parts, run) if self._workers.world_size > 1 else None
        return self._saver

    def close_saves(self) -> None:
        """As in `ParallelStrategy`."""
        if self._saver is not None:
            self._saver.close()

    def release(self) -> None:
        """As in `ParallelStrategy`: sharding has copied every parameter, so nothing else uses the storage. (FSDP2 keeps
        further references to it. Host memory that numpy has seen cannot be resized, and goes with the session.)"""
        for parameter in self._trainable.module.parameters():
            storage = local(parameter).untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def facts(self) -> dict[str, Any]:
        """As in `ParallelStrategy`: what sharding made of the module, in bytes."""
        return {} if self._sharded is None else {"sharded": asdict(self._sharded)}
