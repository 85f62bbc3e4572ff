"""What an inference job did, in figures: rows and tokens per second, latencies, workers, and quality."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raytrain.infer.merge import TIMING
from raytrain.infer.output import PARTS, OutputFolder, part_name
from raytrain.infer.quality import quality_of
from raytrain.infer.units import Unit
from raytrain.infer.worker import UnitReport
from raytrain.runs.storage import join, locate

SLOWEST = 10


def summarise(
    output: OutputFolder, units: Sequence[Unit], reports: Sequence[UnitReport], *, wall_s: float, label: str | None
) -> dict[str, Any]:
    """The figures of a merged job.

    Args:
        reports: of the units that this command computed; those of an earlier one are only counted.
        wall_s: from the first unit's begin to the last one's end.
        label: the column with right answers, None if there is none.
    """
    timing = _read(join(output.path, TIMING))
    seconds, tokens = timing["seconds"].to_numpy(), timing["tokens"].to_numpy()
    rows, made = sum(report.rows for report in reports), sum(report.tokens for report in reports)
    slowest = np.argsort(-seconds, kind="stable")[:SLOWEST]
    ids = timing["id"].to_pylist()
    return {
        "rows": timing.num_rows, "computed_now": rows, "tokens": int(tokens.sum()),
        "wall_s": wall_s, "rows_per_s": rows / wall_s if wall_s else None,
        "tokens_per_s": made / wall_s if wall_s and made else None,
        "latency_s": {"p50": float(np.quantile(seconds, 0.5)), "p95": float(np.quantile(seconds, 0.95))},
        "computed_again": int(timing["again"].to_numpy(zero_copy_only=False).sum()),
        "out_of_memory": sum(report.out_of_memory for report in reports),
        "workers": _workers(reports),
        "slowest": [{"id": ids[at], "seconds": float(seconds[at])} for at in slowest.tolist()],
        "quality": None if label is None else _quality(output, units, label),
    }  # fmt: skip


def _workers(reports: Sequence[UnitReport]) -> list[dict[str, Any]]:
    by_worker: dict[str, list[UnitReport]] = defaultdict(list)
    for report in reports:
        by_worker[report.worker].append(report)
    return [
        {
            "worker": name, "units": len(own), "rows": sum(one.rows for one in own),
            "busy_s": sum(one.seconds for one in own), "load_s": own[0].load_s,
            "rows_per_s": sum(one.rows for one in own) / max(sum(one.seconds for one in own), 1e-9),
        }
        for name, own in sorted(by_worker.items())
    ]  # fmt: skip


def _quality(output: OutputFolder, units: Sequence[Unit], label: str) -> dict[str, Any]:
    from pyarrow import types

    kind = _read(join(output.path, f"{PARTS}/{part_name(units[0].number)}")).schema.field(label).type

    def pairs() -> Iterator[tuple[Any, Any]]:
        for unit in units:
            table = _read(join(output.path, f"{PARTS}/{part_name(unit.number)}"))
            yield from zip(table[label].to_pylist(), table["prediction"].to_pylist(), strict=True)

    return quality_of(pairs(), values=types.is_floating(kind))


def _read(path: str) -> Any:
    from pyarrow import parquet

    filesystem, inner = locate(path, key="infer.output")
    return parquet.read_table(inner, filesystem=filesystem)
