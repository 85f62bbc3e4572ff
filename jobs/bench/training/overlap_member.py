"""A worker of bench `overlap`: the product's sessions in a gloo group of two.

python -m jobs.bench.training.overlap_member SETTINGS.json RANK
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import raytrain.train.parallel.reduction
from jobs.bench.harness.lines import dial
from jobs.bench.harness.sessions import Losses, session_of
from raytrain.autotune.startup.overlap import measure_overlap
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.parallel.flat_gradients import BUCKET_BYTES


def main() -> None:
    """Join, be ready, obey until told to stop."""
    settings, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    keep_freed_memory()
    store = dist.FileStore(settings["store"], 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    divided = OverlapMember(settings["job"], bucket_bytes=settings["bucket_bytes"])
    undivided = OverlapMember(settings["job"], bucket_bytes=BUCKET_BYTES)
    line = dial(arm="overlap", rank=rank)
    while (order := line.receive())["steps"]:
        line.send((undivided if order["what"] == "undivided" else divided).obey(order))
    line.close()
    dist.destroy_process_group()


class OverlapMember:
    """One of the two, with one model, which trains on through all blocks; its own losses begin at its first step."""

    def __init__(self, job: dict[str, Any], *, bucket_bytes: int) -> None:
        raytrain.train.parallel.reduction.BUCKET_BYTES["cpu"] = bucket_bytes
        self.session, _ = session_of(job)
        self.session.prepare("fp32")
        self._losses = Losses()
        self._loop = self.session.loop(reporter=self._losses, should_stop=lambda: False)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """What is asked for by `what`: "facts", to "measure" as a run does at its start, or a block of steps with sums
        "during" the last backward, or after it."""
        session, began = self.session, time.perf_counter()
        if order["what"] == "facts":
            sizes = [flat.nbytes for flat in session.step.gradients.buffers]
            passes = int(session.job.planned("accumulation"))
            return {"buckets": len(sizes), "gradient_bytes": sum(sizes), "accumulation": passes, "seconds": 0.0}
        if order["what"] == "measure":
            chosen, rounds = measure_overlap(session)
            spent = time.perf_counter() - began
            return {"value": chosen.value, "reason": chosen.reason, "rounds": rounds, "seconds": spent}
        session.step.reduction.overlap(order["what"] == "during")
        state, before = session.state, len(self._losses.losses)
        self._loop.limits = replace(self._loop.limits, max_steps=state.step + order["steps"])
        session.workers.all_reduce_ints([0])  # both begin together
        began, waited = time.perf_counter(), session.workers.wait_s
        self._loop.run(state)
        spent, waited = time.perf_counter() - began, session.workers.wait_s - waited
        return {"seconds": spent, "waited_s": waited, "losses": self._losses.losses[before:]}


if __name__ == "__main__":
    main()
