"""One worker's side of a sharded run: its shards, how a step goes with them, and the whole module at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder
from raytrain.train.loader import BatchLoader
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.fsdp.checkpoint import ShardSaver
from raytrain.train.parallel.fsdp.reduction import ShardedReduction, local
from raytrain.train.parallel.fsdp.state import load_optimizer, load_sharded, whole_state
from raytrain.train.parallel.fsdp.wrap import ShardingSizes, shard
from raytrain.train.parallel.strategy import ForStep
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.train.restore import load_module
from raytrain.trainable import Batch, RemoteCheckpoint, Trainable

#: So many rows are looked at for one that weighs something.
LOOKED_AT = 1000


class Sharded:
    """The `raytrain.train.parallel.strategy.ParallelStrategy` of `fsdp`."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        self._trainable, self._workers, self._device = trainable, workers, device
        self._sharded: ShardingSizes | None = None
        self._master = torch.float32
        self._saver: ShardSaver | None = None

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """As in `Layout`; the device holds shards and one block at a time, never the whole module."""
        module = self._trainable.module
        module.to(dtype=policy.master_dtype)
        module.train()
        self._workers.broadcast([*module.parameters(), *module.buffers()])
        self._sharded = shard(
            self._trainable, device=self._device, policy=policy, workers=self._workers, fp32_layers=fp32_layers
        )
        self._master = policy.master_dtype

    def for_step(self, loader: Callable[[], BatchLoader]) -> ForStep:
        """As in `Layout`."""
        fillers: list[Filler] = []

        def filler() -> Batch:
            if not fillers:
                fillers.append(Filler(loader()))
            return fillers[0]()

        reduction = ShardedReduction(self._trainable, workers=self._workers, device=self._device)
        return {"reduction": reduction, "filler": filler}

    def load(self, state: Mapping[str, Any]) -> None:
        """As in `Layout`: whole weights, or this worker's rows of them."""
        load_sharded(self._trainable.module, state)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As in `Layout`."""
        load_optimizer(optimizer, state)

    def whole_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """As in `Layout`: another module of the model on rank 0's CPU, with the weights of all shards."""
        first = self._workers.rank == 0
        state = whole_state(self._trainable.module, keep=first)
        if not first:
            return None
        module = build().module.to(self._master)
        load_module(module, state)
        return module

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """As in `Layout`: every worker writes its own rows."""
        self._saver = ShardSaver(parts, run) if self._workers.world_size > 1 else None
        return self._saver

    def close_saves(self) -> None:
        """As in `Layout`."""
        if self._saver is not None:
            self._saver.close()

    def release(self) -> None:
        """As in `Layout`: sharding has copied every parameter, so the storage is nobody else's. (FSDP2 holds it by
        names of its own. Memory of the host that numpy has seen cannot be given up so, and goes with the session.)"""
        for parameter in self._trainable.module.parameters():
            storage = local(parameter).untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def facts(self) -> dict[str, Any]:
        """As in `Layout`: what sharding made of the module, in bytes."""
        return {} if self._sharded is None else {"sharded": asdict(self._sharded)}


class Filler:
    """The first training row that weighs something, as a batch on the device; found once.

    What is computed with it is multiplied by zero: a row that weighs nothing (every label is -100) would give NaN.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._batch: Batch | None = None

    def __call__(self) -> Batch:
        """Raises RunError where the first rows all weigh nothing."""
        if self._batch is None:
            self._batch = self._found()
        return self._batch

    def _found(self) -> Batch:
        order = self._loader.batches.split.eval_order()[:LOOKED_AT]
        for at in range(len(order)):
            micro = self._loader.one(order[at : at + 1])
            if micro.weight > 0:
                return micro.batch
        raise RunError(
            f"the first {len(order)} rows hold nothing to average over (every label is -100), and under"
            " scale.strategy fsdp a worker without rows needs one; mend data.source"
        )
