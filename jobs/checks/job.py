"""The checks of a job that was named: its own model trains some steps on its own data, on one device.

They answer with measured numbers what people ask before a first run: whether the data trains at all, whether mixed
precision pays here, how much memory a step takes, and how much of a step its data takes. `raytrain tune` searches what
is measured here once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.checks.preflight import CheckResult
from cluster.telemetry.warnings import HIGH
from cluster.wording import plain_number, seconds, size
from jobs.job.spec import JobSpec, LoadedSpec, load_spec

if TYPE_CHECKING:
    from cluster.devices.inventory import Inventory
    from raytrain.train.job import TrainJob

STEPS = 12
"""Steps of each training; fewer where a step is slow."""
ALONE = (
    "scale.workers=1", "scale.strategy=auto", "experts.hosts=0", "experts.replicas=0", "precision.fp32_layers=[]",
    "loop.compile=off", "loop.epochs=null", f"loop.max_steps={STEPS}", "loop.log_every=1", "tune.space=null",
    "telemetry.tensorboard=false",
)  # fmt: skip
"""One worker trains, with nothing left to measure at the start."""
NEAR, ALIKE = 0.05, 0.05
"""A difference of times up to this is noise; the losses of a format that is right differ from those of fp32 by less."""


@dataclass(frozen=True)
class Arm:
    """One training of the job: its format, its rows of a step, and processes that read."""

    precision: str
    rows: int
    loaders: int


class NamedJob:
    """A job that was named, opened and built on the driver before Ray starts.

    Raises:
        InputError: the job, its data or its model is wrong.
    """

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        from jobs.driver.checks.job import check_on_driver  # imports torch
        from jobs.job.paths import resolved

        self._path, self._overrides = path, tuple(overrides)
        self.spec: JobSpec = load_spec(path, self._overrides).spec
        self.checked = check_on_driver(resolved(self.spec))

    def arms(self, formats: Sequence[str]) -> list[Arm]:
        """What to train; half the rows come first, since the peak of a process on a CPU only rises."""
        loop, loaders = self.spec.loop, self.spec.data.loader_workers
        rows = next((one for one in (loop.micro_batch_size, loop.global_batch_size) if isinstance(one, int)), 16)
        rows = max(1, min(rows, self.checked.data_facts.train_rows or rows))
        given = loaders if isinstance(loaders, int) else 0
        found = [Arm("fp32", rows // 2, given)] if rows > 1 else []
        found += [Arm(name, rows, given) for name in dict.fromkeys(("fp32", *formats, "bf16"))]
        if self.checked.data_facts.kind == "items":  # rows that are read one by one, which further processes can do
            found += [Arm("fp32", rows, count) for count in (0, 1, 2, 4) if count != given]
        return found

    def job(self, arm: Arm, inventory: Inventory) -> tuple[TrainJob, Any]:
        """The workers' job of an arm, and the data to send to them."""
        from jobs.driver.checks.job import train_job
        from jobs.driver.plan import plan_job
        from jobs.job.paths import resolved
        from raytrain.runs.folder import RunFolder

        keys = (f"precision.dtype={arm.precision}", f"loop.global_batch_size={arm.rows}",
                f"loop.micro_batch_size={arm.rows}", f"data.loader_workers={arm.loaders}")  # fmt: skip
        mode = () if self.spec.scale.mode != "multi_gpu" else ("scale.mode=single_gpu",)
        loaded: LoadedSpec = load_spec(self._path, [*self._overrides, *ALONE, *mode, *keys])
        facts: dict[str, Any] = {"model_facts": self.checked.model_facts, "data_facts": self.checked.data_facts}
        plan = plan_job(loaded, inventory=inventory, **facts)
        run = RunFolder(f"{loaded.spec.save.dir}/{loaded.spec.name}")  # only named, never written
        return train_job(resolved(loaded.spec), plan, run, attempt=1), self.checked.handed


def check_job(
    arms: Sequence[Arm], found: Sequence[Mapping[str, Any]], spec: JobSpec, *, source: str, rows: int
) -> list[CheckResult]:
    """A result for each of the four questions.

    Args:
        found: the worker's row of each arm.
        spec: the job as it was given.
        source, rows: what the data is, and its training rows.
    """
    most = max(arm.rows for arm in arms)
    whole = [(arm, row) for arm, row in zip(arms, found, strict=True) if arm.rows == most]
    first, row = whole[0]  # in fp32, with the loaders of the job
    fewer = next((other for arm, other in zip(arms, found, strict=True) if arm.rows < most), None)
    return [
        _data(row, source, rows),
        _precision({arm.precision: one for arm, one in whole if arm.loaders == first.loaders}, spec),
        _memory(row, fewer),
        _loaders({arm.loaders: one for arm, one in whole if arm.precision == "fp32"}, first.loaders),
    ]


