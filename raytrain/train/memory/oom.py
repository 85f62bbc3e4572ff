"""Out of memory in the passes of a step: said to everybody, so that all drop it as if it had not begun.

A worker that runs out of memory in forward or backward lets go of what the passes hold and says so together with the
others, before anything of the step is committed; all drop the step then and take it again in smaller micro-batches
(`raytrain.train.memory.micro_batch` decides how small).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raytrain.errors import OutOfMemory
from raytrain.train.memory.device import is_out_of_memory

if TYPE_CHECKING:
    from raytrain.train.parallel.collectives import Workers

Made = TypeVar("Made")


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
    left; generators and buffers are the caller's to put back (`raytrain.train.memory.retry`). All workers raise it
    together."""

    def __init__(self, shortages: list[Shortage]) -> None:
        self.shortages = shortages
        super().__init__("; ".join(map(str, shortages)))

    def __reduce__(self) -> tuple[object, ...]:
        return StepDropped, (self.shortages,)


def run_or_shortage(work: Callable[[], Made], *, device: torch.device, who: str) -> Made | Shortage:
    """What `work` returned, or that it ran out of memory; everything it held is free again then."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, device=device):
            raise
        found = shortage_of(error, device=device, who=who)
        let_go(error, device)
    return found


def shortage_of(error: BaseException, *, device: torch.device, who: str) -> Shortage:
    """What is known of it at the place where it is caught."""
    lines = str(error).splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if device.type != "cuda":
        return Shortage(who, said)
    free, _ = torch.cuda.mem_get_info(device)
    return Shortage(who, said, torch.cuda.memory_allocated(device), free)


def let_go(error: BaseException | None, device: torch.device) -> None:
    """Empty the frames of its traceback, and of what it followed from: they hold the activations, often in a cycle.
    Looking for cycles in the whole process instead takes some tenths of a second. A GPU's allocator gives them back."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()


def step_dropped(workers: Workers, result: object) -> StepDropped:
    """The error that all workers raise together where the `result` of one is a `Shortage`. Collective."""
    own = result.to_json() if isinstance(result, Shortage) else None
    return StepDropped([Shortage(**record) for record in workers.all_gather_object(own) if record is not None])
