"""Resolves, at the start of an attempt, every choice that the plan leaves to a measurement on the real model.

Each `settle_*` reads its choice from `memory_probe.json`, or measures and records it, and makes the session use it. A
restarted or resumed attempt uses what the first one measured. All are collective.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from cluster.wording import counted
from raytrain.accelerator import device_name
from raytrain.autotune.found import confirm
from raytrain.autotune.fp32_layers import measure_layers
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.micro_batch import NothingFits, measure_micro_batch, possible_sizes, spare_memory
from raytrain.autotune.precision import WORTHWHILE_GAIN, choose_precision, faster_beyond_noise, has_winner
from raytrain.autotune.rounds import TimedArm, timed_arms
from raytrain.autotune.shares import measure_shares
from raytrain.autotune.step_probe import StepProbe
from raytrain.checkpoint.reader import LoadedCheckpoint
from raytrain.errors import InputError, StateLost, first_line
from raytrain.plan.choice import Deferred, Resolved, seconds_text
from raytrain.plan.memory import TINY_PARAMETERS
from raytrain.plan.shares import shares_of
from raytrain.plan.speed import FEW_STEPS, too_few
from raytrain.runs.faults import fallen_precision
from raytrain.runs.folder import RunFolder
from raytrain.train.memory.device import StepDropped
from raytrain.train.parallel.reduction import could_overlap
from raytrain.train.precision import policy_for
from raytrain.train.session import Session
from raytrain.train.state import Reporter
from raytrain.trainable import parameters_of

LABEL_COLUMNS = 10
"""Width of the labels of a run's first lines on the terminal."""
#: What a compilation takes at least, usually, and how much faster the step gets: a run that would gain less compiles
#: nothing.
USUAL_COMPILATION_S, USUAL_RATIO = 30.0, 1.3
#: Rounds of a comparison of precisions.
PRECISION_ROUNDS = 3, 12
#: Compiled passes must win each of the least rounds; so must overlapped all-reduces.
ROUNDS = 5, 15
#: Rounds with one and with two micro-batches in flight.
INFLIGHT_ROUNDS = 3, 12
#: Most micro-batches of each worker in a measurement of those two.
MEASURED_PASSES = 4
#: Timed passes and updates of an eager step, after one that is dropped.
EAGER_PASSES = 5
EAGER_STEP = "eager_step"
"""Name of the entry in memory_probe.json, and kind of the event."""

Record = dict[str, Any]
"""One entry of memory_probe.json: "value", "reason", and what they follow from."""


def read_measured(run: RunFolder) -> dict[str, Record]:
    """What this run has measured so far, by the name of the choice."""
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


