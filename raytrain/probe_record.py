"""`memory_probe.json`: what was measured at the start of a run; restarted and resumed attempts take it again."""

from __future__ import annotations

import json
from typing import Any

from raytrain.gradients import Workers
from raytrain.loop_state import Reporter
from raytrain.plan import Resolved
from raytrain.run_folder import RunFolder


def recorded(run: RunFolder) -> dict[str, Any]:
    """Everything so far, by name; read by rank 0."""
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


def recall(run: RunFolder, what: str, *, workers: Workers) -> dict[str, Any] | None:
    """What was recorded under a name, None for nothing; rank 0 reads it, all hear of it. Collective."""
    own = recorded(run).get(what) if workers.rank == 0 else None
    return json.loads(workers.gather_bytes(json.dumps(own).encode())[0])


def record(
    run: RunFolder, what: str, chosen: Resolved, trials: Any, *, workers: Workers, reporter: Reporter
) -> None:  # fmt: skip
    """Write a decision with what it was made from, and its event; by rank 0."""
    if workers.rank == 0:
        row = {"value": chosen.value, "reason": chosen.reason, "trials": trials}
        run.write_json(run.memory_probe, {**recorded(run), what: row})
        reporter.event("decision", what=what, value=chosen.value, reason=chosen.reason)
