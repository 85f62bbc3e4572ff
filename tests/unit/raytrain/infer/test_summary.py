"""Figures of predictions with known answers, worked out by hand."""

from __future__ import annotations

import pytest

from raytrain.infer.summary import quality_of

PAIRS = [
    ("cat", "cat"), ("cat", "cat"), ("cat", "dog"), ("dog", "dog"), ("dog", "cat"), ("dog", None), ("cow", "cow "),
    ("cow", "a cow, I think"), (None, "cat"),
]  # fmt: skip


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


def test_numbers_are_compared_as_classes_or_as_values() -> None:
    assert quality_of([(1, 1), (2, 1)], values=False)["accuracy"] == 0.5
    found = quality_of([(1.0, 1.5), (2.0, 0.0), (3.0, None), (None, 1.0)], values=True)
    assert found["mean_absolute_error"] == pytest.approx(1.25) and found["rmse"] == pytest.approx((4.25 / 2) ** 0.5)
    assert found["rows"] == 2 and found["failed"] == 1
