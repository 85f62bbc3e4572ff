"""Handles out of memory in the passes of a step: all workers drop the step together, without a trace.

A worker that runs out of memory in forward or backward frees the memory of its passes and reports the shortage in a
collective before the step is committed. All workers then drop the step and retry it in smaller micro-batches; their
size comes from `raytrain.train.memory.micro_batch`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raytrain.errors import OutOfMemory, message_of
from raytrain.train.memory.device import device_memory, is_out_of_memory

if TYPE_CHECKING:
    from raytrain.train.parallel.collectives import Workers

Made = TypeVar("Made")


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error in one process.

    Attributes:
        who: "rank 1", or "expert host 0".
        error: type and first line of the exception.
        allocated_bytes: bytes allocated by the process when the error was caught; None if unknown.
        free_bytes: bytes free on the device for any process; None if unknown.
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
    """All processes have dropped their current passes because some of them ran out of memory.

    All workers raise it together, and nothing of the passes remains. The caller restores generators and buffers
    (`raytrain.train.memory.retry`).
    """

    def __init__(self, shortages: list[Shortage]) -> None:
        self.shortages = shortages
        super().__init__("; ".join(map(str, shortages)))

    def __reduce__(self) -> tuple[object, ...]:
        return StepDropped, (self.shortages,)


def run_or_shortage(work: Callable[[], Made], *, device: torch.device, who: str) -> Made | Shortage:
    """Return the result of `work`, or a `Shortage` if it ran out of memory; its memory is then freed."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, device=device):
            raise
        shortage = shortage_of(error, device=device, who=who)
        let_go(error, device)
    return shortage


def shortage_of(error: BaseException, *, device: torch.device, who: str) -> Shortage:
    """Describe an out-of-memory error where it is caught."""
    lines = message_of(error).splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if device.type != "cuda":
        return Shortage(who, message)
    free, _ = device_memory(device)
    return Shortage(who, message, torch.cuda.memory_allocated(device), free)


def let_go(error: BaseException | None, device: torch.device) -> None:
    """Clear the frames in the tracebacks of an error and its causes, and a GPU allocator's cache.

    The frames hold the activations, often in a reference cycle; a garbage collection of the process would take some
    tenths of a second instead.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()


def step_dropped(workers: Workers, result: object) -> StepDropped:
    """The error that all workers raise together if the `result` of any of them is a `Shortage`. Collective."""
    own = result.to_json() if isinstance(result, Shortage) else None
    return StepDropped([Shortage(**record) for record in workers.all_gather_object(own) if record is not None])
