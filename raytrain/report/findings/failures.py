"""Findings about failures: why a run failed, restarts, fall-backs."""

from __future__ import annotations

import re

from raytrain.report.figures import (
    cause_of,
    failure_reason,
    outcome,
)
from raytrain.report.findings.finding import Finding
from raytrain.report.records import (
    Row,
    RunRecords,
    first_text,
    number,
)


def failure(records: RunRecords) -> list[Finding]:
    """The reason of a failed run, with the remedy of a kind of failure that is known."""
    state = outcome(records)
    if state.status == "lost":
        remedy = "`raytrain train --resume RUN` goes on from the newest good checkpoint."
        return [Finding("warning", "The run has no result", state.sentence, remedy)]
    if state.status != "failed":
        return []
    rows = records.of_kind("failure", "fault")[-1:]
    said = " ".join([failure_reason(records), *(cause_of(row) for row in rows)]).lower()
    known = next((mend for words, mend in _REMEDIES.items() if re.search(words, said)), "")
    evidence = failure_reason(records) or "No cause is on record; the end of logs/ may tell."
    told = next((first_text(row, "remedy") for row in rows), "")
    return [Finding("error", "The run failed", evidence, told or known)]


_REMEDIES = {
    r"out ?of ?memory": "Lower loop.micro_batch_size: accumulation keeps the update the same.",
    r"no space|disk full|enospc": "Free space under save.dir, or lower save.keep.",
    r"\bnans?\b|non-?finite": "Look for NaNs in the data, lower optim.lr, or set precision.dtype: fp32.",
    r"checkpoint": "An older checkpoint may be whole: `--resume` falls back to it by itself.",
    r"deviceplacement": "Create tensors on the device of the batch inside forward.",
}


def restarts(records: RunRecords) -> list[Finding]:
    """Attempts after the first, with the faults that ended the ones before."""
    attempts = records.of_kind("attempt")
    if len(attempts) < 2:
        return []
    causes = [first_text(row, "cause") for row in attempts[1:]]
    decisive: dict[str, Row] = {}
    for row in records.of_kind("failure", "fault", "restart"):  # a death explains the errors around it
        known = decisive.setdefault(str(row.get("attempt")), row)
        if row.get("error") == "WorkerDied" != known.get("error"):
            decisive[str(row.get("attempt"))] = row
    causes += [cause_of(row) for row in decisive.values()]
    told = "; ".join(dict.fromkeys(cause for cause in causes if cause)) or "no cause on record"
    starts = ", ".join(f"{int(number(row.get('from_step')) or 0):,}" for row in attempts[1:])
    failed = f"; {len(decisive)} of those before had failed" if 0 < len(decisive) < len(attempts) - 1 else ""
    return [Finding("info", f"{len(attempts)} attempts", f"went on from step {starts}{failed}: {told}")]


def fall_backs(records: RunRecords) -> list[Finding]:
    """Choices that were changed for a lesser one: precision during the run, anything else in the plan."""
    rows = [
        row
        for row in records.of_kind("decision", "fallback")
        if row["kind"] == "fallback" or row.get("value") == "raise_precision" or row.get("what") == "rollback"
    ]
    found = [Finding("warning", "Fell back during the run", cause_of(row) or str(row.get("kind"))) for row in rows]
    return found + [Finding("info", "Noted in the plan", line) for line in records.warnings]
