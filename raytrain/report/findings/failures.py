"""Findings about failures: why a run failed, restarts, fall-backs."""

from __future__ import annotations

import re
from collections.abc import Callable

from cluster.wording import counted
from raytrain.config.messages import abbreviated, advice
from raytrain.report.figures import (
    cause_of,
    cluster_lost,
    failure_reason,
    outcome,
    ranks_of,
)
from raytrain.report.findings.finding import Finding
from raytrain.report.findings.memory import memory_failure
from raytrain.report.findings.training import FULL_PRECISIONS
from raytrain.report.records import (
    Row,
    RunRecords,
    first_text,
    number,
)
from raytrain.runs.commands import resume_command, shell_command
from raytrain.runs.faults import CAUSES, NOT_EXPORTED, RAY_NOT_STARTED


def failure(records: RunRecords) -> list[Finding]:
    """The reason of a failed run, with a remedy for known kinds of failure."""
    state, resume = outcome(records), resume_command("train", records.path)
    if state.status == "lost":
        remedy = f"`{resume}` resumes from the latest valid checkpoint."
        return [Finding("warning", "The run has no result", state.sentence, remedy)]
    if state.status != "failed":
        return []
    rows = records.of_kind("failure", "fault")[-1:]
    text = " ".join([failure_reason(records), *(cause_of(row) for row in rows)]).lower()
    known = next((remedy(records) for pattern, remedy in _REMEDIES.items() if re.search(pattern, text)), "")
    evidence = failure_reason(records) or "No cause was recorded; see the end of the files in logs/."
    if evidence.startswith(RAY_NOT_STARTED):  # names what may be missing, memory as well, and the remedy
        return [Finding("error", "Ray did not start", evidence, f"`{resume}` starts it again.")]
    if cluster_lost(evidence):
        return [Finding("error", "Ray itself was lost", evidence, f"`{resume}` {_AFTER_LOST_CLUSTER}")]
    if (short := memory_failure(records, evidence)) is not None:
        return [short]
    recorded = next((first_text(row, "remedy") for row in rows), "")
    place = next((first_text(row, "place") for row in rows), "")
    fix = f"Correct the code at {place}; then `{resume}` continues." if place else ""
    return [Finding("error", "The run failed", evidence, recorded or known or fix)]


def _of_memory(records: RunRecords) -> str:
    """Where the run left no predictions: `findings.memory` has those."""
    tried = [row.get("micro_batch") for row in records.of_kind("fault") if row.get("out_of_memory")]
    if 1 in (records.planned("micro_batch_size"), *tried):
        return advice(
            ("set loop.activation_checkpointing: true", bool(records.configured("loop.activation_checkpointing"))),
            ("set precision.dtype: bf16", records.planned("precision") in ("bf16", "fp16")),
            ("set data.storage: stream", records.planned("storage") == "stream"),
            ("set optim.name: sgd", records.configured("optim.name") == "sgd"),
            ("use a smaller model or shorter samples", False),
        )
    return "Lower loop.micro_batch_size: gradient accumulation keeps the update the same."


def _of_space(records: RunRecords) -> str:
    return advice(("free space under save.dir", False), ("lower save.keep", records.configured("save.keep") == 1))


def _of_nonfinite(records: RunRecords) -> str:
    full = records.planned("precision") in FULL_PRECISIONS
    return advice(("look for NaNs in the data", False), ("lower optim.lr", False), ("set precision.dtype: fp32", full))


_AFTER_LOST_CLUSTER = (
    "continues from the latest valid checkpoint, on a cluster that is running. Where its processes die again, look for "
    "a machine without free memory (`dmesg`) and into Ray's logs on the head node."
)

_REMEDIES: dict[str, Callable[[RunRecords], str]] = {
    NOT_EXPORTED: lambda records: (
        f"`{shell_command('export', records.path)}` writes the weights when the cause is fixed; "
        "--to DIR writes them into another folder."
    ),
    r"out ?of ?memory": _of_memory,
    r"no space|disk full|enospc": _of_space,
    r"\bnans?\b|non-?finite|\b(not|was) finite": _of_nonfinite,
    r"another model": lambda _: "Restore the model's code and keys, or start a new run with model.init_from.",
    r"checkpoint": lambda _: "An older checkpoint may be valid: `--resume` falls back to it automatically.",
    r"deviceplacement": lambda _: "Create tensors on the device of the batch inside forward.",
}


