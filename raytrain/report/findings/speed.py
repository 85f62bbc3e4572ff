"""Findings about time: what limits the run, and step times that vary."""

from __future__ import annotations

from collections.abc import Callable

from raytrain.config.messages import advice
from raytrain.report.compilation import compile_gain
from raytrain.report.figures import outcome, seconds, step_ms, time_account
from raytrain.report.findings.bottleneck import reads_less
from raytrain.report.findings.compile import OTHER_MODES
from raytrain.report.findings.finding import Finding
from raytrain.report.records import RunRecords, number

SAVE_BUDGET = 0.03
#: Of phases that every run has once: a third of the time is worth a word.
LONG_PHASE = 1 / 3
#: Reading that takes less is no finding, whatever its share.
LEAST_READ_S = 10.0
#: Differences of this size are those of the operating system, which gives a core to another process for so long.
TIME_SLICE_MS = 10.0
#: In a run as short as this, the start takes much of the time, and one fault loses much of the work.
SHORT_RUN_S = 600.0


def _of_saving(records: RunRecords) -> str:
    return advice(
        ("set save.every: auto or a larger number", False),
        ("set save.asynchronous: true", records.configured("save.asynchronous") is not False),
    )


_LIMITS: tuple[tuple[str, float, str, Callable[[RunRecords], str]], ...] = (
    (
        "eval",
        0.25,
        "Evaluation takes much of the time",
        lambda _: "Raise loop.eval_every or evaluate fewer rows with loop.eval_batches.",
    ),
    ("save", SAVE_BUDGET, "Checkpoints cost more than their budget of 3 %", _of_saving),
    (
        "export",
        LONG_PHASE,
        "Writing the weights and a sample takes much of the time",
        lambda _: "A longer run spreads it over more steps; see how fast the disk of save.dir is.",
    ),
    ("startup", LONG_PHASE, "Start-up takes much of the time", lambda _: "A longer run spreads it over more steps."),
    (
        "compile",
        0.25,
        "Compilation takes much of the time",
        lambda _: f"Set loop.compile: off for runs this short. {OTHER_MODES}",
    ),
    (
        "restart",
        0.1,
        "Restarts take much of the time",
        lambda records: _of_restarts(records),
    ),
    ("lost", 0.1, "Work was lost between a checkpoint and a fault", lambda records: _of_lost_work(records)),
)


def _of_lost_work(records: RunRecords) -> str:
    auto = " (auto keeps them 30 s of work apart, or more)" if records.configured("save.every") == "auto" else ""
    return f"Save more often{auto}: save.every: N."


def _of_restarts(records: RunRecords) -> str:
    waited = sum(number(row.get("seconds")) or 0.0 for row in records.of_kind("hang_ended"))
    stuck = f"Of it, {waited:.0f} s were the wait for workers that hung, see retry.hang_s. " if waited else ""
    return f"{stuck}The timeline has the faults; each costs a start of the workers."


def data_at_start(records: RunRecords) -> list[Finding]:
    """Data whose rows were all read before the first step, where that took much of the time."""
    wall = sum(spent for _, spent in time_account(records))
    read = sum(number(row.get("seconds")) or 0.0 for row in records.of_kind("preparation"))
    if wall <= 0 or read <= LONG_PHASE * wall or read < LEAST_READ_S:
        return []
    seen = f"{read / wall:.0%} of {seconds(wall)} ({seconds(read)}), before the first step"
    fewer = reads_less(records) and records.planned("storage") == "resident"
    remedy = "Make samples cheaper to read; a longer run spreads it over more steps."
    if fewer:
        remedy = (
            "Set data.storage: stream and data.loader_workers: this run is shorter than an epoch, and then reads only "
            "the rows of its steps."
        )
    return [Finding("warning", "Reading the data takes much of the time", seen, remedy)]


def limiting_part(records: RunRecords) -> list[Finding]:
    """The part of the wall time that limits the run."""
    account = dict(time_account(records))
    wall = sum(account.values())
    if wall <= 0 or not records.train:
        return []
    share = {part: spent / wall for part, spent in account.items()}
    failed = outcome(records).status == "failed"
    found = []
    for part, limit, title, remedy in _LIMITS:
        if failed and part in ("restart", "lost"):  # they are of the fault that the run failed with
            continue
        if part == "compile" and compile_gain(records) is not None:  # the rule `compilation_pays` says more
            continue
        if share.get(part, 0.0) > limit:
            small = wall < SHORT_RUN_S and part in ("startup", "lost")
            seen = f"{share[part]:.0%} of {seconds(wall)} ({seconds(account[part])})"
            advised = "" if small and part == "startup" else remedy(records)
            found.append(Finding("info" if small else "warning", title, seen, advised))
    busy = share.get("compute", 0.0)
    if busy >= 0.5:
        compared = records.configured("precision.dtype") != "fp32"
        tuned = any(line.key.startswith("tune.found.") for line in records.config)
        remedy = advice(
            ("set precision.dtype: auto, which compares bf16 with fp32 on this model", compared),
            ("let `raytrain tune` find the batch size that computes the most rows per second", tuned),
        )
        found.append(Finding("good", "Limited by compute", f"{busy:.0%} of {seconds(wall)} is computation", remedy))
    return found


def step_times(records: RunRecords) -> list[Finding]:
    """Step times that vary."""
    low, high = step_ms(records)
    if len(records.train) < 20 or not low or not high or high / low < 1.5 or high - low < TIME_SLICE_MS:
        return []
    seen = f"p50 {seconds(low / 1000)}, p95 {seconds(high / 1000)} ({high / low:.1f} times)"
    remedy = "Other load, uneven samples or too many threads: see scale.threads and the telemetry."
    return [Finding("warning" if high / low >= 2 else "info", "Step times vary", seen, remedy)]
