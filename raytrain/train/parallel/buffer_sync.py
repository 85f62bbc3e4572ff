"""Keeps the buffers of a module (batch norm statistics, codebooks) equal on all workers: rank 0's count, as in DDP."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from raytrain.train.parallel.collectives import Workers


class BufferSync:
    """Sends rank 0's buffers to the other workers before each evaluation and each save, so that the state that is
    evaluated, saved, exported and resumed is the same one.

    Buffers that differ between workers after the first step, and are not statistics that a norm layer only records
    while it trains, also influence the training: they are sent after every step, as DDP does before every forward pass.

    A single worker, or a module without buffers, costs nothing. Others compare checksums, and only buffers that differ
    are sent. Both methods are collectives.

    Attributes:
        each_step: names of the buffers that are sent after every step.
    """

    def __init__(self, module: nn.Module, workers: Workers) -> None:
        self._module, self._workers = module, workers
        self._active = workers.world_size > 1 and any(True for _ in module.buffers())
        self._first = True
        self.each_step: list[str] = []

    def after_step(self) -> list[str]:
        """Send the buffers that influence training; returns the names that are new among them."""
        if not self._active:
            return []
        if self._first:
            self._first = False
            return self.synchronize()
        if self.each_step:
            held = dict(self._module.named_buffers())
            self._workers.broadcast([held[name] for name in self.each_step])
        return []

    def synchronize(self) -> list[str]:
        """Send every buffer that differs; returns the names that are sent after every step from now on."""
        if not self._active:
            return []
        held = dict(self._module.named_buffers())
        rows = self._workers.all_gather_object([_checksum(tensor) for tensor in held.values()])
        different = [name for name, sums in zip(held, zip(*rows, strict=True), strict=True) if len(set(sums)) > 1]
        self._workers.broadcast([held[name] for name in different])
        found = [name for name in different if not self._is_recorded(name) and name not in self.each_step]
        self.each_step += found
        return found

    def _is_recorded(self, name: str) -> bool:
        """Whether it is a statistic that training does not read."""
        part = self._module.get_submodule(name.rpartition(".")[0])
        return isinstance(part, _NormBase) and part.track_running_stats


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
