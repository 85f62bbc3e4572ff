"""The list of all rules, and `diagnose`, which runs them.

A rule is a function `RunRecords -> list[Finding]` in the file of its subject. Each finding has its evidence and, where
there is one, a remedy; a rule whose records are missing finds nothing. To add a diagnosis, write its function and add
it to `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raytrain.report.findings.bottleneck import memory_warnings, step_limits, throttling, utilisation
from raytrain.report.findings.compile import compilation_pays, graph_breaks, recompiles
from raytrain.report.findings.experts import experts
from raytrain.report.findings.failures import failure, fall_backs, hangs, idle_devices, restarts, unusable_devices
from raytrain.report.findings.finding import SEVERITIES, Finding
from raytrain.report.findings.memory import shortages
from raytrain.report.findings.speed import data_at_start, limiting_part, step_times
from raytrain.report.findings.training import clipping, loss_trend, non_finite, overfitting
from raytrain.report.records import RunRecords

RULES: tuple[Callable[[RunRecords], list[Finding]], ...] = (
    failure,
    loss_trend,
    overfitting,
    non_finite,
    restarts,
    hangs,
    fall_backs,
    unusable_devices,
    idle_devices,
    shortages,
    memory_warnings,
    step_limits,
    throttling,
    utilisation,
    limiting_part,
    data_at_start,
    clipping,
    step_times,
    compilation_pays,
    graph_breaks,
    recompiles,
    experts,
)


def diagnose(records: RunRecords) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for rule in RULES for finding in rule(records)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The findings that ask for something, a line each and one for each option, for a terminal; where there are errors,
    these alone: the others of a failed run are on its page."""
    shown = ("error",) if any(one.severity == "error" for one in findings) else ("warning",)
    return [
        line
        for one in findings
        if one.severity in shown
        for line in (
            f"finding: {one.title}: "
            + (f"{one.evidence.removesuffix('.')}. {one.remedy}" if one.remedy else one.evidence),
            *(f"  {number}. {option}" for number, option in enumerate(one.options, 1)),
        )
    ]
