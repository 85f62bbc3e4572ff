"""A worker of bench `unequal`: a session in a gloo group of two.

    python -m jobs.bench.training.unequal_member SETTINGS.json RANK

The passes of rank 1 take several times as long, because it continues to compute after each pass.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from jobs.bench.harness.sessions import SessionArm, serve_pair
from jobs.driver.session import session_of
from raytrain.autotune.startup.shares import measure_shares
from raytrain.plan.shares import Shares, shares_of
from raytrain.train.session import Session
from raytrain.trainable import MicroBatch


class UnequalWorker:
    """One of the two workers."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self._job = settings["job"]
        self._arm = SessionArm(self._job, precision="fp32")
        if rank and settings["slowness"] > 1:
            slow_down(self._arm.session, settings["slowness"])
        self._measured: Shares | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what the request's `what` names: "measure" the workers, "check" the gradient, or train a block with
        "equal shares" or "measured shares"."""
        began = time.perf_counter()
        if request["what"] == "measure":
            return {**self._measure(), "seconds": time.perf_counter() - began}
        if request["what"] == "check":
            return {"gap": self._gradient_gap(), "seconds": time.perf_counter() - began}
        batches = self._arm.session.loader.batches
        batches.shares = self._measured if request["what"] == "measured shares" else None
        return self._arm.run_together(request["steps"])

    def _measure(self) -> dict[str, Any]:
        session = self._arm.session
        batches = session.loader.batches
        chosen, paces = measure_shares(session, [batches.micro_batch])
        session.use(replace(session.settings, shares=shares_of(chosen.value)))
        self._measured = batches.shares
        pass_s = [pace.pass_s[batches.micro_batch] for pace in paces]
        spans = (
            self._measured.spans(batches.global_batch_size, micro_batch=batches.micro_batch) if self._measured else []
        )
        return {"reason": chosen.reason, "rows": [len(span) for span in spans], "pass_s": pass_s}

    def _gradient_gap(self) -> float:
        """The largest difference, in float64, between the gradient summed over unequal shares and the gradient that
        this process computes alone over all rows."""
        session = session_of({**self._job, "precision": {"dtype": "fp64"}})
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
    """Make this worker's passes take `times` as long: after each it computes unused matrix products."""
    backward, square = session.step.backward, torch.ones(64, 64)

    def slow(*args: Any, **keys: Any) -> Any:
        began = time.perf_counter()
        result = backward(*args, **keys)
        ends = began + times * (time.perf_counter() - began)
        while time.perf_counter() < ends:
            torch.mm(square, square)
        return result

    session.step.backward = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    serve_pair("unequal", lambda settings, rank: UnequalWorker(settings, rank).answer)
