"""A worker of bench `unequal`: the product's session in a gloo group of two.

    python -m jobs.bench.training.unequal_member SETTINGS.json RANK

The last rank's passes take several times as long: it computes on for as long as that.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs.bench.harness.lines import dial
from jobs.bench.harness.sessions import Losses, session_of
from raytrain.autotune.startup.shares import measure_shares
from raytrain.plan.shares import Shares
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.session import Session
from raytrain.trainable import MicroBatch


def main() -> None:
    """Join, be ready, obey until told to stop."""
    settings, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    keep_freed_memory()
    store = dist.FileStore(settings["store"], 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    member = UnequalMember(settings, slowness=settings["slowness"] if rank else 1)
    line = dial(arm="unequal", rank=rank)
    while (order := line.receive())["steps"]:
        line.send(member.obey(order))
    line.close()
    dist.destroy_process_group()


class UnequalMember:
    """One of the two."""

    def __init__(self, settings: dict[str, Any], *, slowness: int) -> None:
        self._job = settings["job"]
        self.session, _ = session_of(self._job)
        self.session.prepare("fp32")
        if slowness > 1:
            slow_down(self.session, slowness)
        self._measured: Shares | None = None
        self._losses = Losses()
        self._loop = self.session.loop(reporter=self._losses, should_stop=lambda: False)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """What is asked for by `what`: "measure" the workers, "check" the gradient, or a block of steps."""
        began = time.perf_counter()
        if order["what"] == "measure":
            return {**self._measure(), "seconds": time.perf_counter() - began}
        if order["what"] == "check":
            return {"gap": self._gradient_gap(), "seconds": time.perf_counter() - began}
        self.session.loader.batches.shares = self._measured if order["what"] == "measured shares" else None
        state, before = self.session.state, len(self._losses.losses)
        self._loop.limits = replace(self._loop.limits, max_steps=state.step + order["steps"])
        self.session.workers.all_reduce_ints([0])  # both begin together
        began = time.perf_counter()
        self._loop.run(state)
        return {"seconds": time.perf_counter() - began, "losses": self._losses.losses[before:]}

    def _measure(self) -> dict[str, Any]:
        batches = self.session.loader.batches
        chosen, paces = measure_shares(self.session, [batches.micro_batch])
        self.session.apply_choices(shares=chosen)
        self._measured = batches.shares
        pass_s = [pace.pass_s[batches.micro_batch] for pace in paces]
        spans = (
            self._measured.spans(batches.global_batch_size, micro_batch=batches.micro_batch) if self._measured else []
        )
        return {"reason": chosen.reason, "rows": [len(span) for span in spans], "pass_s": pass_s}

    def _gradient_gap(self) -> float:
        """In float64: the largest difference between the gradient summed over unequal shares and that of this process
        alone over all rows."""
        session, _ = session_of({**self._job, "precision": {"dtype": "fp64"}})
        session.prepare("fp64")
        session.loader.batches.shares = self._measured
        indices = session.loader.global_batch(session.state.cursor).indices
        weight = session.loader.global_weight(indices) or 0
        size = session.loader.batches.micro_batch
        alone: list[MicroBatch] = [
            session.loader.one(indices[begin : begin + size]) for begin in range(0, len(indices), size)
        ]
        session.step.backward(alone, global_weight=weight)
        single = [flat.clone() for flat in session.step.gradients.buffers]
        session.step.backward(session.loader.micro_batches(indices), global_weight=weight)
        session.workers.all_reduce(session.step.gradients.buffers)
        pairs = zip(single, session.step.gradients.buffers, strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)


def slow_down(session: Session, times: int) -> None:
    """Make this worker's passes take so many times as long: it goes on computing what nobody takes."""
    backward, square = session.step.backward, torch.ones(64, 64)

    def slow(*args: Any, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
        began = time.perf_counter()
        made = backward(*args, **keys)
        ends = began + times * (time.perf_counter() - began)
        while time.perf_counter() < ends:
            torch.mm(square, square)
        return made

    session.step.backward = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
