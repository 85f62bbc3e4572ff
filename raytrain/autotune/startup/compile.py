"""`loop.compile: auto` on the real model: whether compiled passes gain more time than the compilation takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.wording import counted
from raytrain.autotune.probe.agreed import run_agreed
from raytrain.autotune.probe.arms import ArmTimes, TimedArm, timed_arms
from raytrain.autotune.search.arms import choose_compiled
from raytrain.autotune.startup.choice import Calibration, DeferredChoice, Record, record_of
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.text import seconds_text

MIN_ROUNDS, MAX_ROUNDS = 3, 9
#: What a compilation usually takes at least, and how much faster the step usually is: before anything is compiled, a
#: run that gains less is not worth trying.
USUAL_COMPILATION_S, USUAL_RATIO = 30.0, 1.3
#: A run of fewer steps measures nothing: it would be too short even with steps of a second.
FEWEST_STEPS = int(USUAL_COMPILATION_S / (1 - 1 / USUAL_RATIO))


class CompileChoice(DeferredChoice):
    """Whether the model is compiled; needs a prepared session with its micro-batch.

    Args:
        done: steps of the checkpoint to resume from.
    """

    name = "compile"

    def __init__(self, calibration: Calibration, *, done: int = 0) -> None:
        super().__init__(calibration)
        self._done = done

    def settings(self) -> dict[str, Any]:
        """Steps of the whole run, workers and precision."""
        session = self.session
        steps, workers = session.limits().max_steps, session.workers.world_size
        return {"max_steps": steps, "workers": workers, "precision": session.precision}

    def settings_of(self, known: Record) -> Any:
        """The same when it was measured."""
        return known["trials"]["settings"]

    def shown(self, record: Record) -> tuple[str, str] | None:
        """The mode, if the model is compiled."""
        return None if record["value"] == "off" else ("compile", record["value"])

    def apply(self, record: Record) -> None:
        """Compile, or run the model as it is written."""
        self.session.use(replace(self.session.settings, compiled=record["value"] != "off"))

    def measure(self, settings: dict[str, Any]) -> Record:
        """Time an eager pass; where the rest of the run may pay for a compilation, compile, and time both in turn."""
        session, steps = self.session, settings["max_steps"] - self._done
        trials: dict[str, Any] = {"settings": settings}
        if (why := session.switches.missing()) is not None:
            return record_of(Resolved("off", why), trials)
        if steps < FEWEST_STEPS:
            return record_of(Resolved("off", f"{counted(steps, 'step')} are too few to pay for a compilation"), trials)
        (eager,), share = self._timed([False])
        left_s = steps * eager.median_s * share
        if eager.error:
            return record_of(Resolved("off", f"a pass failed: {eager.error}"), trials)
        if left_s * (1 - 1 / USUAL_RATIO) < USUAL_COMPILATION_S:
            left = f"{counted(steps, 'step')} of {seconds_text(left_s / steps)}"
            reason = f"{left} are too short for a compilation to pay, which takes about {USUAL_COMPILATION_S:.0f} s"
            return record_of(Resolved("off", reason), trials)
        self.calibration.report_progress({"phase": "measuring compilation"})
        try:
            session.use(replace(session.settings, compiled=True))
        except InputError as error:
            return record_of(Resolved("off", str(error)), trials)
        assert session.switches.compiled is not None, "no machine misses anything"
        (eager, compiled), share = self._timed([False, True])
        status = session.switches.compiled.status()
        trials |= {"eager": eager.round_s, "compiled": compiled.round_s, "seconds": status["seconds"]}
        failed = compiled.error or eager.error
        if not failed and compiled.values > eager.values:
            failed = "it would hide what the loss is a mean over"
        gain_s = steps * share * (eager.median_s - compiled.median_s)
        ratio = 1.0 if failed else eager.median_s / compiled.median_s
        chosen = choose_compiled(ratio, gain_s, steps=steps, spent_s=status["seconds"], failed=failed)
        parts = "; ".join([f"{status['achieved']} compiled", *status["reasons"][:1]])
        return record_of(replace(chosen, reason=f"{chosen.reason} ({parts})"), trials)

    def _timed(self, ways: Sequence[bool]) -> tuple[list[ArmTimes], float]:
        """The seconds of the first micro-batches of each worker, eager (False) and compiled, in turn, and how many
        times as much a step computes. An arm's value is 1 where nothing tells what a loss is a mean over."""
        session, step = self.session, self.session.step
        loader, workers, parts = session.loader, session.workers, session.switches.compiled
        indices = loader.global_batch(session.state.cursor).indices
        rows = indices[: loader.batches.micro_batch * workers.world_size]
        passes, untold = loader.passes(rows), step.untold

        def arm(compiled: bool) -> TimedArm:
            def before() -> None:
                step.untold = False
                if parts is not None:
                    parts.on = compiled

            work = lambda: step.backward(loader.micro_batches(rows), global_weight=1, passes=passes)  # noqa: E731
            return TimedArm(work, before=before, values=lambda: [float(step.untold)])

        arms = timed_arms(
            [arm(way) for way in ways],
            trainable=session.trainable,
            workers=workers,
            device=session.device,
            min_rounds=MIN_ROUNDS if len(ways) > 1 else 1,
            max_rounds=MAX_ROUNDS if len(ways) > 1 else 1,
            attempt=lambda work: run_agreed(
                work, workers=workers, device=session.device, remote=session.trainable.remote,
                collective_passes=step.collective_passes,
            )[1],
            stop_on_failure=True,
        )  # fmt: skip
        step.untold = untold
        if parts is not None:
            parts.on = True
        return arms, loader.passes(indices) / passes
