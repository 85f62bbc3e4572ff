"""Figures and findings about torch.compile, from the last `compile` event of a run."""

from __future__ import annotations

from typing import Any

from raytrain.report.findings.finding import Finding
from raytrain.report.records import RunRecords, number

FIGURES = ("achieved", "seconds", "graphs", "graph_breaks", "recompiles", "reasons")


def compile_figures(records: RunRecords) -> dict[str, Any]:
    """`compile_achieved`, `compile_seconds` (time.compile excludes probes before the first step), graphs, graph breaks,
    recompiles, why something runs eager, and the status of each part; empty if the run does not compile."""
    rows = records.of_kind("compile")
    if not rows:
        return {}
    last = rows[-1]
    figures = {f"compile_{name}": last.get(name) for name in FIGURES}
    figures["compile_reasons"] = "; ".join(map(str, last.get("reasons") or [])) or None
    parts = last.get("parts")
    listed = parts if isinstance(parts, list) else []
    return {**figures, "compile_parts": {str(part.get("name")): part.get("achieved") for part in listed}}


def graph_breaks(records: RunRecords) -> list[Finding]:
    """Graph breaks: how often compiled code returns to Python, and why."""
    rows = records.of_kind("compile")
    last = rows[-1] if rows else {}
    breaks = int(number(last.get("graph_breaks")) or 0)
    if not breaks:
        return []
    why = "; ".join(map(str, last.get("breaks_at") or [])) or "torch does not say why"
    seen = f"{breaks} times in {last.get('achieved', 'its parts')}: {why}"
    return [
        Finding(
            "info", "Compiled code has graph breaks", seen, "`raytrain bench compile` shows whether compiling pays."
        )
    ]
