"""A worker of bench `overlap`: two sessions in a gloo group of two, with small and with large buckets.

python -m jobs.bench.training.overlap_member SETTINGS.json RANK
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import raytrain.train.parallel.reduction
from jobs.bench.harness.sessions import SessionArm, serve_pair
from raytrain.autotune.startup.overlap import measure_overlap
from raytrain.train.parallel.flat_gradients import BUCKET_BYTES


def open_workers(settings: dict[str, Any], _rank: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Open both sessions; a request for "undivided" goes to the one with large buckets, all others to the other."""
    divided = OverlapWorker(settings["job"], bucket_bytes=settings["bucket_bytes"])
    undivided = OverlapWorker(settings["job"], bucket_bytes=BUCKET_BYTES)
    return lambda request: (undivided if request["what"] == "undivided" else divided).answer(request)


class OverlapWorker:
    """One session, which continues to train through all blocks."""

    def __init__(self, job: dict[str, Any], *, bucket_bytes: int) -> None:
        raytrain.train.parallel.reduction.BUCKET_BYTES["cpu"] = bucket_bytes
        self._arm = SessionArm(job, precision="fp32")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what the request's `what` names: report "facts", "measure" as a run does when it starts, or train a
        block with gradients reduced "during" the last backward, or after it."""
        session, began = self._arm.session, time.perf_counter()
        if request["what"] == "facts":
            sizes = [flat.nbytes for flat in session.step.gradients.buffers]
            passes = int(session.job.planned("accumulation"))
            return {"buckets": len(sizes), "gradient_bytes": sum(sizes), "accumulation": passes, "seconds": 0.0}
        if request["what"] == "measure":
            chosen, rounds = measure_overlap(session)
            spent = time.perf_counter() - began
            return {"value": chosen.value, "reason": chosen.reason, "rounds": rounds, "seconds": spent}
        session.step.reduction.overlap(request["what"] == "during")
        session.workers.all_reduce_ints([0])  # both start together
        waited = session.workers.wait_s
        answer = self._arm.run_block(request["steps"])
        return {**answer, "waited_s": session.workers.wait_s - waited}


if __name__ == "__main__":
    serve_pair("overlap", open_workers)
