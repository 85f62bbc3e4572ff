"""What experts.jsonl and the placement events say, as pictures, findings and figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from experts.placement.policy import first_placement
from raytrain.report.experts import activation_spec, device_spec, loads_of
from raytrain.report.figures import summarise
from raytrain.report.findings import diagnose
from raytrain.report.page import build_report
from raytrain.report.plots import activations, devices
from raytrain.report.records import RunRecords, read_records
from raytrain.runs.folder import RunFolder

LAYERS, EXPERTS = 2, 4


def load_row(step: int, layers: list[list[int]], idle: list[list[int | None]] | None = None) -> dict[str, Any]:
    hosts = {"version": 1, "rows": [[sum(row[:2]), sum(row[2:])] for row in layers], "busy_s": [0.25, 0.75]}
    back = idle or [[0] * len(row) for row in layers]
    row = {"kind": "load", "step": step, "steps": 10, "layers": layers, "dropped": [0] * len(layers)}
    return {**row, "idle": back, "hosts": hosts}


ROWS = [
    load_row(10, [[5, 1, 2, 2], [4, 3, 2, 1]]),
    load_row(20, [[6, 0, 2, 2], [4, 3, 2, 1]], [[0, 7, 0, 0], [0, 0, 0, 0]]),
    load_row(30, [[8, 0, 1, 1], [4, 3, 3, 0]], [[0, 17, 0, 0], [0, 0, 0, None]]),
    load_row(40, [[8, 0, 1, 1], [4, 3, 3, 0]], [[0, 27, 0, 0], [0, 0, 0, 13]]),
]
"""Layer 0 expert 1 was used last in step 13, layer 1 expert 3 in step 27."""
TOTALS = [[27, 1, 6, 6], [16, 12, 10, 2]]


def records(rows: list[dict[str, Any]] = ROWS, events: list[dict[str, Any]] | None = None) -> RunRecords:
    return RunRecords(name="run", path="run", loads=rows, events=events or [])


def placed(hosts: int, *, replica: bool = False) -> dict[str, Any]:
    placement = first_placement([EXPERTS] * LAYERS, hosts=hosts).to_json()
    if replica:
        placement["layers"][1]["copies"][0] = [0, 1]
    return {"kind": "placement", "step": 10, **placement, "bytes": [1 << 20, 3 << 20][:hosts], "devices": []}


def drawn_bars(spec: dict[str, Any]) -> list[list[float]]:
    """Lengths of the bars of each layer's middle panel."""
    axes = activations(spec).axes
    return [[bar.get_width() for bar in axes[3 * layer + 1].patches] for layer in range(LAYERS)]


@pytest.mark.covers("VIS-03")
def test_bars_equal_the_counters_and_a_panel_shows_the_last_use() -> None:
    spec = activation_spec(records())
    assert spec is not None
    assert [panel["totals"] for panel in spec["panels"]] == TOTALS == drawn_bars(spec)
    assert [panel["last_used"] for panel in spec["panels"]] == [[40, 13, 40, 40], [40, 40, 40, 27]]
    recency = activations(spec).axes[2]
    (dots,) = recency.collections[:1]
    assert sorted(dots.get_offsets().tolist()) == [[13, 1], [40, 0], [40, 2], [40, 3]]
    assert recency.get_xlabel() == "" and activations(spec).axes[5].get_xlabel() == "last used at step"
    heat = activations(spec).axes[0].collections[0].get_array()
    assert heat.shape == (EXPERTS, len(ROWS)) and heat[0, 0] == 5 * EXPERTS / 10
    assert heat.mask[1].tolist() == [False, True, True, True], "no rows have a colour of their own"


def test_an_expert_that_was_never_used_is_marked_so() -> None:
    never = [[0, None, 0, 0], [0, 0, 0, 0]]
    rows = [load_row(step, [[4, 0, 3, 3], [1, 2, 3, 4]], never) for step in (10, 20)]
    spec = activation_spec(records(rows))
    assert spec is not None and spec["panels"][0]["last_used"][1] is None
    assert activations(spec).axes[2].collections[1].get_offsets().tolist() == [[0, 1]]


