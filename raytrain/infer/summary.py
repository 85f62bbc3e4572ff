"""What an inference job did, in figures: rows and tokens per second, latencies, workers, and the quality of classes or
values where the right answers are known.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from raytrain.config.messages import abbreviated
from raytrain.data.rows.contract import IGNORED_LABEL
from raytrain.data.sources.tables import MISSING, csv_kinds, number_in, typed
from raytrain.errors import InputError
from raytrain.infer.input import InputRows, UnitReport, json_value
from raytrain.infer.stages.split import StageSplit, StageTimes

SLOWEST = 10
#: Failed rows that are named, the first ones of the input.
FAILURES = 20
#: Units whose times are kept; of more, neighbours are left out.
TIMES = 1000
UNKNOWN = "unknown"
#: Most predictions that are no label, in the figures.
MOST_OTHER = 10


@dataclass
class TableFigures:
    """Figures of all rows, from one table after another; memory grows with the number of batches, not of rows."""

    label: str | None  # the column with right answers, None if there is none
    as_csv: bool = False  # whether its values are the texts of cells of CSV files
    known: KnownClasses | None = None  # the classes of the model
    rows: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    again: int = field(default=0, init=False)
    _seconds: list[Any] = field(default_factory=list, init=False)
    _slowest: list[tuple[float, Any]] = field(default_factory=list, init=False)
    _failures: list[dict[str, Any]] = field(default_factory=list, init=False)
    _errors: Counter[str] = field(default_factory=Counter, init=False)
    _quality: ClassQuality | ValueQuality | None = field(default=None, init=False)

    def add(self, table: Any) -> None:
        """The rows of one unit's file; tables come in input order."""
        seconds = table["seconds"].to_numpy()
        self.rows += table.num_rows
        self.tokens += int(table["tokens"].to_numpy().sum())
        self.again += int(table["again"].to_numpy(zero_copy_only=False).sum())
        self._seconds.append(np.unique(seconds, return_counts=True))  # the rows of a batch share their seconds
        first = np.argsort(-seconds, kind="stable")[:SLOWEST]
        found = [(float(seconds[at]), _id(table["id"][int(at)])) for at in first]
        self._slowest = sorted([*self._slowest, *found], key=lambda one: -one[0])[:SLOWEST]
        errors = table["error"]
        for row, error in enumerate(errors.to_pylist() if errors.null_count < table.num_rows else ()):
            if error is not None:
                self._errors[error.partition(":")[0]] += 1
                if len(self._failures) < FAILURES:
                    self._failures.append({"id": _id(table["id"][row]), "error": error})
        if self.label is None:
            return
        import pyarrow as pa
        from pyarrow import types

        labels, predictions = table[self.label], table["prediction"]
        if self._quality is None:
            of_values = self.known is None and types.is_floating(labels.type)
            of_values = of_values or types.is_floating(predictions.type)
            self._quality = ValueQuality() if of_values else ClassQuality(known=self.known)
        if self.as_csv and isinstance(self._quality, ValueQuality):
            with suppress(pa.ArrowInvalid):  # a text among them is one row that cannot be judged
                labels = typed(labels, "double")
        for label, prediction in zip(labels.to_pylist(), predictions.to_pylist(), strict=True):
            self._quality.add(label, prediction)

    def figures(self) -> dict[str, Any]:
        values, counts = (np.concatenate(one) for one in zip(*self._seconds, strict=True))
        quality = self._quality
        if self.as_csv and isinstance(quality, ClassQuality) and self.known is None:
            quality = quality.as_csv()
        return {
            "rows": self.rows, "tokens": self.tokens, "computed_again": self.again,
            "latency_s": {"p50": quantile(values, counts, 0.5), "p95": quantile(values, counts, 0.95)},
            "slowest": [{"id": name, "seconds": seconds} for seconds, name in self._slowest],
            "failures": self._failures, "errors": dict(self._errors.most_common()),
            "quality": None if quality is None else quality.figures(),
        }  # fmt: skip


def _id(value: Any) -> Any:
    found = value.as_py()
    return found if isinstance(found, str | int | float | None) else json_value(found)


def quantile(values: Any, counts: Any, share: float) -> float:
    """As `np.quantile` of the values, each repeated as often as `counts` says."""
    order = np.argsort(values, kind="stable")
    ends, ordered = np.cumsum(counts[order]), values[order]
    place = share * (ends[-1] - 1)
    low, high = (
        float(ordered[np.searchsorted(ends, at, side="right")]) for at in (math.floor(place), math.ceil(place))
    )
    return low + (high - low) * (place - math.floor(place))


