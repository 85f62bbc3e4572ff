"""How good predictions are where the right answers are known: classes or values. Checked against scikit-learn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "unknown"


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
