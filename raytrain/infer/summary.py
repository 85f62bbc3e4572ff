"""What an inference job did, in figures: rows and tokens per second, latencies, workers, and the quality of classes or
values where the right answers are known."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain.infer.merge import TIMING
from raytrain.infer.output import PARTS, OutputFolder, part_name
from raytrain.infer.units import Unit
from raytrain.infer.worker import UnitReport
from raytrain.runs.storage import join, locate

SLOWEST = 10
UNKNOWN = "unknown"


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


# ---------------------------------------------------------------- quality


@dataclass
class ClassQuality:
    """Counts of (right class, predicted class), from which all figures follow. Classes are compared as texts.

    Attributes:
        counts: (label, prediction) -> rows; a failed row, or a prediction that is no label, counts as `unknown`.
    """

    labels: set[str] = field(default_factory=set)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, label: Any, prediction: Any) -> None:
        """One row; a row without a label is left out."""
        if label is None:
            return
        self.labels.add(str(label))
        self.counts[str(label), UNKNOWN if prediction is None else str(prediction).strip()] += 1

    def figures(self) -> dict[str, Any]:
        """Accuracy, precision, recall and F1 of each class and their means over classes, and the confusion matrix."""
        counts: Counter[tuple[str, str]] = Counter()
        for (label, prediction), rows in self.counts.items():
            counts[label, prediction if prediction in self.labels else UNKNOWN] += rows
        names = sorted(self.labels)
        total = counts.total()
        classes = {name: _class_figures(name, counts) for name in names}
        unknown = sum(rows for (_, prediction), rows in counts.items() if prediction == UNKNOWN)
        means = {key: _mean(one[key] for one in classes.values()) for key in ("precision", "recall", "f1")}
        columns = [*names, UNKNOWN] if unknown and UNKNOWN not in names else names
        return {
            "rows": total, "unknown": unknown,
            "accuracy": sum(counts[name, name] for name in names) / total if total else None,
            **means, "classes": classes,
            "confusion": {"labels": names, "predictions": columns,
                          "rows": [[counts[label, column] for column in columns] for label in names]},
        }  # fmt: skip


def _class_figures(name: str, counts: Counter[tuple[str, str]]) -> dict[str, Any]:
    right = counts[name, name]
    predicted = sum(rows for (_, prediction), rows in counts.items() if prediction == name)
    actual = sum(rows for (label, _), rows in counts.items() if label == name)
    precision, recall = right / predicted if predicted else 0.0, right / actual if actual else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "f1": f1, "rows": actual}


@dataclass
class ValueQuality:
    """Errors of predicted values; failed rows are counted apart."""

    rows: int = 0
    failed: int = 0
    absolute: float = 0.0
    squared: float = 0.0

    def add(self, label: Any, prediction: Any) -> None:
        """One row; a row without a label is left out."""
        if label is None:
            return
        if prediction is None:
            self.failed += 1
            return
        error = float(prediction) - float(label)
        self.rows, self.absolute, self.squared = self.rows + 1, self.absolute + abs(error), self.squared + error**2

    def figures(self) -> dict[str, Any]:
        """Mean absolute error, and the root of the mean squared error."""
        if not self.rows:
            return {"rows": 0, "failed": self.failed}
        root = math.sqrt(self.squared / self.rows)
        return {
            "rows": self.rows,
            "failed": self.failed,
            "mean_absolute_error": self.absolute / self.rows,
            "rmse": root,
        }


def quality_of(pairs: Iterable[tuple[Any, Any]], *, values: bool) -> dict[str, Any]:
    """The figures of (label, prediction) pairs."""
    measured: ClassQuality | ValueQuality = ValueQuality() if values else ClassQuality()
    for label, prediction in pairs:
        measured.add(label, prediction)
    return measured.figures()


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
