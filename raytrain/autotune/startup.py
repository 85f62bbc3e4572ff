"""Resolves, at the start of an attempt, every choice that the plan leaves to a measurement on the real model.

Each `settle_*` reads its choice from `memory_probe.json`, or measures and records it, and makes the session use it. A
restarted or resumed attempt uses what the first one measured. All are collective.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

from cluster.wording import counted
from raytrain.accelerator import device_name, seconds_of
from raytrain.autotune.batch_search import choose_precision
from raytrain.autotune.fp32_layers import measure_layers
from raytrain.autotune.measurement import Candidate, faster_beyond_noise, has_winner
from raytrain.autotune.micro_batch import measure_micro_batch, possible_sizes
from raytrain.autotune.preserve import preserve_model
from raytrain.autotune.step_probe import StepProbe
from raytrain.checkpoint.reader import LoadedCheckpoint
from raytrain.errors import InputError
from raytrain.plan.choice import Deferred, Resolved, seconds_text
from raytrain.plan.memory import DOUBTFUL, TINY_PARAMETERS
from raytrain.plan.shares import Shares, gain_over_equal, shares_of
from raytrain.plan.speed import FEW_STEPS, too_few
from raytrain.runs.faults import fallen_precision
from raytrain.runs.folder import RunFolder
from raytrain.train.memory.device import give_back_freed_memory
from raytrain.train.precision import policy_for
from raytrain.train.session import Session
from raytrain.train.state import Reporter
from raytrain.trainable import MicroBatch, parameters_of

#: Width of the labels of a run's first lines on the terminal.
LABEL_COLUMNS = 10
#: What a compilation takes at least, usually, and how much faster the step gets: a run that would gain less compiles
#: nothing.
USUAL_COMPILATION_S, USUAL_RATIO = 30.0, 1.3
#: Least and most rounds: of precisions, and of eager and compiled passes.
PRECISION_ROUNDS, COMPILE_ROUNDS = (3, 12), (5, 15)
#: Passes that say how long the run will be; one is enough of those that take seconds.
EAGER_ROUNDS = 1, 3
#: Timed passes and updates of an eager step, after one that is dropped.
EAGER_PASSES = 5
#: Shares that save less than this fraction of a step stay equal: they would follow noise.
WORTHWHILE_SHARES = 0.05
#: Least seconds of timed passes of shares; more if the slowest worker needs them for `SHARE_PASSES` passes.
SHARES_S, SHARE_PASSES = 1.0, 4
#: Name of the entry in memory_probe.json, and kind of the event.
EAGER_STEP = "eager_step"

Record = dict[str, Any]
"""One entry of memory_probe.json: "value", "reason", and what they follow from."""


def read_measured(run: RunFolder) -> dict[str, Record]:
    """What this run has measured so far, by the name of the choice."""
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


@dataclass
class Calibration:
    """What the choices at the start of an attempt have in common."""

    session: Session
    run: RunFolder  # whose memory_probe.json is read and written, by rank 0
    reporter: Reporter  # receives an event for every choice that is measured
    report_progress: Callable[[dict[str, Any]], None]  # sends a status to the driver; does nothing except on rank 0
    decided: set[str] = field(default_factory=set)  # names of the choices that were made in this attempt

    @cached_property
    def probe(self) -> StepProbe:
        """Measures the session's step; needs `prepare`."""
        return StepProbe(self.session)

    @property
    def speaks(self) -> bool:
        return self.session.workers.rank == 0

    def is_open(self, name: str) -> bool:
        """Whether the plan leaves this choice to a measurement."""
        return isinstance(getattr(self.session.job.plan, name), Deferred)

    def use(self, **settings: Any) -> None:
        self.session.use(replace(self.session.settings, **settings))

    def begin(self, phase: str) -> None:
        """Tell the driver what is being measured."""
        self.report_progress({"phase": f"measuring {phase}"})

    def recorded(self, name: str) -> Record | None:
        """What rank 0 reads of a choice, on every worker; None if it has not been measured. Collective."""
        return self.session.workers.broadcast_object(read_measured(self.run).get(name) if self.speaks else None)

    def write(self, name: str, record: Record) -> None:
        """Add an entry to memory_probe.json; on rank 0."""
        self.run.write_json(self.run.memory_probe, {**read_measured(self.run), name: record})

    def settle(self, name: str, measure: Callable[[], Record], *, settings: Any = None) -> Record:
        """The recorded result if it was measured for the same `settings` (the same on every worker), else a new one,
        which is recorded."""
        known = self.recorded(name)
        if known is not None and (settings is None or known.get("settings") == settings):
            return known
        self.decided.add(name)
        record = measure()
        if settings is not None:
            record = {**record, "settings": settings}
        if self.speaks:
            self.write(name, record)
            self.reporter.event("decision", what=name, value=record["value"], reason=record["reason"])
        return record

    def show(self, name: str, label: str, value: str, record: Record) -> None:
        """Rank 0 prints a choice that was made in this attempt, a line that stays on the driver's terminal; `value` ""
        is the usual one, and not worth a line."""
        if name in self.decided and self.speaks and value:
            print(f"{label:<{LABEL_COLUMNS}}{value}: {record['reason']}", flush=True)
        self.decided.discard(name)


