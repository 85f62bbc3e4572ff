"""Findings about a mixture of experts: dead experts, uneven load, dropped tokens."""

from __future__ import annotations

from raytrain.config.messages import advice
from raytrain.report.experts import loads_of, names_of
from raytrain.report.findings.finding import Finding
from raytrain.report.records import (
    RunRecords,
    percentile,
    values,
)


def experts(records: RunRecords) -> list[Finding]:
    """Dead experts, uneven load and dropped tokens of a mixture of experts."""
    late = records.train[len(records.train) // 2 :]
    load = percentile(values(late, "load_imbalance"), 0.5)
    dropped = percentile(values(late, "dropped_fraction"), 0.5)
    remedy = advice(
        ("raise experts.balance_weight", False),
        ("set experts.balance: both", records.configured("experts.balance") == "both"),
    )
    found, loads = [], loads_of(records)
    if loads is not None and (dead := loads.dead()):
        number = sum(map(len, loads.last_used))
        seen = f"{len(dead)} of {number} received no row in the last quarter of the log intervals: {names_of(dead)}"
        found.append(Finding("warning", "Experts without tokens", seen, remedy))
    if load is not None and load > 2:
        seen = f"the busiest expert has {load:.2g} times the mean load (median of the second half)"
        found.append(Finding("warning", "Experts are loaded unevenly", seen, remedy))
    if dropped is not None and dropped > 0.02:
        seen, remedy = (
            f"{dropped:.1%} of the routed tokens",
            "Raise experts.capacity_factor; null drops none.",
        )
        found.append(Finding("warning", "Tokens are dropped", seen, remedy))
    return found