def summarise(
    figures: dict[str, Any], reports: Sequence[UnitReport], *, wall_s: float, split: StageSplit | None = None
) -> dict[str, Any]:
    """The figures of a merged job: of `TableFigures`, and of the units that this command computed, in `wall_s` from the
    first one's begin to the last one's end."""
    rows, made = sum(report.rows for report in reports), sum(report.tokens for report in reports)
    zero, every = min((one.begin for one in reports), default=0.0), -(-len(reports) // TIMES) or 1
    by_worker: dict[str, list[UnitReport]] = defaultdict(list)
    for report in reports:
        by_worker[report.worker].append(report)
    workers = [
        {
            "worker": name, "units": len(own), "rows": sum(one.rows for one in own),
            "busy_s": sum(one.seconds for one in own), "load_s": own[0].load_s,
            "rows_per_s": sum(one.rows for one in own) / max(sum(one.seconds for one in own), 1e-9),
        }
        for name, own in sorted(by_worker.items())
    ]  # fmt: skip
    return {
        **figures, "computed_now": rows, "wall_s": wall_s, "rows_per_s": rows / wall_s if wall_s else None,
        "tokens_per_s": made / wall_s if wall_s and made else None,
        "out_of_memory": sum(report.out_of_memory for report in reports), "workers": workers,
        "times": [
            {"unit": one.number, "worker": one.worker, "rows": one.rows, "begin_s": one.begin - zero,
             "end_s": one.end - zero}
            for one in sorted(reports, key=lambda one: one.begin)[::every]
        ],
        "stages": None if split is None else stage_figures(split, reports),
        "quantized": next((json.loads(report.quantized) for report in reports if report.quantized), None),
    }  # fmt: skip


def stage_figures(split: StageSplit, reports: Sequence[UnitReport]) -> dict[str, Any] | None:
    """How busy the stages of all replicas were; None if nothing was computed now."""
    times = [StageTimes(**json.loads(report.stages)) for report in reports if report.stages]
    if not times:
        return None
    total = StageTimes([0.0] * split.plan.stages)
    for one in times:
        total.add(one)
    return {
        "stages": [split.plan.describe(stage) for stage in range(split.plan.stages)], "bytes": split.plan.bytes,
        "busy": [seconds / max(total.wall_s, 1e-9) for seconds in total.busy_s], "bubble": total.bubble,
        "expected_bubble": total.expected_bubble(split.inflight), "passes": total.passes, "rounds": total.rounds,
        "inflight": split.inflight, "balance": split.balance,
    }  # fmt: skip


# ---------------------------------------------------------------- classes


@dataclass(frozen=True)
class KnownClasses:
    """The classes that a model answers with, and which of them a label of the input is, as in training."""

    count: int  # how many
    # in the order of their numbers; None where the labels in training were whole numbers, true or false
    names: tuple[str, ...] | None = None
    numbered: bool = False  # whether labels may be the numbers of the names

    def read(self, label: Any) -> str | None:
        """The class of a label, as a prediction of it is as text; None if it is none."""
        ways = [self._by_name, self._by_number]
        ways = ways if isinstance(label, str) else ways[::-1]
        return next((found for way in ways if (found := way(label)) is not None), None)

    def missing(self, label: Any) -> bool:
        """Whether a label says that there is none, as in training."""
        if isinstance(label, str):
            return label.strip() in (MISSING if self.names is None else [""]) and self._by_name(label) is None
        return label is None or (self._has_numbers and _whole(label) == IGNORED_LABEL)

    @property
    def _has_numbers(self) -> bool:
        return self.names is None or self.numbered

    def _by_name(self, label: Any) -> str | None:
        if isinstance(label, bool):
            return next((name for name in self.names or () if name.lower() == str(label).lower()), None)
        text = str(json_value(label)) if isinstance(label, Decimal) else str(label)
        return text if self.names is not None and text in self.names else None

    def _by_number(self, label: Any) -> str | None:
        number = _whole(label) if self._has_numbers else None
        if number is None or not 0 <= number < self.count:
            return None
        return str(number) if self.names is None else self.names[number]


def _whole(label: Any) -> int | None:
    """The whole number that a label is, 0 and 1 for false and true; None if it is none."""
    number = {"false": 0, "true": 1}.get(label.strip().lower()) if isinstance(label, str) else None
    found = number_in(label) if number is None else number
    return int(found) if found is not None and found % 1 == 0 else None


def check_labels(rows: InputRows, column: str, known: KnownClasses) -> None:
    """Raise InputError if there are labels, and none of them is a class of the model."""
    seen = dict[str, None]()
    for values in rows.column(column):
        for label in values.to_pylist():
            if not known.missing(label):
                if known.read(label) is not None:
                    return
                seen.setdefault(str(label)) if len(seen) <= MOST_OTHER else None
    if seen:
        names = [str(number) for number in range(min(known.count, MOST_OTHER + 1))]
        names = names if known.names is None else list(known.names)
        raise InputError(
            "infer.label", got=f"the column {column} with {abbreviated(list(seen), MOST_OTHER)}",
            expected=f"classes of the model: {abbreviated(names, MOST_OTHER)}"
            + (f" (numbers below {known.count})" if known.names is None and known.count > MOST_OTHER else ""),
            remedy="without infer.label, rows are answered and not judged",
        )  # fmt: skip


# ---------------------------------------------------------------- quality


@dataclass
class ClassQuality:
    """Counts of (right class, predicted class), from which all figures follow. Classes are compared as texts."""

    labels: set[str] = field(default_factory=set)
    # (label, prediction) -> rows; a failed row, or a prediction that is no label, counts as `unknown`
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    known: KnownClasses | None = None  # the classes of the model: labels are read as these
    _read: dict[Any, str | None] = field(default_factory=dict, init=False, repr=False)

    def add(self, label: Any, prediction: Any) -> None:
        """One row; a row without a label is left out."""
        name = self._name(label)
        if name is not None:
            answer = UNKNOWN if prediction is None else str(prediction)
            self.labels.add(name)
            self.counts[name, answer if self.known is not None else answer.strip()] += 1

    def _name(self, label: Any) -> str | None:
        if self.known is None:
            return None if label is None else str(label).strip()  # as training reads it
        if label not in self._read:
            self._read[label] = None if self.known.missing(label) else self.known.read(label) or str(label)
        return self._read[label]

    def as_csv(self) -> ClassQuality:
        """With labels that are cells of CSV files read as training reads them: where they are numbers, `NA` is none."""
        import pyarrow as pa

        names = pa.chunked_array([pa.array(sorted(self.labels), pa.string())])
        values = dict(zip(names.to_pylist(), typed(names, csv_kinds(names, label=True)[0]).to_pylist(), strict=True))
        found = ClassQuality()
        for (name, prediction), rows in self.counts.items():
            if values[name] is not None:
                found.labels.add(str(values[name]))
                found.counts[str(values[name]), prediction] += rows
        return found

    def figures(self) -> dict[str, Any]:
        """Accuracy, precision, recall and F1 of each class and their means over classes, and the confusion matrix; the
        labels that were never predicted, and the commonest predictions that are no label: a model may not know a class,
        or name it otherwise."""
        counts: Counter[tuple[str, str]] = Counter()
        for (label, prediction), rows in self.counts.items():
            counts[label, prediction if prediction in self.labels else UNKNOWN] += rows
        names = sorted(self.labels)
        total = counts.total()
        classes = {}
        for name in names:
            right = counts[name, name]
            predicted = sum(rows for (_, prediction), rows in counts.items() if prediction == name)
            actual = sum(rows for (label, _), rows in counts.items() if label == name)
            precision, recall = right / predicted if predicted else 0.0, right / actual if actual else 0.0
            f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
            classes[name] = {"precision": precision, "recall": recall, "f1": f1, "rows": actual}
        unknown = sum(rows for (_, prediction), rows in counts.items() if prediction == UNKNOWN)
        count = max(len(classes), 1)
        means = {key: sum(one[key] for one in classes.values()) / count for key in ("precision", "recall", "f1")}
        columns = [*names, UNKNOWN] if unknown and UNKNOWN not in names else names
        answers = Counter[str]()
        for (_, prediction), rows in self.counts.items():
            answers[prediction] += rows
        others = [name for name, _ in answers.most_common() if name not in self.labels and name != UNKNOWN]
        return {
            "rows": total, "unknown": unknown, "never_predicted": [name for name in names if not answers[name]],
            "other_predictions": others[:MOST_OTHER],
            "accuracy": sum(counts[name, name] for name in names) / total if total else None,
            **means, "classes": classes,
            "confusion": {"labels": names, "predictions": columns,
                          "rows": [[counts[label, column] for column in columns] for label in names]},
        }  # fmt: skip


@dataclass
class ValueQuality:
    """Errors of predicted values; failed rows, and labels that are no numbers, are counted apart."""

    rows: int = 0
    failed: int = 0
    absolute: float = 0.0
    squared: float = 0.0

    def add(self, label: Any, prediction: Any) -> None:
        if label is None:
            return
        if prediction is None or isinstance(prediction, list):  # a vector has no error against one value
            self.failed += 1
            return
        try:
            error = float(prediction) - float(label)
        except ValueError:
            self.failed += 1
            return
        self.rows, self.absolute, self.squared = self.rows + 1, self.absolute + abs(error), self.squared + error**2

    def figures(self) -> dict[str, Any]:
        if not self.rows:
            return {"rows": 0, "failed": self.failed}
        return {
            "rows": self.rows, "failed": self.failed, "mean_absolute_error": self.absolute / self.rows,
            "rmse": math.sqrt(self.squared / self.rows),
        }  # fmt: skip
