"""The report page of batch inference: rows per second over time, and texts of rows that are not trusted."""

from __future__ import annotations

import pytest

from raytrain.report.inference import inference_page, rate_over_time


def test_the_rows_of_a_unit_are_spread_over_its_time() -> None:
    times = [{"begin_s": 0.0, "end_s": 2.0, "rows": 10}, {"begin_s": 1.0, "end_s": 4.0, "rows": 30}]
    found = rate_over_time(times, points=4)
    assert [at for at, _ in found] == [0.5, 1.5, 2.5, 3.5]
    assert [rate for _, rate in found] == pytest.approx([5, 15, 10, 10])
    assert sum(rate for _, rate in rate_over_time(times, points=7)) * 4 / 7 == pytest.approx(40)
    assert rate_over_time([]) == []


def test_a_page_escapes_texts_and_leaves_out_what_is_not_known() -> None:
    manifest = {"rows": 4, "failed": 1, "units": 1, "files": {}, "job": {"model": "a"}}
    summary = {
        "computed_now": 4, "tokens": 0, "computed_again": 0, "latency_s": {"p50": 0.1, "p95": 0.2}, "slowest": [],
        "failures": [{"id": "<i>", "error": "ValueError: <b>"}], "errors": {"ValueError": 1}, "quality": None,
        "wall_s": 2.0, "rows_per_s": 2.0, "tokens_per_s": None, "workers": [], "times": [],
    }  # fmt: skip
    page = inference_page("<x>", manifest, summary)
    assert "&lt;b&gt;" in page and "&lt;i&gt;" in page and "<b>ValueError" not in page and "<x>" not in page
    assert 'id="failures"' in page and "3 of 4 rows have a prediction" in page
    for missing in ("speed", "workers", "quality", "batch"):
        assert f'id="{missing}"' not in page
    assert "Tokens per second" not in page


def test_the_axis_is_time() -> None:
    summary = {
        "computed_now": 9, "tokens": 0, "computed_again": 0, "latency_s": {"p50": 0.1, "p95": 0.2}, "slowest": [],
        "failures": [], "errors": {}, "quality": None, "wall_s": 4.0, "rows_per_s": 2.0, "tokens_per_s": None,
        "workers": [], "times": [{"worker": "a", "begin_s": 0.0, "end_s": 4.0, "rows": 9}],
    }  # fmt: skip
    page = inference_page("x", {"rows": 9, "failed": 0, "units": 1, "files": {}, "job": {}}, summary)
    assert '<span class="xl">time since the first unit began</span>' in page and ">2.0 s</span>" in page