@dataclass
class Calibration:
    """What the choices at the start of an attempt have in common.

    Attributes:
        session: the attempt's.
        run: whose memory_probe.json is read and written, by rank 0.
        reporter: receives an event for every choice that is measured.
        report_progress: sends a status to the driver; does nothing except on rank 0.
        decided: names of the choices that were made in this attempt, and not before.
    """

    session: Session
    run: RunFolder
    reporter: Reporter
    report_progress: Callable[[dict[str, Any]], None]
    decided: set[str] = field(default_factory=set)

    @cached_property
    def probe(self) -> StepProbe:
        """Measures the session's step; needs `prepare`."""
        return StepProbe(self.session)

    def is_open(self, name: str) -> bool:
        """Whether the plan leaves this choice to a measurement."""
        return isinstance(getattr(self.session.job.plan, name), Deferred)

    def use(self, **settings: Any) -> None:
        """Make the session use these settings of its step."""
        self.session.use(replace(self.session.settings, **settings))

    def recorded(self, name: str) -> Record | None:
        """What rank 0 reads of a choice, on every worker; None if it has not been measured. Collective."""
        workers = self.session.workers
        return workers.broadcast_object(read_measured(self.run).get(name) if workers.rank == 0 else None)

    def write(self, name: str, record: Record, *, event: str = "") -> None:
        """Rank 0 adds a choice to memory_probe.json, and reports it as a decision (called `event`, else `name`)."""
        if self.session.workers.rank == 0:
            self.run.write_json(self.run.memory_probe, {**read_measured(self.run), name: record})
            self.reporter.event("decision", what=event or name, value=record["value"], reason=record["reason"])

    def settle(
        self, name: str, measure: Callable[[], Record], *, settings: Any = None, event: str = "",
        unmeasured: Callable[[], Record | None] = lambda: None,
    ) -> Record:  # fmt: skip
        """The recorded result if it was measured for the same `settings`, else a new one, which is recorded.

        Args:
            settings: what a result holds for, the same on every worker.
            unmeasured: a value that needs no measurement and is not recorded, where there is one.
        """
        known = self.recorded(name)
        if known is not None and (settings is None or _settings_of(known) == settings):
            return known
        self.decided.add(name)
        if (record := unmeasured()) is None:
            record = measure()
            if settings is not None:
                record = {**record, "settings": settings}
            self.write(name, record, event=event)
        return record

    def show(self, name: str, label: str, value: str, record: Record) -> None:
        """Rank 0 prints a choice that was made in this attempt, a line that stays on the driver's terminal; `value` ""
        is the usual one, and not worth a line."""
        if name in self.decided and self.session.workers.rank == 0 and value:
            print(f"{label:<{LABEL_COLUMNS}}{value}: {record['reason']}", flush=True)
        self.decided.discard(name)


def _settings_of(known: Record) -> Any:
    """What a result was measured for; earlier versions wrote it among the trials."""
    trials = known.get("trials")
    if "settings" in known or not isinstance(trials, dict):
        return known.get("settings")
    return next((trials[key] for key in ("settings", "of", "precision") if key in trials), None)


def _record(chosen: Resolved, trials: Any) -> Record:
    return {"value": chosen.value, "reason": chosen.reason, "trials": trials}