def _record(chosen: Resolved, trials: Any = None) -> Record:
    return {"value": chosen.value, "reason": chosen.reason, "trials": {} if trials is None else trials}


def _off(reason: str, trials: Any = None) -> Record:
    return _record(Resolved("off", reason), trials)


def resolve_choices(calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
    """Prepare the session and apply all choices to it, each measured with the ones before it in force; the checkpoint
    to resume from is not restored yet. Collective.

    Raises:
        RunError: not even one row fits into memory.
        StateLost: an expert host died.
    """
    settle_precision(calibration, forced=forced, loaded=loaded)
    settle_micro_batch(calibration)
    # with the micro-batch that fits without it, since a compiled step usually needs less memory
    settle_compile(calibration, done=int(loaded.state["loop"]["step"]) if loaded else 0)
    settle_shares(calibration)
    measure_eager_step(calibration)


# -- precision ------------------------------------------------------------------------------------


def settle_precision(calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
    """Prepare the session in the first of these that there is: the precision that the failure rules demand (`forced`),
    that after a fall-back, the checkpoint's, the plan's, the recorded one, the one measured now. The layers in fp32 are
    resolved with it."""
    session, planned = calibration.session, calibration.session.job.plan.precision
    fallen = fallen_precision(calibration.run) if calibration.speaks else None
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
    """Prepare the session in fp32, and measure with as many rows as fit."""
    calibration.session.prepare("fp32")
    use_fitting_rows(calibration)
    settle_layers(calibration, candidates)
    calibration.begin("precisions")
    return _record(*measure_precision(calibration.probe, candidates))


def measure_precision(probe: StepProbe, candidates: Sequence[str]) -> tuple[Resolved, list[dict[str, Any]]]:
    """The precision of these for the real model, and what each showed on the first micro-batch of the global batch, the
    same on every worker. Needs `prepare("fp32")`; changes nothing that it measures. Collective."""
    rows = probe.session.loader.batches.micro_batch
    points = [Candidate(name, rows) for name in candidates]
    found = probe.measure_in_turn(points, budget=None, rounds=PRECISION_ROUNDS, updates=False, clear=has_winner)
    return choose_precision(found), [asdict(one) for one in found]


def settle_layers(calibration: Calibration, precisions: Sequence[str]) -> None:
    """Layers that stay in fp32 under the first half precision of `precisions`; needs a prepared session."""
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
    session. Raises NothingFits: not even one row."""
    if calibration.session.settings.micro_batch is None:
        record = _fitting_rows(calibration)
        calibration.use(micro_batch=record["value"])
        peak, budget = record["peak_bytes"], record["budget_bytes"]
        if calibration.session.device.type == "cpu" and peak and budget and peak > DOUBTFUL * budget:
            # what malloc kept made the resident set of a mixture of experts half as large again as what was in use
            give_back_freed_memory()
        calibration.show("micro_batch", "batch", f"micro-batches of {record['value']}", record)


def use_fitting_rows(calibration: Calibration) -> None:
    """Before a measurement that precedes the choice of the micro-batch: until then the loader has the largest size,
    which may need more memory than there is. Measures in the session's present precision; raises NothingFits."""
    if calibration.session.settings.micro_batch is None:
        calibration.session.loader.batches.micro_batch = _fitting_rows(calibration)["value"]


def _fitting_rows(calibration: Calibration) -> Record:
    session, job = calibration.session, calibration.session.job
    total = int(job.planned("global_batch_size"))
    settings = {
        "global_batch_size": total, "workers": session.workers.world_size, "precision": session.precision,
        "fp32_layers": list(session.settings.fp32_layers),
    }  # fmt: skip

    def measure() -> Record:
        unlimited = session.device.type == "cpu" and job.cluster.memory_limit is None
        small = job.plan.model_facts is None and parameters_of(session.trainable.module) < TINY_PARAMETERS
        if unlimited and small:
            reason = f"one worker's share of {total}: the model has fewer than {TINY_PARAMETERS:,} parameters"
            whole = _record(Resolved(possible_sizes(session)[-1], reason))
            return {**whole, "peak_bytes": None, "budget_bytes": None}
        calibration.begin("memory")
        return measure_micro_batch(calibration.probe, settings)[1]

    return calibration.settle("micro_batch", measure, settings=settings)


# -- compilation ----------------------------------------------------------------------------------


def settle_compile(calibration: Calibration, *, done: int = 0) -> None:
    """Whether the model is compiled; needs a prepared session with its micro-batch. `done`: steps of the checkpoint to
    resume from."""
    if not calibration.is_open("compile"):
        return
    session = calibration.session
    most = session.limits().max_steps
    settings = [most, session.workers.world_size, session.precision]
    record = calibration.settle("compile", partial(_measured_compile, calibration, most - done), settings=settings)
    calibration.use(compiled=record["value"] != "off")
    calibration.show("compile", "compile", record["value"] if record["trials"] else "", record)


def _measured_compile(calibration: Calibration, steps: int) -> Record:
    """Time eager passes; where the rest of the run may pay for a compilation, compile, and time both in turn."""
    session = calibration.session
    if steps < FEW_STEPS:
        return _off(too_few(steps))
    (eager,), share = calibration.probe.passes_in_turn([lambda: None], rounds=EAGER_ROUNDS)
    if eager.error:
        return _off(f"a pass failed: {eager.error}")
    step_s = share * min(eager.round_s)  # other work on the machine makes a short run look long
    if steps * step_s * (1 - 1 / USUAL_RATIO) < USUAL_COMPILATION_S:
        left = f"{counted(steps, 'step')} of {seconds_text(step_s)}"
        return _off(f"{left} are too short for a compilation to pay, which takes about {USUAL_COMPILATION_S:.0f} s")
    calibration.begin("compilation")
    try:
        calibration.use(compiled=True)
    except InputError as error:
        return _off(str(error))
    parts = session.switches.compiled
    if parts is None:
        return _off("a worker's machine cannot compile, as its event says")
    ways = [partial(setattr, parts, "on", way) for way in (False, True)]
    (eager, compiled), share = calibration.probe.passes_in_turn(ways, rounds=COMPILE_ROUNDS)
    parts.on = True
    status = parts.status()
    trials = {"eager": [*eager.round_s], "compiled": [*compiled.round_s], "compilation": status}
    text = "; ".join([f"{status['achieved']} compiled", *status["reasons"][:1]])
    failed = eager.error or compiled.error
    if not failed and compiled.weight_unknown > eager.weight_unknown:
        failed = "they hide what the loss is a mean over"
    if failed:
        return _off(f"compiled passes cannot be used: {failed} ({text})", trials)
    faster, how = faster_beyond_noise(compiled.round_s, eager.round_s, than="eager ones")
    reason = f"compiled passes measured {how} ({text})"
    if faster:  # what the compilation took is spent either way
        saved = seconds_text(steps * share * (median(eager.round_s) - median(compiled.round_s)))
        reason += f": {saved} less in the steps to come; compiling took {seconds_text(status['seconds'])}"
    return _record(Resolved("default" if faster else "off", reason), trials)


def measure_eager_step(calibration: Calibration) -> None:
    """Time the step of a prepared session with its parts as they were written, once in a run: the event `eager_step`
    has the `seconds` of the slowest worker, without reading data. Changes nothing. Nothing is measured where nothing is
    compiled, under fsdp (which measures nothing), and where a pass fails."""
    session = calibration.session
    compiled = session.switches.compiled
    if compiled is None or session.job.planned("strategy") == "fsdp" or calibration.recorded(EAGER_STEP) is not None:
        return
    calibration.begin("a step without compilation")
    micro = session.loader.batches.micro_batch
    with compiled.eager():
        candidate = Candidate(session.precision or "fp32", micro)
        found = calibration.probe.measure(candidate, budget=None, passes=EAGER_PASSES, with_memory=False)
    if found.outcome == "ok" and calibration.speaks:
        rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
        record = {"seconds": found.step_s(rows), "micro_batch": micro, "passes": len(found.pass_s)}
        calibration.write(EAGER_STEP, record)
        calibration.reporter.event(EAGER_STEP, **record)


# -- shares ---------------------------------------------------------------------------------------


def settle_shares(calibration: Calibration) -> None:
    """Each worker's share of a batch; needs a prepared session with its micro-batch. An attempt whose ranks are on the
    same machines uses the shares that the first one measured, and so sums in its order."""
    if not calibration.is_open("shares"):
        return
    session = calibration.session
    places = session.workers.all_gather_object(f"{socket.gethostname()} {device_name(session.device)}")
    settings = {"places": places, "micro_batch_size": session.loader.batches.micro_batch}

    def measure() -> Record:
        chosen, pass_s = measure_shares(session)
        return _record(chosen, {"pass_s": pass_s})

    record = calibration.settle("shares", measure, settings=settings)
    calibration.use(shares=shares_of(record["value"]))
    calibration.show("shares", "shares", "" if record["value"] == "equal" else "unequal", record)


def choose_shares(pass_s: Sequence[float], *, total: int, micro_batch: int) -> Resolved:
    """The shares of a global batch of `total` rows for workers with these seconds for a pass, by rank. Returns
    `Shares.to_json()`, or "equal" where unequal shares would save less than `WORTHWHILE_SHARES`."""
    seconds = tuple(pass_s)
    chosen = Shares(micro_batch, (micro_batch,) * len(seconds), seconds)
    gain = gain_over_equal(chosen, total=total, plain_s=seconds)
    ratio_text = f"the slowest worker needs {max(seconds) / min(seconds):.2f} times as long for a row as the fastest"
    if gain < 1 + WORTHWHILE_SHARES:
        saved = max(0.0, 1 - 1 / gain)
        return Resolved("equal", f"{ratio_text}: unequal shares of {total} rows would save {saved:.0%}")
    rows = [len(span) for span in chosen.spans(total, micro_batch=micro_batch)]
    each = f"ranks 0-{len(rows) - 1}: {', '.join(map(str, rows))} rows"
    return Resolved(chosen.to_json(), f"{ratio_text}; {each}: {gain:.2f} times as fast as equal shares")


def measure_shares(session: Session) -> tuple[Resolved, list[float]]:
    """Shares by measured speed, from the first rows of the epoch, and each worker's seconds for a pass; the same on
    every worker. Changes nothing that it measures. Collective.

    All workers compute the same rows at the same time, without waiting for each other between passes: one that shares
    its processor is measured as it will be in training. Their speed is the mean, total time divided by passes: on a
    processor that is available only part of the time a median would show just one of its two speeds.
    """
    batches, workers, device = session.loader.batches, session.workers, session.device
    rows = batches.split.order(batches.seed, session.state.cursor.epoch)[: batches.micro_batch]
    micro = session.loader.one(rows)

    def one_pass() -> float:
        began, weight = seconds_of(device), max(1, micro.weight)
        session.step.backward([MicroBatch(micro.batch, weight)], global_weight=weight)
        return seconds_of(device) - began

    with preserve_model(session.trainable, device):
        one_pass()  # kernels and the allocator first
        span = max(SHARES_S, SHARE_PASSES * max(row[0] for row in workers.all_gather_floats([one_pass()])))
        began, passes = time.perf_counter(), 0
        while passes == 0 or time.perf_counter() - began < span:
            one_pass()
            passes += 1
        seconds = (time.perf_counter() - began) / passes
    pass_s = [row[0] for row in workers.all_gather_floats([seconds])]
    return choose_shares(pass_s, total=batches.global_batch_size, micro_batch=batches.micro_batch), pass_s
