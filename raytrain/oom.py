"""Out of memory in the passes of a step: said to everybody, and undone as if the step had not begun.

A worker that runs out of memory in forward or backward lets go of what the passes hold and says so together with the
others, before anything of the step is committed; all drop the step then and take it again in smaller micro-batches
(`raytrain.micro_batch_size` decides how small).
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import is_
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain.errors import OutOfMemory
from raytrain.memory import is_out_of_memory

Made = TypeVar("Made")

#: So many steps in a row show that nobody draws from a generator.
LOOKS = 3


@dataclass(frozen=True)
class Shortage:
    """One process that had no more memory.

    Attributes:
        who: "rank 1", or "expert host 0".
        error: type and first line of what was raised.
        allocated_bytes: what its tensors held when it was noticed, None where nobody counts.
        free_bytes: what the device had left for anybody, None likewise.
    """

    who: str
    error: str
    allocated_bytes: int | None = None
    free_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)

    def __str__(self) -> str:
        known = {"held": self.allocated_bytes, "free": self.free_bytes}
        parts = [f"{name} {value:,} bytes" for name, value in known.items() if value is not None]
        return f"{self.who}: {self.error}" + (f" ({', '.join(parts)})" if parts else "")


class StepDropped(OutOfMemory):
    """Every process has dropped the passes that it was in, because some had no memory for them. Nothing of them is
    left; generators and buffers are the caller's to put back (`Undo`). All workers raise it together."""

    def __init__(self, shortages: list[Shortage]) -> None:
        self.shortages = shortages
        super().__init__("; ".join(map(str, shortages)))

    def __reduce__(self) -> tuple[object, ...]:
        return StepDropped, (self.shortages,)


def attempt(work: Callable[[], Made], *, device: torch.device, who: str) -> Made | Shortage:
    """What `work` returned, or that it ran out of memory; everything it held is free again then."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, device=device):
            raise
        found = shortage_of(error, device=device, who=who)
        _let_go(error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def shortage_of(error: BaseException, *, device: torch.device, who: str) -> Shortage:
    """What is known of it at the place where it is caught."""
    lines = str(error).splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if device.type != "cuda":
        return Shortage(who, said)
    free, _ = torch.cuda.mem_get_info(device)
    return Shortage(who, said, torch.cuda.memory_allocated(device), free)


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of its traceback, and of what it followed from: they hold the activations, often in a cycle.
    Looking for cycles in the whole process instead takes some tenths of a second."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def told(shortage: Shortage | None) -> bytes:
    """A worker's word for the others; empty where it had memory enough."""
    return b"" if shortage is None else json.dumps(shortage.to_json()).encode()


def heard(words: list[bytes]) -> list[Shortage]:
    """What all workers said, in the order of the ranks."""
    return [Shortage(**json.loads(word)) for word in words if word]


class Undo:
    """What passes change besides gradients: generators and buffers. Taken before, put back where they are dropped.

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
