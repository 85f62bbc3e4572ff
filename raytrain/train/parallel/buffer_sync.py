"""Keeps equal on all workers what forward changes (batch norm statistics, codebooks, teachers): rank 0's count, as in
DDP."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.forward_changes import ForwardChanges


class BufferSync:
    """Sends rank 0's buffers, and the parameters that forward changes, to the other workers before each evaluation and
    each save, so that the state that is evaluated, saved, exported and resumed is the same one.

    Those that differ between workers after the first step, and are not statistics that a norm layer only records
    while it trains, also influence the training: they are sent after every step, as DDP does before every forward pass.

    A single worker costs nothing. Others compare checksums, and only what differs is sent. Both methods are
    collectives.

    Args:
        changes: knows the parameters that forward changes; frozen ones that it leaves alone are not read.

    Attributes:
        each_step: names of what is sent after every step.
    """

    def __init__(self, module: nn.Module, workers: Workers, changes: ForwardChanges) -> None:
        self._module, self._workers, self._changes = module, workers, changes
        self._active = workers.world_size > 1
        self._first = True
        self.each_step: list[str] = []

    def after_step(self) -> list[str]:
        """Send what influences training; returns the names that are new among them."""
        if not self._active:
            return []
        if self._first:
            self._first = False
            return self.synchronize()
        if self.each_step:
            held = self._held(self._changes.moved)
            self._workers.broadcast([held[name] for name in self.each_step])
        return []

    def synchronize(self) -> list[str]:
        """Send everything that differs; returns the names that are sent after every step from now on."""
        if not self._active:
            return []
        held = self._held(self._changes.agreed())
        if not held:
            return []
        rows = self._workers.all_gather_object([_checksum(tensor) for tensor in held.values()])
        different = [name for name, sums in zip(held, zip(*rows, strict=True), strict=True) if len(set(sums)) > 1]
        self._workers.broadcast([held[name] for name in different])
        found = [name for name in different if not self._is_recorded(name) and name not in self.each_step]
        self.each_step += found
        return found

    def _held(self, moved: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {**dict(self._module.named_buffers()), **moved}

    def _is_recorded(self, name: str) -> bool:
        """Whether it is a statistic that training does not read."""
        owner, _, leaf = name.rpartition(".")
        part = self._module.get_submodule(owner)
        return isinstance(part, _NormBase) and part.track_running_stats and leaf in part._buffers


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
