"""Telemetry over the steps of a run: what a restart repeated is apart, and no line runs backwards."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from raytrain.report.charts import Curve, chart
from raytrain.report.page import device_curves, report_page, telemetry_charts
from raytrain.report.records import RunRecords

MEMORY, UTILISATION = "memory_run", "utilisation"
STEPS = ((1, (0, 0, 40, 80)), (2, (90, 100, 110, 120)), (3, (100, 105, 130, 130)))
"""Samples of (attempt, steps); the third attempt starts from step 100."""


def rows(*, node: str = "a", clock: float = 2000.0) -> list[dict[str, Any]]:
    gib = 2**30
    return [
        {"time": float(10 * attempt + place), "node": node, "attempt": attempt, "step": step,
         "devices": [{"device": "cpu", "memory_run": (attempt + place) * gib, "utilisation": 10.0 * place,
                      "clock_mhz": clock}]}
        for attempt, steps in STEPS
        for place, step in enumerate(steps)
    ]  # fmt: skip


def curves(figure: str, told: list[dict[str, Any]] | None = None) -> list[Curve]:
    return device_curves(told or rows(), figure, starts={1: 0.0, 2: 80.0, 3: 100.0})


def of_run() -> RunRecords:
    began = [{"kind": "attempt", "attempt": n, "from_step": step} for n, step in ((1, 0), (2, 80), (3, 100))]
    train = [{"step": step, "loss": 1.0, "tokens_per_s": 9.0 + step} for step in (1, 50, 100)]
    return RunRecords("r", "/r", telemetry=rows(), events=began, train=train)


def test_repeated_steps_are_faint_and_the_line_is_interrupted():
    lost, kept = curves(MEMORY)
    assert [x for x, _ in kept.points] == [0, 40, 80, 90, 100, 105, 130]
    assert kept.gaps == (90, 100) and kept.style == "line"
    assert lost.style == "faint" and lost.points == [(100, 3.0), (110, 4.0), (120, 5.0)]


def test_samples_of_one_step_are_one_point():
    assert dict(curves(MEMORY)[1].points)[130] == 6.0 and dict(curves(MEMORY)[1].points)[0] == 2.0
    assert dict(curves(UTILISATION)[1].points)[130] == 25.0


def test_a_rewind_within_an_attempt_is_no_line_to_the_left():
    told = [{**row, "attempt": 1} for row in rows()]
    assert all(
        left < right
        for curve in device_curves(told, MEMORY, starts={1: 0.0})
        for (left, _), (right, _) in pairwise(curve.points)
    )


def test_a_sample_from_before_the_state_was_loaded_counts_at_the_start_of_its_attempt():
    told = rows()
    told[8]["step"] = 0
    assert curves(MEMORY, told)[1].points == curves(MEMORY)[1].points


@pytest.mark.parametrize(("gaps", "drawn"), [((), ["M0.0"]), ((2.0,), ["M0.0", "M666.7"]), ((1.0, 3.0), [])])
def test_a_line_is_divided_at_its_gaps(gaps: tuple[float, ...], drawn: list[str]):
    html = chart("T", [Curve("a", [(0, 0), (1, 1), (2, 2), (3, 3)], gaps=gaps)])
    (path,) = re.findall(r'class="line c1" d="([^"]+)"', html)
    assert re.findall(r"M[\d.]+", path) == (drawn or ["M0.0", "M333.3", "M1000.0"])
    assert path.count("h0") == (2 if len(gaps) == 2 else 0)  # single points


def test_the_charts_have_the_restarts_and_name_what_does_not_change():
    html = report_page(of_run())
    devices = html[html.index('id="devices"') :]
    assert devices.count('class="restart"') == 4 and "Faint: steps that were lost" in devices
    assert "Clock: 2,000 MHz throughout" in devices and "Clock (MHz)" not in devices
    assert html.count('<span class="title">Throughput</span>') == 1
    assert telemetry_charts(RunRecords("r", "/r")) == ""


def test_devices_of_several_nodes_have_their_own_curves():
    found = curves(MEMORY, [*rows(), *rows(node="b")])
    assert [curve.label for curve in found if curve.style == "line"] == ["a cpu", "b cpu"]
    assert found[1].points == found[3].points


def test_of_eight_gpus_each_that_is_slowed_down_is_named() -> None:
    """One that is throttled makes all others wait, and may be any of them, for a part of the run."""
    telemetry = [
        {"time": float(step), "node": "a", "attempt": 1, "step": step,
         "devices": [{"device": f"GPU {gpu}", "clock_mhz": 1980.0, "throttle": reasons.get((gpu, step), [])}
                     for gpu in range(8)]}
        for reasons in [{(5, 3): ["thermal (hardware)"], (7, 0): ["power cap"], (7, 4): ["power cap"]}]
        for step in range(6)
    ]  # fmt: skip
    html = telemetry_charts(RunRecords("r", "/r", telemetry=telemetry))
    assert "Devices were slowed down by: power cap (GPU 7), thermal (hardware) (GPU 5)." in html
    steady = [{**row, "devices": row["devices"][:5]} for row in telemetry]
    assert "slowed down" not in telemetry_charts(RunRecords("r", "/r", telemetry=steady))
