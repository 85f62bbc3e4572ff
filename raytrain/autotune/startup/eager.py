"""The time of a step without compilation, for a run with `loop.compile`: its compiled steps are compared with it."""

from __future__ import annotations

from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.startup.choice import Calibration, read_measured

NAME = "eager_step"
"""Name of the entry in memory_probe.json, and kind of the event."""

PASSES = 5
"""Timed passes and updates, after one that is dropped."""


def measure_eager_step(calibration: Calibration) -> None:
    """Time the step of a prepared session with its parts as they were written, once in a run. Collective; changes
    nothing.

    The event `eager_step` has the `seconds` of a step of the slowest worker, from forward to the optimizer's update,
    without reading data. Nothing is measured where nothing is compiled, under fsdp (which measures nothing), and where
    a pass fails.
    """
    session = calibration.session
    compiled = session.switches.compiled
    if compiled is None or session.job.planned("strategy") == "fsdp" or calibration.recorded(NAME) is not None:
        return
    calibration.report_progress({"phase": "measuring a step without compilation"})
    micro = session.loader.batches.micro_batch
    with compiled.eager():
        candidate = Candidate(session.precision or "fp32", micro)
        found = calibration.probe.measure(candidate, budget=None, passes=PASSES, with_memory=False)
    if found.outcome != "ok":
        return
    rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
    record = {"seconds": found.step_s(rows), "micro_batch": micro, "passes": len(found.pass_s)}
    if session.workers.rank == 0:
        run = calibration.run
        run.write_json(run.memory_probe, {**read_measured(run), NAME: record})
        calibration.reporter.event(NAME, **record)
