"""Findings about time: what a step waits for, whether compilation pays, and what limits the run.

A `Finding` is one diagnosis with its evidence and its remedy.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.wording import seconds
from raytrain.config.messages import abbreviated, advice
from raytrain.report.figures import compile_gain, outcome, time_account
from raytrain.report.records import Row, RunRecords, number, percentile

Severity = Literal["error", "warning", "info", "good"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info", "good")


@dataclass(frozen=True)
class Finding:
    """One diagnosis: its title, the numbers that show it, and what to do about it ("" if nothing): a sentence, which
    introduces the options, if there are some, the best first."""

    severity: Severity
    title: str
    evidence: str
    remedy: str = ""
    options: tuple[str, ...] = ()


#: A step waits for data this much of its time: without the wait the run would be 1 / (1 - 0.15) = 18 % faster.
#: Prefetching normally hides all of it, so that a healthy run is below 0.05.
DATA_SHARE = 0.15
#: Of the sum of gradients one expects some: 0.25 is where another layout or larger batches pay (33 % faster at most).
WAIT_SHARE = 0.25
#: One worker needs this much longer than the median of all. Everybody waits for it: at 1.25, for 20 % of a step.
STRAGGLER_RATIO = 1.25
#: The same worker is the slowest in this share of the rows; by chance, of two workers and five rows, it is so in 6 %.
STRAGGLER_ROWS, LEAST_ROWS = 0.8, 5
#: Part of the slow worker's time that is spent on its data, for the data to be the cause.
OWN_DATA = 0.5

#: Utilisation, in percent, from which a GPU counts as used.
UTILISED = 80.0
#: Launching the kernels of a step takes a few milliseconds: shorter ones cannot keep a GPU busy.
SHORT_STEP_S = 0.02


def step_limits(records: RunRecords) -> list[Finding]:
    """Input-bound, a straggling worker, or bound by the exchange between workers."""
    rows = [row for row in records.train[len(records.train) // 2 :] if number(row.get("step_time_s"))]
    step = percentile([_of(row, "step_time_s") for row in rows], 0.5) or 0.0
    found = straggler(rows)
    data = share(rows, "data_time_s")
    if data is not None and data > DATA_SHARE and not found:
        evidence = f"{data:.0%} of a step of {seconds(step)} is spent waiting for data"
        found.append(_transfer_bound(records, rows, data, evidence) or _input_bound(records, rows, data, evidence))
    waiting = share(rows, "wait_time_s")
    if waiting is not None and waiting > WAIT_SHARE and not found:
        evidence = f"{waiting:.0%} of a step of {seconds(step)} is spent waiting for other processes, and no worker is "
        evidence += "slower than the others"
        hosts = percentile([_of(row, "transport_s") for row in rows], 0.5) or 0.0
        evidence += f"; {seconds(hosts)} of it in the exchange with the experts" if hosts else ""
        remedy = advice(
            ("raise loop.global_batch_size", False),
            ("set experts.hosts: 0, which replicates the experts", not hosts),
            ("set scale.overlap: true", bool(records.planned("overlap"))),
            ("use fewer workers", records.planned("workers") == 1),
            ("choose a faster cluster.interface", False),
        )
        found.append(Finding("warning", "Sync-bound: steps wait for other workers", evidence, remedy))
    return found


def share(rows: Sequence[Row], key: str) -> float | None:
    """The median fraction of a step that a column takes; None under three rows."""
    parts = [number(row.get(key)) / number(row["step_time_s"]) for row in rows if number(row.get(key)) is not None]  # type: ignore[operator]
    return percentile(parts, 0.5) if len(parts) >= 3 else None


def straggler(rows: Sequence[Row]) -> list[Finding]:
    """One worker that is slower than the others in nearly every row."""
    known = [row for row in rows if number(row.get("work_time_s_median"))]
    if len(known) < LEAST_ROWS:
        return []
    (rank, times), *_ = Counter(int(number(row.get("slowest_rank")) or 0) for row in known).most_common(1)
    ratios = [_of(row, "work_time_s_max") / _of(row, "work_time_s_median") for row in known]
    ratio = statistics.median(ratios)
    if times < STRAGGLER_ROWS * len(known) or ratio < STRAGGLER_RATIO:
        return []
    own = [row for row in known if row.get("slowest_rank") == rank]
    work, typical = (statistics.median(_of(row, f"work_time_s_{key}") for row in own) for key in ("max", "median"))
    data = statistics.median(_of(row, "slowest_data_time_s") for row in own)
    evidence = (
        f"rank {rank} works {seconds(work)} of each step, {ratio:.2f} times the median of all workers "
        f"({seconds(typical)}), and is the slowest in {times} of {len(known)} rows"
    )
    if data > OWN_DATA * (work - typical):
        evidence += f"; {seconds(data)} of it are spent on its data"
        remedy = "Raise data.loader_workers, or make its part of the data as quick to read as that of the others."
    else:
        remedy = (
            "See what else runs on its node (telemetry of the report) and whether its device is slowed down; where the "
            "device is slower, scale.shares: auto gives it fewer rows."
        )
    return [Finding("warning", f"Rank {rank} holds the others up", evidence, remedy)]


def _of(row: Row, key: str) -> float:
    return number(row.get(key)) or 0.0


def _transfer_bound(records: RunRecords, rows: Sequence[Row], part: float, evidence: str) -> Finding | None:
    """The wait for data, where it is for copies to a GPU: most of them block, and the process itself hardly computes.

    A copy that blocks also waits for the kernels that were queued before it, so that none can be queued meanwhile.
    """
    copies = records.of_kind("transfers")
    if not copies or copies[-1].get("device") == "cpu":
        return None
    last = copies[-1]
    tensors, blocking = _of(last, "tensors"), _of(last, "pageable") + _of(last, "other_device")
    cpu = percentile([_of(row, "data_cpu_share") for row in rows], 0.5) or 0.0
    if blocking <= tensors / 2 or cpu > part / 2:
        return None
    evidence += f"; the host waited for {blocking:,.0f} of {tensors:,.0f} copied tensors "
    evidence += f"({_of(last, 'bytes') / 1e6:,.1f} MB in all)"
    ahead = records.planned("storage") in ("resident", "pinned")
    remedy = advice(
        ("set data.storage: resident if the split fits, or pinned, whose copies do not block", ahead),
        ("return tensors on the CPU from the dataset", not _of(last, "other_device")),
    )
    return Finding("warning", "Transfer-bound: steps wait for copies to the GPU", evidence, remedy)


def _input_bound(records: RunRecords, rows: Sequence[Row], part: float, evidence: str) -> Finding:
    cpu = percentile([_of(row, "data_cpu_share") for row in rows], 0.5) or 0.0
    inside = records.configured("data.loader_workers") in (0, "auto") and cpu > part / 2
    evidence += f", of which the training process itself computes {cpu / part:.0%}" if cpu > 0.01 else ""
    remedy = advice(
        ("set data.storage: resident if the split fits", records.planned("storage") == "resident"),
        ("raise data.loader_workers" if inside else "raise data.loader_workers and data.prefetch", False),
        ("make samples cheaper to read", False),
    )
    return Finding("warning", "Input-bound: steps wait for data", evidence, remedy)


def utilisation(records: RunRecords) -> list[Finding]:
    """GPUs that computed in less than `UTILISED` of the second half of the run; no judgement of a small model, whose
    steps are too short to fill a device."""
    seen: dict[str, list[float]] = {}
    for row in records.telemetry[len(records.telemetry) // 2 :]:
        for device in row["devices"]:
            used = number(device.get("utilisation"))
            if device.get("kind") not in (None, "cpu") and used is not None and number(device.get("memory_run")):
                seen.setdefault(f"{device.get('device')} of {row.get('node')}", []).append(used)
    shares = {name: statistics.median(values) for name, values in seen.items() if len(values) >= LEAST_ROWS}
    if not shares:
        return []
    text = ", ".join(f"{name} {used:.0f} %" for name, used in sorted(shares.items(), key=lambda one: one[1])[:4])
    if min(shares.values()) >= UTILISED:
        return [Finding("good", "The GPUs are used", f"median utilisation: {text}")]
    step = percentile([_of(row, "step_time_s") for row in records.train], 0.5) or 0.0
    evidence = f"median utilisation: {text}, with steps of {seconds(step)}"
    title = "Steps are too short to fill a GPU" if step < SHORT_STEP_S else "The GPUs are not fully used"
    remedy = advice(
        ("raise loop.micro_batch_size", records.planned("accumulation") == 1),
        ("raise loop.global_batch_size", records.planned("accumulation") not in (None, 1)),
        ("set loop.compile: reduce-overhead", records.configured("loop.compile") == "reduce-overhead"),
        ("see what the time account says of data and communication", False),
    )
    return [Finding("info", title, evidence, remedy)]


SAVE_BUDGET = 0.03
#: Of phases that every run has once: a third of the time is worth a word.
LONG_PHASE = 1 / 3
#: In a run as short as this, the start takes much of the time, and one fault loses much of the work.
SHORT_RUN_S = 600.0
#: The last batch of an epoch, an evaluation and their last batch have shapes of their own: so many are usual, for each
#: piece of code between two breaks of a graph.
USUAL_RECOMPILES = 4
LONGER = "A longer run spreads it over more steps."
LIMITS = {
    "eval": (0.25, "Evaluation takes much of the time",
             "Raise loop.eval_every or evaluate fewer rows with loop.eval_batches."),
    "save": (SAVE_BUDGET, "Checkpoints cost more than their budget of 3 %",
             "Set save.every: auto or a larger number, and save.asynchronous: true."),
    "export": (LONG_PHASE, "Writing the weights and a sample takes much of the time",
               f"{LONGER} See also how fast the disk of save.dir is."),
    "startup": (LONG_PHASE, "Start-up takes much of the time", LONGER),
    "compile": (0.25, "Compilation takes much of the time", "Set loop.compile: off for runs this short."),
    "restart": (0.1, "Restarts take much of the time",
                "The timeline has the faults; each costs a start of the workers, after a hang of up to retry.hang_s."),
    "lost": (0.1, "Work was lost between a checkpoint and a fault", "Save more often: save.every: N."),
}  # fmt: skip
"""Part of the wall time -> the share above which it is worth a word, the finding, and what to do."""


def limiting_part(records: RunRecords) -> list[Finding]:
    """The part of the wall time that limits the run."""
    account = dict(time_account(records))
    wall = sum(account.values())
    if wall <= 0 or not records.train:
        return []
    failed, found = outcome(records).status == "failed", []
    for part, (limit, title, remedy) in LIMITS.items():
        if failed and part in ("restart", "lost"):  # they are of the fault that the run failed with
            continue
        if part == "compile" and compile_gain(records) is not None:  # the rule `compilation` says more
            continue
        spent = account.get(part, 0.0)
        if spent > limit * wall:
            small = wall < SHORT_RUN_S and part in ("startup", "lost")
            seen = f"{spent / wall:.0%} of {seconds(wall)} ({seconds(spent)})"
            found.append(Finding("info" if small else "warning", title, seen, remedy))
    busy = account.get("compute", 0.0) / wall
    if busy >= 0.5:
        compared = records.configured("precision.dtype") != "fp32"
        tuned = records.configured("loop.micro_batch_size") not in (None, "auto")
        remedy = advice(
            ("set precision.dtype: auto, which compares bf16 with fp32 on this model", compared),
            ("let `raytrain tune` find the batch size that computes the most rows per second", tuned),
        )
        found.append(Finding("good", "Limited by compute", f"{busy:.0%} of {seconds(wall)} is computation", remedy))
    return found


def compilation(records: RunRecords) -> list[Finding]:
    """Whether compiled steps are faster, by which step they make up for the compilation, and code that is compiled
    again for each new shape of its input."""
    rows, found, gain = records.of_kind("compile"), [], compile_gain(records)
    if gain is not None:  # a run that has measured an eager step
        wall = sum(spent for _, spent in time_account(records))
        both = f"compiled {seconds(gain.compiled_s)}, eager {seconds(gain.eager_s)} a step: {gain.ratio:.2f} times"
        seen = f"{both}; compilation took {seconds(gain.compiler_s)} of {seconds(wall)}"
        pays = gain.break_even
        if pays is None:
            title = "Compiled is slower" if gain.verdict == "slower" else "Compilation gains nothing"
            found.append(Finding("warning", title, seen, "Set loop.compile: off."))
        elif pays > gain.steps:
            remedy = f"Set loop.compile: off for runs shorter than {pays:,} steps."
            seen += f"; it pays after step {pays:,}, this run has {gain.steps:,}"
            found.append(Finding("warning", "Compilation did not pay", seen, remedy))
        else:
            found.append(Finding("good", "Compilation pays", f"{seen}; it pays after step {pays:,} of {gain.steps:,}"))
    last = rows[-1] if rows else {}
    times = int(number(last.get("recompiles")) or 0)
    if times > USUAL_RECOMPILES * max(1, int(number(last.get("graphs")) or 0) - times):
        parts = [str(part.get("name")) for part in last.get("parts") or [] if number(part.get("recompiles"))]
        seen = f"{times} times, {seconds(number(last.get('seconds')))} of compilation in all"
        seen += f": {abbreviated(parts, 4)}" if parts else ""
        remedy = advice(
            ("give all batches one shape (model.context, data.collate)", False),
            ("compile only parts with fixed shapes (loop.compile_parts)", False),
            ("set loop.compile: off", False),
        )
        found.append(Finding("warning", "Compiled code was compiled again and again", seen, remedy))
    return found
