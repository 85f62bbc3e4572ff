"""What passes change besides gradients, generators and buffers: taken before, put back where they do not count."""

from __future__ import annotations

import random
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

#: So many steps in a row show that nobody draws from a generator.
LOOKS = 3


class Undo:
    """Of one module, as often as it is asked.

    Buffers stand beside the module's own in memory. A counter that a user's module keeps in a plain attribute is not
    seen. The states of numpy's and Python's generators cost 100 microseconds to read: where `LOOKS` steps have left
    them alone they are not read any more, until a step that is put back finds them changed.

    Args:
        module: on its device, in its dtype.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._tables = [part._buffers for part in module.modules() if part._buffers]
        self._batch_norm = any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules())
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._torch: list[Tensor] = []
        self._host: tuple[Any, Any] | None = None
        self._still = 0

    @torch.no_grad()
    def take(self) -> None:
        """Before the passes; no device read."""
        held = [(table, leaf, tensor) for table in self._tables for leaf, tensor in table.items() if tensor is not None]
        buffers = [tensor for _, _, tensor in held]
        if len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers)):
            if buffers:
                torch._foreach_copy_(self._copies, buffers)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._copies = [buffer.clone() for buffer in buffers]
        self._places, self._buffers = [(table, leaf) for table, leaf, _ in held], buffers
        self._torch = self._torch_states()
        if self._still < LOOKS:
            now = _host_states()
            self._still = self._still + 1 if _same_host(now, self._host) else 0
            self._host = now

    @torch.no_grad()
    def put_back(self) -> bool:
        """After passes that do not count; whether taking them again in other parts gives the same (up to rounding):
        not where random numbers were drawn, or where a batch norm has learned its statistics."""
        for (table, leaf), buffer, copy in zip(self._places, self._buffers, self._copies, strict=True):
            buffer.copy_(copy)
            table[leaf] = buffer
        still = all(map(torch.equal, self._torch, self._torch_states()))
        torch.set_rng_state(self._torch[0])
        for state in self._torch[1:]:
            torch.cuda.set_rng_state(state, self._device)
        if self._host is not None and not _same_host(self._host, _host_states()):
            still = False
            if self._still < LOOKS:
                np.random.set_state(self._host[0])
                random.setstate(self._host[1])
            self._still = 0
        return still and not self._batch_norm

    def _torch_states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]


def _host_states() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _same_host(one: tuple[Any, Any], other: tuple[Any, Any] | None) -> bool:
    return other is not None and one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))
