"""Bench `pinned`: copies to a GPU from memory pinned in advance, from pageable memory, and pinned before each copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say, alternate
from jobs.bench.harness.options import BenchOptions

if TYPE_CHECKING:
    from torch import Tensor

BEFORE, NEVER, ON_THE_WAY = "pinned before", "pageable", "pinned on the way"
CLAIM = "copies out of pinned memory are 1.1 to 1.2 times as fast, or 2 to 3 times: the guide has both"


class PinnedOptions(BenchOptions):
    """Copies to a GPU: from pinned memory, from pageable memory, and pinned before each copy."""

    MEASURES: ClassVar[str] = "copies to a GPU from pinned against pageable memory"
    QUICK: ClassVar[dict[str, Any]] = {"megabytes": 0.25, "batches": 2, "blocks": 3}

    megabytes: float = Field(16.0, gt=0, description="of one batch")
    batches: Count = Field(16, description="copied in one block")


def run(options: PinnedOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Copy the same batches in three ways; without a GPU nothing is timed, and there is no ratio."""
    import torch

    from raytrain.data.transfer import pin, to_device

    block = f"seconds to copy {options.batches} batches"
    found = BenchMeasurement("pinned", quick, options.model_dump(), block)
    if not torch.cuda.is_available():
        found.cannot(CLAIM, "torch sees no GPU, and on the host nothing is copied")
        return found
    draw = torch.Generator().manual_seed(options.seed)
    pageable = [torch.randn(int(options.megabytes * 2**18), generator=draw) for _ in range(options.batches)]
    held = [pin(batch) for batch in pageable]
    ways: dict[str, tuple[list[Tensor], Callable[[Tensor], Tensor]]] = {
        NEVER: (pageable, lambda batch: to_device(batch, "cuda")),
        BEFORE: (held, lambda batch: to_device(batch, "cuda")),
        ON_THE_WAY: (pageable, lambda batch: to_device(pin(batch), "cuda")),
    }
    for name, (batches, way) in ways.items():
        same = all(torch.equal(way(batch).cpu(), kept) for batch, kept in zip(batches, pageable, strict=True))
        found.gate(Check(f"{name}: the copies are equal", same, f"{len(batches)} batches, bit for bit"))

    def block_of(name: str) -> float:
        batches, way = ways[name]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for batch in batches:
            way(batch)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    say(f"{options.blocks} times {options.batches} batches of {options.megabytes:g} MB in {len(ways)} ways")
    found.arms = alternate({name: partial(block_of, name) for name in ways}, blocks=options.blocks)
    first = found.compare(found.arms, of=NEVER, to=BEFORE)
    second = found.compare(found.arms, of=NEVER, to=ON_THE_WAY)
    found.claim(CLAIM, first.low >= 1.1, f"{first:.2f} times, pinned on the way {second.median:.2f} times")
    return found