def test_a_place_without_an_expert_is_no_idle_expert() -> None:
    first = [load_row(step, [[6, 2, 0, 0], [4, 4, 0, 0]], [[0, 0, None, None]] * 2) for step in (10, 20)]
    last = [load_row(step, [[6, 0, 3, 0], [4, 4, 0, 0]], [[0, 10, 0, None], [0, 0, 7, None]]) for step in (30, 40)]
    ids = [[[0, 1, None, None], [0, 1, None, None]]] * 2 + [[[0, None, 2, None], [0, 1, 3, None]]] * 2
    rows = [{**row, "ids": own} for row, own in zip([*first, *last], ids, strict=True)]
    spec = activation_spec(records(rows))
    assert spec is not None
    layer_0, layer_1 = (panel["over_time"] for panel in spec["panels"])
    assert layer_0[0] == pytest.approx([1.5, 1.5, 4 / 3, 4 / 3]), "of an even share between two experts"
    assert layer_0[1] == [0.5, 0.5, None, None] and layer_0[3] == [None] * 4
    assert layer_0[2] == [None, None, pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert layer_1[2] == [None, None, 0.0, 0.0] and layer_1[0][2:] == [1.5, 1.5]
    drawn = activations(spec)
    heat = drawn.axes[3].collections[0]
    assert heat.get_array().mask.tolist() == [[False] * 4, [False] * 4, [False, False, True, True], [False] * 4]
    colours = heat.to_rgba(heat.get_array())
    assert colours[2, 0].tolist() == colours[3, 3].tolist() != colours[2, 2].tolist(), "grey, and orange"
    assert drawn.axes[2].collections[-1].get_offsets().tolist() == [], "no place counts as never used"
    assert "grey: no expert" in drawn.get_suptitle()
    full = activation_spec(records())
    assert full is not None and "grey" not in activations(full).get_suptitle()
    loads = loads_of(records(rows))
    assert loads is not None and loads.dead() == [(1, 2)]


def test_many_windows_are_added_up_and_of_many_layers_the_first_and_last_are_drawn() -> None:
    rows = [load_row(10 * n, [[1, 2, 3, 4]] * 40) for n in range(1, 301)]
    spec = activation_spec(records(rows))
    assert spec is not None and (len(spec["panels"]), spec["layers"]) == (32, 40)
    assert [panel["layer"] for panel in spec["panels"]][15:17] == [15, 24]
    assert len(spec["edges"]) == 101 and spec["edges"][-1] == 3000
    assert spec["panels"][0]["totals"] == [300, 600, 900, 1200]


def test_experts_of_each_device_are_those_of_the_placement() -> None:
    for hosts, replica in ((2, False), (2, True), (4, False)):
        event = placed(hosts, replica=replica)
        spec = device_spec(records(events=[placed(2), event]))
        assert spec is not None
        axes = devices(spec).axes
        copies = [own for layer in event["layers"] for own in layer["copies"]]
        homes = [sum(own[0] == host for own in copies) for host in range(hosts)]
        replicas = [sum(host in own[1:] for own in copies) for host in range(hosts)]
        assert (spec["homes"], spec["replicas"]) == (homes, replicas)
        bars = [bar.get_width() for bar in axes[0].patches]
        assert bars == [*homes, *replicas] and sum(bars) == LAYERS * EXPERTS + replica
        assert [bar.get_width() for bar in axes[1].patches] == spec["bytes"]


def test_experts_in_one_place_have_no_such_picture(tmp_path: Path) -> None:
    assert device_spec(records(events=[placed(1)])) is None and device_spec(records()) is None
    run = RunFolder.create(str(tmp_path), "one")
    build_report(run)
    assert not run.exists("report/expert_activations.png"), "a dense model has no experts to show"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "two" / "events.jsonl").write_text(json.dumps({"time": 1.0, **placed(2)}) + "\n")
    two = RunFolder.open(str(tmp_path / "two"))
    page = build_report(two)
    for name in ("expert_activations", "expert_device_distribution"):
        pixels = imread(io.BytesIO(two.store.read_bytes(f"report/{name}.png")))
        assert pixels.shape[1] > 1000 and pixels.std() > 0
        assert json.loads(two.read_text(f"report/{name}.json"))["title"] == "two"
    assert Path(page).read_text().count("data:image/png;base64,") == 2
    assert "experts_without_tokens" in two.read_text("report/performance_summary.txt")
    assert read_records(two).unreadable == []


def test_a_dead_expert_is_reported_with_a_remedy() -> None:
    (finding,) = [item for item in diagnose(records()) if item.title == "Experts without tokens"]
    assert "2 of 8" in finding.evidence and "layer 0 expert 1, layer 1 expert 3" in finding.evidence
    assert "experts.balance_weight" in finding.remedy
    summary = summarise(records())
    assert summary["experts_without_tokens"] == "layer 0 expert 1, layer 1 expert 3"
    assert summary["expert_imbalance"] == 3.2
    lively = [load_row(10, [[3, 1, 2, 2], [4, 3, 2, 1]])]
    assert not [item for item in diagnose(records(lively)) if item.title == "Experts without tokens"]
    assert summarise(records(lively))["experts_without_tokens"] is None


def test_incomplete_rows_and_rows_of_another_shape_are_skipped() -> None:
    odd = [{"kind": "load", "step": 5, "layers": "x"}, {"kind": "load", "step": 6, "layers": [[1]]}, {"step": "nan"}]
    found = loads_of(records([*odd, *ROWS]))
    assert found is not None and found.ends == [10, 20, 30, 40] and found.totals == TOTALS
    assert loads_of(records(odd[:1])) is None and loads_of(records([])) is None
    broken = {**placed(2), "layers": [{"copies": [[0], [7]]}]}
    assert device_spec(records(events=[broken])) is None


def test_hosts_have_their_share_of_rows_and_time() -> None:
    spec = device_spec(records(events=[placed(2)]))
    assert spec is not None and spec["names"] == ["host 0", "host 1"]
    assert spec["rows"] == [8 + 7, 2 + 3] and spec["busy_s"] == [0.25, 0.75]