def resolve_choices(calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
    """Prepare the session and apply all choices to it. Collective.

    The order matters: each choice is measured with the ones before it in force. Compilation is measured with the
    micro-batch that fits without it, since a compiled step usually needs less memory. A run that compiles then measures
    a step without compilation.

    Args:
        forced: precision that the failure rules demand.
        loaded: the checkpoint to resume from; the session is not restored yet.

    Raises:
        RunError: not even one row fits into memory.
        StateLost: an expert host died.
    """
    settle_precision(calibration, forced=forced, loaded=loaded)
    settle_micro_batch(calibration)
    settle_found(calibration)
    settle_compile(calibration, done=int(loaded.state["loop"]["step"]) if loaded else 0)
    settle_inflight(calibration)
    settle_shares(calibration)
    settle_overlap(calibration)
    measure_eager_step(calibration)


# -- precision ------------------------------------------------------------------------------------


def settle_precision(calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
    """Prepare the session in the first of these that there is: the precision after a fall-back, the checkpoint's, the
    plan's, the recorded one, the one measured now. The layers in fp32 are resolved with it.

    Args:
        forced: by the failure rules; None where they demand none.
        loaded: the checkpoint to resume from.
    """
    session, planned = calibration.session, calibration.session.job.plan.precision
    fallen = fallen_precision(calibration.run) if session.workers.rank == 0 else None
    given = session.workers.broadcast_object(forced or fallen) or (loaded.state["precision"] if loaded else None)
    if isinstance(planned, Resolved):
        given = given or planned.value
    if given:
        session.prepare(given)
        settle_layers(calibration, [session.precision or ""])
        return
    assert isinstance(planned, Deferred), "what is resolved has a value"
    record = calibration.settle("precision", partial(_measured_precision, calibration, planned.bounds))
    if session.precision is None:
        session.prepare(record["value"])
        settle_layers(calibration, [record["value"]])
    else:  # a measurement has prepared it in fp32
        session.use_precision(record["value"])
    calibration.show("precision", "precision", record["value"], record)


def _measured_precision(calibration: Calibration, candidates: Sequence[str]) -> Record:
    """Prepare the session in fp32, and measure with as many rows as fit. If none does, nothing can be compared with it,
    and the answer is the first precision in which one fits."""
    session = calibration.session
    session.prepare("fp32")
    try:
        use_fitting_rows(calibration)
    except NothingFits as error:
        why = error
    else:
        settle_layers(calibration, candidates)
        calibration.report_progress({"phase": "measuring precisions"})
        return _record(*measure_precision(calibration.probe, candidates))
    for name in candidates:
        session.use_precision(name)
        try:
            use_fitting_rows(calibration)
        except NothingFits:
            continue
        chosen = Resolved(name, f"in fp32 {why}; {name} fits, and could not be compared with it: watch its loss")
        if calibration.is_open("fp32_layers"):  # recorded for the next attempt, which could not measure them either
            calibration.use(fp32_layers=())
            calibration.write("fp32_layers", {"value": [], "reason": chosen.reason, "trials": [], "settings": name})
        return _record(chosen, [])
    raise why


def measure_precision(probe: StepProbe, candidates: Sequence[str]) -> tuple[Resolved, list[dict[str, Any]]]:
    """The precision of these for the real model, and what each showed on the first micro-batch of the global batch, the
    same on every worker. Needs `prepare("fp32")`; changes nothing that it measures. Collective."""
    rows = probe.session.loader.batches.micro_batch
    points = [Candidate(name, rows) for name in candidates]
    found = probe.measure_in_turn(points, budget=None, rounds=PRECISION_ROUNDS, updates=False, clear=has_winner)
    return choose_precision(found), [one.to_json() for one in found]


def settle_layers(calibration: Calibration, precisions: Sequence[str]) -> None:
    """Layers that stay in fp32; needs a prepared session.

    Args:
        precisions: in which the other layers compute or may compute; the first half precision counts.
    """
    if not calibration.is_open("fp32_layers"):
        return
    half = next((name for name in precisions if policy_for(name).autocast_dtype is not None), None)
    if half is None:
        calibration.use(fp32_layers=())
        return

    def measure() -> Record:
        use_fitting_rows(calibration)  # not earlier: a recorded micro-batch may be of the layers found here
        chosen, changes = measure_layers(calibration.session, half)
        return _record(chosen, {"layers": [change.to_json() for change in changes]})

    record = calibration.settle("fp32_layers", measure, settings=half)
    calibration.use(fp32_layers=tuple(record["value"]))
    kept = f"{counted(len(record['value']), 'layer')} in fp32 where others are in {half}" if record["value"] else ""
    calibration.show("fp32_layers", "precision", kept, record)


# -- rows of a micro-batch ------------------------------------------------------------------------


def settle_micro_batch(calibration: Calibration) -> None:
    """Rows of a micro-batch, where the plan leaves them to memory, and no failure rule has decided; needs a prepared
    session.

    Raises:
        NothingFits: not even one row.
    """
    if calibration.session.settings.micro_batch is None:
        record = _fitting_rows(calibration)
        calibration.use(micro_batch=record["value"])
        spare_memory(calibration.session, peak=record["peak_bytes"], budget=record["budget_bytes"])
        calibration.show("micro_batch", "batch", f"micro-batches of {record['value']}", record)


def use_fitting_rows(calibration: Calibration) -> None:
    """Before a measurement that precedes the choice of the micro-batch: until then the loader has the largest size,
    which may need more memory than there is. Measures in the session's present precision.

    Raises:
        NothingFits: not even one row.
    """
    if calibration.session.settings.micro_batch is None:
        calibration.session.loader.micro_batch = _fitting_rows(calibration)["value"]


def _fitting_rows(calibration: Calibration) -> Record:
    session, job = calibration.session, calibration.session.job
    total = int(job.planned("global_batch_size"))
    settings = {
        "global_batch_size": total, "workers": session.workers.world_size, "precision": session.precision,
        "fp32_layers": list(session.settings.fp32_layers),
    }  # fmt: skip

    def share_of_tiny_model() -> Record | None:
        """A tiny model of unknown size, on a CPU without a memory limit, is not measured."""
        unknown = job.plan.model_facts is None and job.cluster.memory_limit is None
        if session.device.type != "cpu" or not unknown:
            return None
        if parameters_of(session.trainable.module) >= TINY_PARAMETERS:
            return None
        reason = f"one worker's share of {total}: the model has fewer than {TINY_PARAMETERS:,} parameters"
        return {"value": possible_sizes(session)[-1], "reason": reason, "peak_bytes": None, "budget_bytes": None}

    def measure() -> Record:
        calibration.report_progress({"phase": "measuring memory"})
        return measure_micro_batch(calibration.probe, settings)[1]

    return calibration.settle("micro_batch", measure, settings=settings, unmeasured=share_of_tiny_model)


def settle_found(calibration: Calibration) -> None:
    """Once in a run, before it trains: what a search found (`tune.found`), measured again in the real group of workers.
    Needs a prepared session with its micro-batch; under fsdp nothing is measured.

    Raises:
        RunError: the signature differs, and not even one row fits now.
    """
    session, found = calibration.session, calibration.session.job.found
    if found is None or session.job.planned("strategy") == "fsdp":
        return

    def measure() -> Record:
        calibration.report_progress({"phase": "confirming what the search found"})
        record = confirm(calibration.probe, found)
        if session.workers.rank == 0 and not record["confirmed"]:
            print(f"unlike the search: {record['reason']}")
        return record

    record = calibration.settle("found", measure, event="tune.found")
    # an earlier attempt may have had to reduce it; a restart after an out-of-memory may use less
    if session.settings.micro_batch is None or session.settings.micro_batch > record["value"]:
        calibration.use(micro_batch=record["value"])
    measured = record.get("micro_batch", record)
    spare_memory(session, peak=measured["peak_bytes"], budget=measured["budget_bytes"])


# -- compilation ----------------------------------------------------------------------------------


def settle_compile(calibration: Calibration, *, done: int = 0) -> None:
    """Whether the model is compiled; needs a prepared session with its micro-batch.

    Args:
        done: steps of the checkpoint to resume from.
    """
    if not calibration.is_open("compile"):
        return
    session = calibration.session
    most = session.limits().max_steps
    settings = [most, session.workers.world_size, session.precision]
    record = calibration.settle("compile", partial(_measured_compile, calibration, most - done), settings=settings)
    calibration.use(compiled=record["value"] != "off")
    calibration.show("compile", "compile", "" if record["value"] == "off" else record["value"], record)


def _measured_compile(calibration: Calibration, steps: int) -> Record:
    """Time an eager pass; where the rest of the run may pay for a compilation, compile, and time both in turn."""
    session = calibration.session
    if steps < FEW_STEPS:
        return _record(Resolved("off", too_few(steps)), {})
    (eager,), share = calibration.probe.passes_in_turn([lambda: None], most=1, rounds=(1, 1))
    if eager.error:
        return _record(Resolved("off", f"a pass failed: {eager.error}"), {})
    if steps * share * eager.median_s * (1 - 1 / USUAL_RATIO) < USUAL_COMPILATION_S:
        left = f"{counted(steps, 'step')} of {seconds_text(share * eager.median_s)}"
        why = f"{left} are too short for a compilation to pay, which takes about {USUAL_COMPILATION_S:.0f} s"
        return _record(Resolved("off", why), {})
    calibration.report_progress({"phase": "measuring compilation"})
    try:
        calibration.use(compiled=True)
    except InputError as error:
        return _record(Resolved("off", str(error)), {})
    parts = session.switches.compiled
    if parts is None:
        return _record(Resolved("off", "a worker's machine cannot compile, as its event says"), {})
    ways = [partial(setattr, parts, "on", way) for way in (False, True)]
    (eager, compiled), share = calibration.probe.passes_in_turn(ways, most=1, rounds=ROUNDS)
    parts.on = True
    status = parts.status()
    trials = {"eager": eager.round_s, "compiled": compiled.round_s, "compilation": status}
    text = "; ".join([f"{status['achieved']} compiled", *status["reasons"][:1]])
    failed = eager.error or compiled.error
    if not failed and compiled.values > eager.values:
        failed = "they hide what the loss is a mean over"
    if failed:
        return _record(Resolved("off", f"compiled passes cannot be used: {failed} ({text})"), trials)
    faster, how = faster_beyond_noise(compiled.round_s, eager.round_s, than="eager ones")
    reason = f"compiled passes measured {how} ({text})"
    if faster:  # what the compilation took is spent either way
        saved = seconds_text(steps * share * (eager.median_s - compiled.median_s))
        reason += f", {saved} less for {seconds_text(status['seconds'])} of compilation"
    return _record(Resolved("default" if faster else "off", reason), trials)


def measure_eager_step(calibration: Calibration) -> None:
    """Time the step of a prepared session with its parts as they were written, once in a run. Changes nothing.

    The event `eager_step` has the `seconds` of a step of the slowest worker, from forward to the optimizer's update,
    without reading data. Nothing is measured where nothing is compiled, under fsdp (which measures nothing), and where
    a pass fails.
    """
    session = calibration.session
    compiled = session.switches.compiled
    if compiled is None or session.job.planned("strategy") == "fsdp" or calibration.recorded(EAGER_STEP) is not None:
        return
    calibration.report_progress({"phase": "measuring a step without compilation"})
    micro = session.loader.batches.micro_batch
    with compiled.eager():
        candidate = Candidate(session.precision or "fp32", micro)
        found = calibration.probe.measure(candidate, budget=None, passes=EAGER_PASSES, with_memory=False)
    if found.outcome == "ok" and session.workers.rank == 0:
        rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
        record = {"seconds": found.step_s(rows), "micro_batch": micro, "passes": len(found.pass_s)}
        run = calibration.run
        run.write_json(run.memory_probe, {**read_measured(run), EAGER_STEP: record})
        calibration.reporter.event(EAGER_STEP, **record)


# -- two ways to exchange -------------------------------------------------------------------------


def settle_inflight(calibration: Calibration) -> None:
    """One or two micro-batches in flight to the experts; needs a prepared session.

    Raises:
        StateLost: a host died, which ends the attempt; where two were in flight, the next attempt uses one.
    """
    if not calibration.is_open("inflight"):
        return

    def measure() -> Record:
        calibration.report_progress({"phase": "measuring micro-batches in flight"})
        try:
            return _record(*measure_inflight(calibration.probe))
        except StateLost as error:  # raised by all workers
            if calibration.session.step.inflight == 2:
                why = f"2 in flight failed while measured ({type(error).__name__}: {first_line(error)})"
                calibration.write("inflight", _record(Resolved(1, why), {}))
            raise

    calibration.use(inflight=calibration.settle("inflight", measure)["value"])


def measure_inflight(probe: StepProbe) -> tuple[Resolved, dict[int, float]]:
    """The choice, and the slowest worker's median seconds by micro-batches in flight, on the first micro-batches of the
    real model; no seconds if either fails, and then the first step of the run reports the consequence. Changes nothing
    that it measures. Collective."""
    step, before = probe.step, probe.step.inflight
    befores = [partial(setattr, step, "inflight", number) for number in (1, 2)]
    times, _ = probe.passes_in_turn(befores, most=MEASURED_PASSES, rounds=INFLIGHT_ROUNDS)
    step.inflight = before
    for number, arm in enumerate(times, 1):
        if arm.error:
            return Resolved(1, f"{number} in flight failed while measured: {arm.error}"), {}
    seconds = {number: arm.median_s for number, arm in enumerate(times, 1)}
    ratio = seconds[1] / seconds[2]
    reason = f"2 micro-batches in flight measured {ratio:.2f} times as fast as 1"
    return Resolved(2 if ratio >= 1 + WORTHWHILE_GAIN else 1, reason), seconds


def settle_shares(calibration: Calibration) -> None:
    """Each worker's share of a batch; needs a prepared session with its micro-batch.

    An attempt whose ranks are on the same machines uses the shares that the first one measured, and so sums in its
    order.
    """
    if not calibration.is_open("shares"):
        return
    session = calibration.session
    places = session.workers.all_gather_object(f"{socket.gethostname()} {device_name(session.device)}")
    settings = {"places": places, "micro_batch_size": session.loader.batches.micro_batch}

    def measure() -> Record:
        chosen, paces = measure_shares(session)
        return _record(chosen, {"paces": [pace.to_json() for pace in paces]})

    record = calibration.settle("shares", measure, settings=settings)
    calibration.use(shares=shares_of(record["value"]))
    calibration.show("shares", "shares", "" if record["value"] == "equal" else "unequal", record)


def settle_overlap(calibration: Calibration) -> None:
    """Whether all-reduces overlap with the last backward pass; needs a prepared session. With fewer workers than were
    planned for there may be nothing to reduce."""
    session = calibration.session
    if not calibration.is_open("overlap") or session.workers.world_size == 1:
        return

    def measure() -> Record:
        if session.step.filler is not None:
            why = "the model runs collectives inside backward, with which the all-reduces must not interleave"
            return _record(Resolved(False, why), {})
        if not could_overlap(session.step.gradients, session.workers):
            total = sum(flat.nbytes for flat in session.step.gradients.buffers)
            why = f"the gradients are one bucket of {total:,} bytes, which is whole only when backward is over"
            return _record(Resolved(False, why), {})
        calibration.report_progress({"phase": "measuring overlap"})
        try:
            return _record(*measure_overlap(session))
        except StepDropped as error:  # raised by all workers
            return _record(Resolved(False, f"no memory while it was measured ({error})"), {})

    calibration.use(overlap=calibration.settle("overlap", measure)["value"])


def measure_overlap(session: Session) -> tuple[Resolved, dict[str, list[float]]]:
    """The choice, and the slowest worker's seconds of each round by arm ("after", "during"), on the real model and the
    first micro-batches of its global batch; only the last pass of a step can overlap. Changes nothing that it measures.
    Collective.

    Raises:
        StepDropped: a worker had no memory; all raise it.
    """
    loader, step, workers = session.loader, session.step, session.workers
    rows = loader.global_batch(session.state.cursor).indices
    rows = rows[: MEASURED_PASSES * loader.batches.micro_batch * workers.world_size]
    passes, reduction = loader.passes(rows), step.reduction

    def before(overlap: bool) -> None:
        reduction.overlap(overlap)
        workers.all_reduce_ints([0])  # a barrier: all workers start together

    def work() -> None:
        backward = partial(step.backward, loader.micro_batches(rows), global_weight=1, passes=passes)
        reduction.passed(backward, flags=lambda: [0, 0])

    after, during = timed_arms(
        [TimedArm(work, before=partial(before, overlap)) for overlap in (False, True)],
        trainable=session.trainable, workers=workers, device=session.device, min_rounds=ROUNDS[0],
        max_rounds=ROUNDS[1],
        # overlap must win each of the least rounds, so that fewer are enough where it has lost one
        decided=lambda seconds: any(after <= during for after, during in zip(*seconds, strict=True)),
    )  # fmt: skip
    reduction.overlap(False)
    faster, how = faster_beyond_noise(during.round_s, after.round_s, than="after it")
    reason = f"all-reduces started inside the last backward measured {how}"
    return Resolved(faster, reason), {"after": after.round_s, "during": during.round_s}
