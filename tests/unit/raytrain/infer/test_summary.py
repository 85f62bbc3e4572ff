"""Figures of predictions with known answers, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn import metrics

from raytrain.infer.summary import ClassQuality, TableFigures, ValueQuality

PAIRS = [
    ("cat", "cat"), ("cat", "cat"), ("cat", "dog"), ("dog", "dog"), ("dog", "cat"), ("dog", None), ("cow", "cow "),
    ("cow", "a cow, I think"), (None, "cat"),
]  # fmt: skip


def quality_of(pairs: Iterable[tuple[Any, Any]], *, values: bool) -> dict[str, Any]:
    measured = ValueQuality() if values else ClassQuality()
    for label, prediction in pairs:
        measured.add(label, prediction)
    return measured.figures()


@pytest.mark.covers("INF-18")
def test_classes_are_scored_and_answers_that_are_no_class_are_unknown() -> None:
    found = quality_of(PAIRS, values=False)
    assert found["rows"] == 8 and found["unknown"] == 2 and found["accuracy"] == pytest.approx(4 / 8)
    cat, dog, cow = (found["classes"][name] for name in ("cat", "dog", "cow"))
    assert (cat["precision"], cat["recall"], cat["f1"], cat["rows"]) == pytest.approx((2 / 3, 2 / 3, 2 / 3, 3))
    assert (dog["precision"], dog["recall"], dog["f1"]) == pytest.approx((1 / 2, 1 / 3, 0.4))
    assert (cow["precision"], cow["recall"], cow["f1"]) == pytest.approx((1, 1 / 2, 2 / 3))
    assert found["f1"] == pytest.approx((2 / 3 + 0.4 + 2 / 3) / 3)
    assert found["confusion"] == {
        "labels": ["cat", "cow", "dog"], "predictions": ["cat", "cow", "dog", "unknown"],
        "rows": [[2, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 1]],
    }  # fmt: skip


def test_a_vector_has_no_error_against_one_value() -> None:
    found = quality_of([(1.0, 1.5), (1.0, [1.0, 2.0])], values=True)
    assert (found["rows"], found["failed"], found["rmse"]) == (1, 1, 0.5)


def test_numbers_are_compared_as_classes_or_as_values() -> None:
    assert quality_of([(1, 1), (2, 1)], values=False)["accuracy"] == 0.5
    assert quality_of([(" 7", "7"), ("8 ", "7")], values=False)["accuracy"] == 0.5, "training leaves out the spaces"
    found = quality_of([(1.0, 1.5), (2.0, 0.0), (3.0, None), (None, 1.0)], values=True)
    assert found["mean_absolute_error"] == pytest.approx(1.25) and found["rmse"] == pytest.approx((4.25 / 2) ** 0.5)
    assert found["rows"] == 2 and found["failed"] == 1


@pytest.mark.parametrize("classes", [2, 5])
def test_figures_of_classes_are_those_of_scikit_learn(classes: int) -> None:
    draw = np.random.default_rng(classes)
    names = np.array([f"class {number}" for number in range(classes)])
    labels = names[draw.integers(classes, size=500)]
    answers = np.where(draw.random(500) < 0.6, labels, names[draw.integers(classes, size=500)])
    found = quality_of(zip(labels, answers, strict=True), values=False)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, answers))
    assert found["confusion"]["rows"] == metrics.confusion_matrix(labels, answers, labels=names).tolist()
    each = metrics.precision_recall_fscore_support(labels, answers, labels=names)
    means = metrics.precision_recall_fscore_support(labels, answers, average="macro")
    for at, key in enumerate(("precision", "recall", "f1")):
        assert found[key] == pytest.approx(means[at])
        assert [found["classes"][name][key] for name in names] == pytest.approx(each[at])
    assert [found["classes"][name]["rows"] for name in names] == each[3].tolist()


def test_answers_that_are_no_class_count_as_scikit_learn_counts_a_class_without_rows() -> None:
    draw = np.random.default_rng(0)
    labels = np.array(["up", "down"])[draw.integers(2, size=200)]
    answers = np.where(draw.random(200) < 0.2, "I think up", labels)
    found = quality_of(zip(labels, answers, strict=True), values=False)
    counted = np.where(answers == "I think up", "unknown", answers)
    each = metrics.precision_recall_fscore_support(labels, counted, labels=["down", "up"], zero_division=0)
    assert [found["classes"][name]["recall"] for name in ("down", "up")] == pytest.approx(each[1])
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, counted))
    assert found["unknown"] == int((counted == "unknown").sum())


def test_errors_of_values_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    labels, answers = draw.normal(size=300), draw.normal(size=300)
    found = quality_of(zip(labels, answers, strict=True), values=True)
    assert found["mean_absolute_error"] == pytest.approx(metrics.mean_absolute_error(labels, answers))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(labels, answers))


def test_figures_do_not_depend_on_how_the_rows_are_divided() -> None:
    draw = np.random.default_rng(0)
    seconds = np.repeat(draw.random(40), draw.integers(1, 30, size=40))
    labels = draw.integers(3, size=len(seconds))
    table = pa.table({
        "id": [f"r{row}" for row in range(len(seconds))], "seconds": seconds,
        "tokens": draw.integers(9, size=len(seconds)),
        "again": draw.random(len(seconds)) < 0.1, "label": labels, "prediction": draw.integers(3, size=len(seconds)),
        "error": pa.array(np.where(draw.random(len(seconds)) < 0.1, "bad", None)),
    })  # fmt: skip
    found = []
    for size in (len(seconds), 7):
        figures = TableFigures("label")
        for start in range(0, len(seconds), size):
            figures.add(table.slice(start, size))
        found.append(figures.figures())
    assert found[0] == found[1]
    assert found[0]["latency_s"] == pytest.approx({"p50": np.quantile(seconds, 0.5), "p95": np.quantile(seconds, 0.95)})
    slowest = np.argsort(-seconds, kind="stable")[:10]
    assert found[0]["slowest"] == [{"id": f"r{row}", "seconds": seconds[row]} for row in slowest]
    assert found[0]["tokens"] == sum(table["tokens"].to_pylist())


def _scored(labels: list[str | None], predictions: list[object]) -> dict[str, object]:
    rows = len(labels)
    figures = TableFigures("y", as_csv=True)
    table = pa.table({
        "id": [str(row) for row in range(rows)], "seconds": [0.1] * rows, "tokens": [1] * rows, "again": [False] * rows,
        "y": pa.array(labels, pa.string()), "prediction": predictions, "error": pa.nulls(rows, pa.string()),
    })  # fmt: skip
    for start in (0, 2):  # the first table alone would tell another type
        figures.add(table.slice(start, 2 if start == 0 else rows))
    found = figures.figures()["quality"]
    assert isinstance(found, dict)
    return found


def test_carried_labels_are_judged_as_training_reads_them() -> None:
    values = _scored(["1.5", " 2 ", "NA", None], [1.0, 2.0, 3.0, 4.0])
    assert (values["rows"], values["failed"], values["mean_absolute_error"]) == (2, 0, 0.25)
    mixed = _scored(["1.5", "2", "two", None], [1.0, 2.0, 3.0, 4.0])
    assert (mixed["rows"], mixed["failed"]) == (2, 1), "what is no number is no error after everything was computed"
    numbers = _scored(["NA", "", "1", "2"], [1, 1, 1, 2])
    assert (numbers["rows"], numbers["accuracy"]) == (2, 1.0), "where the others are numbers, NA is no label"
    names = _scored(["NA", "", "cat", "007"], ["NA", "cat", "cat", "7"])
    assert (names["rows"], names["accuracy"]) == (3, 2 / 3), "NA is a class beside others, and 007 is not 7"
