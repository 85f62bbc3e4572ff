"""What became of torch.compile in a run: from its last `compile` event."""

from __future__ import annotations

from typing import Any

from raytrain.readers.reading import RunRecords

FIGURES = ("achieved", "seconds", "graphs", "graph_breaks", "recompiles", "reasons")


def compile_figures(records: RunRecords) -> dict[str, Any]:
    """`compile_achieved`, `compile_seconds` (time.compile leaves out those of probes before the first step), graphs,
    graph breaks, recompiles, why something runs eager, and each part's status; nothing where nobody asked for it."""
    rows = records.of_kind("compile")
    if not rows:
        return {}
    last = rows[-1]
    figures = {f"compile_{name}": last.get(name) for name in FIGURES}
    figures["compile_reasons"] = "; ".join(map(str, last.get("reasons") or [])) or None
    parts = last.get("parts")
    listed = parts if isinstance(parts, list) else []
    return {**figures, "compile_parts": {str(part.get("name")): part.get("achieved") for part in listed}}