def restarts(records: RunRecords) -> list[Finding]:
    """Attempts after the first, with the faults that ended the earlier ones."""
    attempts = records.of_kind("attempt")
    if len(attempts) < 2:
        return []
    causes = [first_text(row, "cause") for row in attempts[1:]]
    decisive: dict[str, Row] = {}
    for row in records.of_kind("failure", "fault", "restart"):  # such a loss explains the errors around it
        known = decisive.setdefault(str(row.get("attempt")), row)
        if row.get("error") in CAUSES and known.get("error") not in CAUSES:
            decisive[str(row.get("attempt"))] = row
    causes += [cause_of(row) for row in decisive.values()]
    stops = [row for row in records.of_kind("attempt_end") if row.get("outcome") == "interrupted"]
    causes = [cause.rstrip(".") for cause in causes]  # joined below, where a sentence would end with ".;"
    causes += [
        f"{cause_of(row) or 'a stop was asked for'} (step {int(number(row.get('step')) or 0):,})" for row in stops
    ]
    reasons = "; ".join(dict.fromkeys(cause for cause in causes if cause)) or "no cause was recorded"
    starts = [f"{int(number(row.get('from_step')) or 0):,}" for row in attempts[1:]]
    origin = f"step {starts[0]}" if len(starts) == 1 else f"steps {', '.join(starts[:-1])} and {starts[-1]}"
    failed = f"; {len(decisive)} of the earlier attempts failed" if 0 < len(decisive) < len(attempts) - 1 else ""
    return [Finding("info", f"{len(attempts)} attempts", f"resumed from {origin}{failed}: {reasons}")]


def fall_backs(records: RunRecords) -> list[Finding]:
    """Fall-backs: of the precision during the run, and of any choice in the plan."""
    rows = [
        row
        for row in records.of_kind("decision", "fallback")
        if row["kind"] == "fallback" or row.get("value") == "raise_precision" or row.get("what") == "rollback"
    ]
    found = [Finding("warning", "Fell back during the run", cause_of(row) or str(row.get("kind"))) for row in rows]
    return found + [Finding("info", "Noted in the plan", line) for line in records.warnings]


def idle_devices(records: RunRecords) -> list[Finding]:
    """GPUs on which neither a worker nor an expert host ran: how many were asked for, and how many ran."""
    rows = records.of_kind("attempt")
    running = number(rows[-1].get("workers")) if rows else None
    kind = records.configured("scale.accelerator")
    if running is None or records.planned("device") != "cuda" or kind not in (None, "cuda"):
        return []  # another kind was asked for, and other GPUs are not the run's
    hosts = records.planned("hosts")
    held = sum(hosts.values()) if isinstance(hosts, dict) else hosts if isinstance(hosts, int) else 0
    idle = records.gpus - int(running) - held
    if idle <= 0:
        return []
    asked = {key: records.configured(f"scale.{key}") for key in ("workers", "mode")}
    shown = ", ".join(f"scale.{key} {value}" for key, value in asked.items() if value is not None)
    ran = f"{counted(int(running), 'worker')}" + (f" and {counted(held, 'expert host')}" if held else "")
    remedy = advice(
        ("set scale.workers: auto", asked["workers"] == "auto"),
        ("set scale.mode: auto", asked["mode"] in (None, "auto")),
        ("raise loop.global_batch_size, of which each worker needs a row", False),
    )
    seen = f"{shown}: {ran} ran on {records.gpus} GPUs"
    places = [f"rank {rank} on {row.get('device')} of {row.get('node')}" for rank, row in enumerate(ranks_of(records))]
    seen += f" ({abbreviated(places, 4)})" if places else ""
    hidden = sorted({str(row["visible"]) for row in ranks_of(records) if row.get("visible") is not None})
    seen += f"; the workers see CUDA_VISIBLE_DEVICES={' and '.join(hidden)}" if hidden else ""
    chosen = isinstance(asked["workers"], int) or asked["mode"] == "single_gpu"
    title = f"{idle} of {records.gpus} GPUs did nothing"
    return [Finding("info" if chosen else "warning", title, seen, remedy)]


def unusable_devices(records: RunRecords) -> list[Finding]:
    """GPUs that existed and could not be used, unless the job asked for CPUs."""
    lines = records.unusable
    if not lines or "cpu" in (records.configured("scale.mode"), records.configured("scale.accelerator")):
        return []
    if records.planned("device") != "cpu":
        return [Finding("warning", "Some GPUs were not used", "; ".join(lines))]
    remedy = "Repair what is named, and see with `raytrain plan` that the device is cuda; scale.mode cpu is for CPUs."
    return [Finding("warning", "Trained on the CPU although there is a GPU", "; ".join(lines), remedy)]
