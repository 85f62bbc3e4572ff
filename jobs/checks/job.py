"""The checks of a job that was named: its own model on its own data, on one device.

They answer with measured numbers what people ask before a first run: whether mixed precision pays here, how many
processes should read the data, how much memory a step takes, and whether the data trains at all. One worker measures in
a process of its own; `raytrain tune` searches what is measured here once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.checks.preflight import CheckResult
from cluster.telemetry.warnings import HIGH
from raytrain.autotune.batch_search import NEAR
from raytrain.autotune.loaders import LoaderRates, choose_count
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import GateReport, gate_refusal
from raytrain.errors import RunError, first_line
from raytrain.plan.text import seconds_text, size_text

if TYPE_CHECKING:
    from cluster.devices.inventory import Inventory
    from jobs.driver.checks.job import Checked
    from jobs.job.spec import JobSpec, LoadedSpec

#: Alternating rounds in which the precisions are timed, steps that each trains, and batches that are read for the time
#: of one. A slow model gets fewer: about `ENOUGH_S` seconds for each of the first two.
ROUNDS, STEPS, READS = (2, 6), (4, 20), 5
ENOUGH_S = 20.0
LIMIT_S = 600.0
#: Passes in a reading of memory: warm-up, a step of two micro-batches, and an evaluation.
READING_PASSES = 4
#: All of them are measured, whatever the job says.
OPEN = (
    "precision.dtype=auto", "precision.fp32_layers=[]", "loop.micro_batch_size=auto", "data.loader_workers=auto",
    "tune.space=null",
)  # fmt: skip


@dataclass(frozen=True)
class JobNumbers:
    """What was measured of a job.

    Attributes:
        rows: of one micro-batch of the run, and of the one that was measured: less where it did not fit.
        budget: bytes that a worker may use; None if unknown.
        memory: readings of fp32 with `measured_rows` and with half as many (one row: a single reading).
        times: each precision, in alternating rounds; those after a failed one are missing.
        gates: other precisions than fp32, trained for some steps beside it.
        read_s: seconds that one micro-batch takes to read in the training process.
        loaders: rates by the number of processes that read; None where none can.
        why_none: why `loaders` is None.
    """

    rows: int
    measured_rows: int
    budget: int | None
    memory: tuple[Measurement, ...]
    times: tuple[Measurement, ...]
    gates: tuple[GateReport, ...]
    read_s: float
    loaders: LoaderRates | None
    why_none: str

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            **vars(self),
            "memory": [one.to_json() for one in self.memory],
            "times": [one.to_json() for one in self.times],
            "gates": [one.to_json() for one in self.gates],
            "loaders": None if self.loaders is None else self.loaders.to_json(),
        }


def measure_job(loaded: LoadedSpec, checked: Checked, inventory: Inventory, *, local: bool) -> JobNumbers:
    """Measure a job in a process of Ray, on one device of the cluster.

    Args:
        loaded: the job, with `OPEN`.
        checked: what the driver found of it.
        local: the cluster is private to this command.

    Raises:
        RunError: the process died, or did not answer in time.
    """
    import ray
    import ray.exceptions
    from ray import cloudpickle

    from cluster.placement import on_this_node
    from jobs.driver.checks.job import train_job
    from jobs.tuning.batch_search import find_search
    from raytrain.runs.folder import RunFolder

    search = find_search(loaded, checked, inventory)
    run = RunFolder(os.path.join(search.alone_spec.save.dir, search.alone_spec.name))  # only named, never written
    job = train_job(search.alone_spec, search.alone_plan, run, attempt=1)
    resources = search.kinds[0].resources(on_gpu=search.on_gpu, local=local)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 1), "num_gpus": resources.pop("GPU", 0)}
    options["resources"] = resources
    if not search.on_gpu:
        options["scheduling_strategy"] = on_this_node()
    remote: Any = ray.remote  # whose annotations know no keyword arguments
    task = remote(_measured).options(max_retries=0, **options)
    asked = task.remote(
        cloudpickle.dumps(job),  # pyright: ignore[reportPrivateImportUsage]
        checked.handed,
        folder=os.getcwd(),
        precisions=_precisions(search.space.precisions),
        rows=search.space.rows_per_step or search.space.sizes[-1],
        budget=search.kinds[0].budget_bytes,
        most=search.loaders.most,
        why_none=search.loaders.reason,
    )
    try:
        return ray.get(asked, timeout=LIMIT_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(asked, force=True)
        raise RunError(f"not measured within {LIMIT_S:.0f} s") from error
    except ray.exceptions.RayTaskError as error:
        raise RunError(f"{type(error.cause).__name__}: {first_line(error.cause)}") from error
    except ray.exceptions.WorkerCrashedError as error:
        raise RunError("the process that measured was killed, as the kernel does where memory runs out") from error


def _precisions(planned: Sequence[str]) -> tuple[str, ...]:
    """The formats to compare: those of the device, and bf16 where the plan would not try it, to show what it costs."""
    return tuple(dict.fromkeys(["fp32", *planned, "bf16"]))


def _measured(
    packed: bytes, data: Any, *, folder: str, precisions: Sequence[str], rows: int, budget: int | None,
    most: int | None, why_none: str,
) -> JobNumbers:  # fmt: skip
    """In a process of Ray."""
    from ray import cloudpickle

    from raytrain.autotune.comparisons import run_gate
    from raytrain.autotune.loaders import measure_loaders
    from raytrain.autotune.step_probe import StepProbe
    from raytrain.config.user_code import import_from
    from raytrain.data.sources.open import source_from_driver
    from raytrain.train.memory.allocator import keep_freed_memory
    from raytrain.train.parallel.collectives import Workers
    from raytrain.train.session import Session

    keep_freed_memory()
    if os.path.isdir(folder):
        os.chdir(folder)
    import_from(folder)
    job: Any = cloudpickle.loads(packed)
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=Workers(), source=source)
    session.prepare("fp32")
    probe, size = StepProbe(session), rows
    began = time.perf_counter()
    reading = probe.measure(Candidate("fp32", size), budget=budget, passes=0, with_memory=True)
    while reading.outcome == "out_of_memory" and size > 1:
        size //= 2
        reading = probe.measure(Candidate("fp32", size), budget=budget, passes=0, with_memory=True)
    each_s = (time.perf_counter() - began) / READING_PASSES
    memory, times, gates = [reading], tuple[Measurement, ...](), list[GateReport]()
    if reading.outcome == "ok":
        if size > 1:
            memory.append(probe.measure(Candidate("fp32", size // 2), budget=budget, passes=0, with_memory=True))
        others = [one for one in precisions if one != "fp32"]
        steps = _within(STEPS, ENOUGH_S / (2 * len(others) * each_s))
        gates = [
            run_gate(session, Candidate(one, size), reference="fp32", steps=steps, budget=budget) for one in others
        ]
        works = ["fp32", *(one.precision for one in gates if one.error is None)]
        rounds = _within(ROUNDS, ENOUGH_S / (len(works) * each_s))
        times = probe.measure_in_turn([Candidate(one, size) for one in works], budget=None, rounds=rounds)
    loaders = None
    if most is not None and reading.outcome == "ok":
        loaders = measure_loaders(probe, Candidate("fp32", size), most=most, passes=1)
    read_s = _read_s(session, size)
    session.close()
    return JobNumbers(rows, size, budget, tuple(memory), times, tuple(gates), read_s, loaders, why_none)


def _within(bounds: tuple[int, int], wanted: float) -> int:
    return max(bounds[0], min(bounds[1], int(wanted)))


def _read_s(session: Any, size: int) -> float:
    """Seconds to read and collate one micro-batch in this process."""
    seconds = []
    for _ in range(1 + READS):
        began = time.perf_counter()
        session.loader.one(session.loader.batches.rows_from(session.state.cursor, size))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def check_job(found: JobNumbers, spec: JobSpec, *, source: str, rows: int) -> list[CheckResult]:
    """A result for each of the four questions.

    Args:
        spec: the job as it was given.
        source, rows: what the data is, and its training rows.
    """
    return [_data(found, source, rows), *_precision(found, spec), _memory(found), *_loaders(found, spec)]


def _data(found: JobNumbers, source: str, rows: int) -> CheckResult:
    reading = found.memory[0]
    expected = "a finite loss and a finite gradient"
    if reading.outcome == "out_of_memory":
        return CheckResult("job data", "fail", f"not one row of {source} fits: {reading.reason}", expected)
    seen = f"{rows:,} rows of {source}; first loss {reading.loss:.4g}, gradient norm {reading.grad_norm:.3g}"
    losses = next((one.reference_losses for one in found.gates if one.reference_losses), ())
    if losses:
        seen += f"; {len(losses)} steps of {found.measured_rows} rows in fp32: {losses[0]:.4g} to {losses[-1]:.4g}"
    if reading.outcome == "ok":
        return CheckResult("job data", "ok", seen, expected)
    return CheckResult("job data", "fail", f"{seen}; {reading.reason}", expected, "look at the rows, and at optim.lr")


def _precision(found: JobNumbers, spec: JobSpec) -> list[CheckResult]:
    """Which format is fastest, of those that compute about the same loss."""
    whole = [one for one in found.times if one.outcome == "ok" and one.pass_s]
    if not whole or whole[0].candidate.precision != "fp32":
        return []
    seconds = {one.candidate.precision: one.step_s(found.measured_rows) for one in whole}
    parts = [f"fp32 {seconds_text(seconds['fp32'])} a step of {found.measured_rows} rows"]
    right = {"fp32": seconds["fp32"]}
    gates = {one.precision: one for one in found.gates}
    for name in [one.candidate.precision for one in whole[1:]]:
        refused = gate_refusal(gates[name])
        parts.append(f"{name} {seconds_text(seconds[name])}, {seconds['fp32'] / seconds[name]:.2f} times as fast")
        parts[-1] += (
            f", but {refused}" if refused else f", with the losses of fp32 over {len(gates[name].losses)} steps"
        )
        if not refused:
            right[name] = seconds[name]
    parts += [f"{one.precision} fails: {one.error}" for one in found.gates if one.error is not None]
    best = min(right, key=lambda name: right[name])
    best = best if right[best] < (1 - NEAR) * right["fp32"] else "fp32"
    asked = spec.precision.dtype
    seen, expected = "; ".join(parts), "the fastest format, with the loss of fp32"
    slower = asked in right and right[asked] > (1 + NEAR) * right[best]
    if slower or (asked in seconds and asked not in right):
        why = "faster" if slower else "trains like fp32"
        return [CheckResult("job precision", "warn", f"{seen}; precision.dtype is {asked}", expected,
                            f"{why} here: precision.dtype={best}", "precision.dtype")]  # fmt: skip
    return [CheckResult("job precision", "ok", f"{seen}; best {best}", expected)]


def _memory(found: JobNumbers) -> CheckResult:
    """The peak of a step, what a worker may use, and how many rows fit by the line through two sizes."""
    reading, budget = found.memory[0], found.budget
    expected = f"at most {HIGH:.0%} of what a worker may use"
    of = "" if budget is None else f" of {size_text(budget)} that a worker may use"
    if found.measured_rows < found.rows or reading.peak_bytes is None:
        seen = f"{found.rows} rows need more than fits{of}"
        fits = f"{found.measured_rows} fit" if reading.peak_bytes is not None else "one does not either"
        return CheckResult("job memory", "fail" if reading.peak_bytes is None else "warn", f"{seen}; {fits}", expected,
                           f"set loop.micro_batch_size={found.measured_rows}, or leave it auto")  # fmt: skip
    seen = f"a peak of {size_text(reading.peak_bytes)}{of} with {found.rows} rows in fp32"
    per_row = _bytes_per_row(found)
    if per_row is not None and budget is not None and budget > reading.peak_bytes:
        more = int((budget - reading.peak_bytes) / per_row)
        seen += f", {size_text(per_row)} a row: about {found.rows + more:,} rows would fit"
    full = budget is not None and reading.peak_bytes > HIGH * budget
    remedy = "set loop.micro_batch_size lower, or loop.activation_checkpointing" if full else ""
    return CheckResult("job memory", "warn" if full else "ok", seen, expected, remedy)


def _bytes_per_row(found: JobNumbers) -> float | None:
    """The slope between two sizes; None where it cannot be told from the noise of small ones."""
    peaks = [(one.candidate.micro_batch_size, one.peak_bytes) for one in found.memory if one.peak_bytes is not None]
    if len(peaks) < 2:
        return None
    (rows, peak), (fewer, less) = peaks
    slope = (peak - less) / (rows - fewer)
    return slope if slope > 0 else None


def _loaders(found: JobNumbers, spec: JobSpec) -> list[CheckResult]:
    """How many processes should read, or how much reading takes of a step where none can."""
    fp32 = next((one for one in found.times if one.outcome == "ok" and one.pass_s), None)
    if fp32 is None:
        return []
    expected = "reading holds no step up"
    share = found.read_s / (found.read_s + fp32.step_s(found.measured_rows))
    if found.loaders is None:
        took = seconds_text(found.read_s)
        seen = f"reading {found.measured_rows} rows takes {took}, {share:.1%} of a step; {found.why_none}"
        return [CheckResult("job loaders", "ok", seen, expected)]
    best = choose_count(found.loaders)
    asked, rates = spec.data.loader_workers, {one.count: one.per_s for one in found.loaders.rates}
    seen = f"best data.loader_workers={best.value}: {best.reason}"
    if isinstance(asked, int) and asked in rates and rates[asked] < (1 - NEAR) * rates[best.value]:
        return [CheckResult("job loaders", "warn", f"{seen}; the job has {asked}", expected,
                            f"set data.loader_workers={best.value}, or auto", "data.loader_workers")]  # fmt: skip
    return [CheckResult("job loaders", "ok", seen, expected)]
