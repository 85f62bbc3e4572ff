"""`loop.compile: auto` on the real model: whether compiling gains more time than it takes; and a run that compiles
times a step without compilation, with which its compiled steps are compared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cluster.wording import counted
from raytrain.autotune.probe.arms import timed_passes
from raytrain.autotune.search.arms import choose_compiled
from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.startup.choice import Calibration, DeferredChoice, Record, read_measured, record_of
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.rules.speed import FEW_STEPS, too_few
from raytrain.plan.text import seconds_text

#: What a compilation takes at least, usually, and how much faster the step gets: a run that would gain less compiles
#: nothing.
USUAL_COMPILATION_S, USUAL_RATIO = 30.0, 1.3
#: Compiled passes must win each of the least rounds.
ROUNDS = 5, 15

NAME = "eager_step"
"""Name of the entry in memory_probe.json, and kind of the event."""

PASSES = 5
"""Timed passes and updates, after one that is dropped."""


class CompileChoice(DeferredChoice):
    """Whether the model is compiled; needs a prepared session with its micro-batch.

    Args:
        done: steps of the checkpoint to resume from.
    """

    name = "compile"

    def __init__(self, calibration: Calibration, *, done: int = 0) -> None:
        super().__init__(calibration)
        self._done = done

    def settings(self) -> list[Any]:
        """Steps of the run, workers and precision."""
        return [self.session.limits().max_steps, self.session.workers.world_size, self.session.precision]

    def settings_of(self, known: Record) -> Any:
        """The same when it was measured."""
        return known["trials"]["settings"]

    def shown(self, record: Record) -> tuple[str, str] | None:
        """The mode, if the model is compiled."""
        return None if record["value"] == "off" else ("compile", record["value"])

    def apply(self, record: Record) -> None:
        """Compile the model, or run it as it is written."""
        self.session.use(replace(self.session.settings, compiled=record["value"] != "off"))

    def measure(self, settings: list[Any]) -> Record:
        """Time an eager pass; where the rest of the run may pay for a compilation, compile, and time both in turn."""
        trials: dict[str, Any] = {"settings": settings}
        return record_of(self._chosen(settings[0] - self._done, trials), trials)

    def _chosen(self, steps: int, trials: dict[str, Any]) -> Resolved:
        session = self.session
        if steps < FEW_STEPS:
            return Resolved("off", too_few(steps))
        (eager,), share = timed_passes(session, [lambda: None], most=1, rounds=(1, 1))
        if eager.error:
            return Resolved("off", f"a pass failed: {eager.error}")
        if steps * share * eager.median_s * (1 - 1 / USUAL_RATIO) < USUAL_COMPILATION_S:
            left = f"{counted(steps, 'step')} of {seconds_text(share * eager.median_s)}"
            why = f"{left} are too short for a compilation to pay, which takes about {USUAL_COMPILATION_S:.0f} s"
            return Resolved("off", why)
        self.calibration.report_progress({"phase": "measuring compilation"})
        try:
            session.use(replace(session.settings, compiled=True))
        except InputError as error:
            return Resolved("off", str(error))
        parts = session.switches.compiled
        if parts is None:
            return Resolved("off", "a worker's machine cannot compile, as its event says")
        ways = [partial(setattr, parts, "on", way) for way in (False, True)]
        (eager, compiled), share = timed_passes(session, ways, most=1, rounds=ROUNDS)
        parts.on = True
        trials |= {"eager": eager.round_s, "compiled": compiled.round_s, "compilation": parts.status()}
        failed = eager.error or compiled.error
        if not failed and compiled.values > eager.values:
            failed = "they hide what the loss is a mean over"
        return choose_compiled(eager.round_s, compiled.round_s, steps * share, trials["compilation"], failed=failed)


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