def _data(row: Mapping[str, Any], source: str, rows: int) -> CheckResult:
    losses, expected = row["losses"], "finite losses and other weights"
    seen = f"{rows:,} rows of {source}; {len(losses)} steps of {row['rows']} rows in fp32: losses "
    seen += f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "none"
    if losses and all(map(math.isfinite, losses)) and row["moved"]:
        return CheckResult("job data", "ok", seen, expected)
    return CheckResult("job data", "fail", seen, expected, "look at the rows, and at optim.lr")


def _precision(found: Mapping[str, Mapping[str, Any]], spec: JobSpec) -> CheckResult:
    """Which format is fastest, of those that train about the same losses."""
    base, parts, right = found["fp32"], [], {}
    for name, row in found.items():
        same = len(row["losses"]) == len(base["losses"]) and all(
            abs(loss - other) <= ALIKE * abs(other) for loss, other in zip(row["losses"], base["losses"], strict=True)
        )
        parts.append(f"{name} {seconds(row['step_s'])}")
        if name != "fp32":
            alike = "with the losses of fp32" if same else "but with other losses than fp32"
            parts[-1] += f", {base['step_s'] / row['step_s']:.2f} times as fast, {alike}"
        right |= {name: row["step_s"]} if same else {}
    fastest = min(right, key=lambda name: right[name], default="fp32")
    best = fastest if fastest in right and right[fastest] < (1 - NEAR) * base["step_s"] else "fp32"
    seen, expected = (
        f"a step of {base['rows']} rows: {'; '.join(parts)}; best {best}",
        "the fastest format that is right",
    )
    asked = spec.precision.dtype
    if asked in found and asked != best and (asked not in right or right[asked] > (1 + NEAR) * right[best]):
        why = "faster" if asked in right else "trains like fp32"
        remedy = f"{why} here: precision.dtype={best}"
        return CheckResult("job precision", "warn", seen, expected, remedy, "precision.dtype")
    return CheckResult("job precision", "ok", seen, expected)


def _memory(row: Mapping[str, Any], fewer: Mapping[str, Any] | None) -> CheckResult:
    """The peak of a step, what a worker may use, and how many rows fit by the line through two sizes."""
    peak, budget, asked = row["peak_bytes"], row["budget"], row["asked"]
    expected = f"at most {HIGH:.0%} of what a worker may use"
    seen = f"a peak of {size(peak)} of {size(budget)} that a worker may use, with {row['rows']} rows in fp32"
    if row["rows"] < asked:
        remedy = f"set loop.micro_batch_size={row['rows']}, or leave it auto"
        return CheckResult("job memory", "warn", f"{asked} rows need more than fits; {seen}", expected, remedy)
    rows = 0.0 if fewer is None else row["rows"] - fewer["rows"]
    each = (peak - fewer["peak_bytes"]) / rows if fewer is not None and rows else 0.0
    if each > 0 and budget and budget > peak:
        more = int((HIGH * budget - peak) / each)
        seen += f"; {size(each)} a row: about {plain_number(row['rows'] + max(0, more))} rows would fit"
    full = bool(budget) and peak > HIGH * budget
    remedy = "set loop.micro_batch_size lower, or loop.activation_checkpointing" if full else ""
    return CheckResult("job memory", "warn" if full else "ok", seen, expected, remedy)


def _loaders(found: Mapping[int, Mapping[str, Any]], given: int) -> CheckResult:
    """How much of a step its data takes, with each number of processes that was tried."""
    expected = "reading holds no step up"
    steps = {count: row["step_s"] for count, row in sorted(found.items())}
    parts = [f"{count}: {seconds(step)} a step" for count, step in steps.items()]
    share = found[given]["data_s"] / found[given]["step_s"] if found[given]["step_s"] else 0.0
    seen = f"data.loader_workers={given} waits {share:.1%} of a step for its rows"
    if len(found) == 1:
        return CheckResult("job loaders", "ok", seen, expected)
    best = min(steps, key=lambda count: (steps[count] > (1 + NEAR) * min(steps.values()), count))
    seen += f"; best data.loader_workers={best} ({', '.join(parts)})"
    if steps[given] > (1 + NEAR) * steps[best] and best != given:
        remedy = f"set data.loader_workers={best}, or auto"
        return CheckResult("job loaders", "warn", seen, expected, remedy, "data.loader_workers")
    return CheckResult("job loaders", "ok", seen, expected)


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the logged rows of a training say: medians without the first two steps, and the highest peak."""
    later = rows[2:] or rows
    return {
        "step_s": statistics.median([row["step_time_s"] for row in later]) if later else math.nan,
        "data_s": statistics.median([row["data_time_s"] for row in later]) if later else math.nan,
        "peak_bytes": max((row["peak_memory_bytes"] for row in rows), default=0),
    }
