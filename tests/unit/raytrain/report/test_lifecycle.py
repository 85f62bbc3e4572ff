"""Pictures of experts that come and go: what is drawn is what the events say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from raytrain.report.experts import loads_of
from raytrain.report.lifecycle import drift_spec, graph_specs, lives_of, lives_spec, living_at, sleep_spec
from raytrain.report.page import build_report
from raytrain.report.plots import figure, knowledge_graph, lives
from raytrain.report.records import RunRecords
from raytrain.runs.folder import RunFolder

EVENTS: list[dict[str, Any]] = [
    {"kind": "expert_born", "step": 12, "layer": 0, "ids": [1, 3], "reason": "r", "count": 4},
    {"kind": "expert_born", "step": 14, "layer": 1, "ids": [0, 3], "reason": "r", "count": 4},
    {"kind": "expert_merged", "step": 25, "layer": 0, "ids": [2, 1], "reason": "r", "count": 3},
    {"kind": "expert_pruned", "step": 28, "layer": 1, "ids": [2], "reason": "r", "count": 3},
    {"kind": "expert_born", "step": 33, "layer": 0, "ids": [3, 4], "reason": "r", "count": 4},
]
LOADS: list[dict[str, Any]] = [
    {"kind": "load", "step": step, "steps": 10, "layers": [[5, 5, 5, 0, 0, 0]] * 2, "dropped": [0, 0],
     "idle": [[0, 0, 0, None, None, None]] * 2, "ids": ids}
    for step, ids in (
        (10, [[0, 1, 2, None, None, None]] * 2), (40, [[0, 4, 2, 3, None, None], [0, 1, None, 3, None, None]]),
    )
]  # fmt: skip
TRAIN = [
    {"kind": "train", "step": n, "epoch": (n - 1) // 10, "loss": 3.0 / n, "step_time_s": 0.1} for n in range(1, 41)
]


def cycle(step: int, number: int, edges: list[tuple[int, int, int, str, float]]) -> dict[str, Any]:
    ids = {0: {20: [0, 1, 2, 3], 30: [0, 2, 3]}, 1: {20: [0, 1, 2, 3], 30: [0, 1, 3]}}
    nodes = [{"id": [layer, one], "uses": 10 * one + number} for layer in ids for one in ids[layer][step]]
    links = [{"source": [at, a], "target": [at, b], "key": kind, "weight": w} for at, a, b, kind, w in edges]
    return {
        "kind": "sleep_cycle",
        "step": step,
        "cycle": number,
        "loss_before": 2.0 / number,
        "loss_replayed": 1.5 / number,
        "loss_after": 1.4 / number,
        "edges": {"similarity": 2 * number, "dependency": 1},
        "uncertainty": [number] * 10,
        "rates": [{"0": 0.75, "1": 1.0}, {"0": 0.5}],
        "load": [{"0": 0.25, "10": 0.5, "2": 0.25}, {"0": 1.0}],
        "drift": [None, None] if number == 1 else [0.25, 0.5],
        "graph": {"experts": {"nodes": nodes, "edges": links}, "concepts": {}},
    }


CYCLES = [
    cycle(20, 1, [(0, 0, 1, "similarity", 0.5), (0, 1, 3, "dependency", 1.0), (1, 0, 1, "composition", 0.3)]),
    cycle(
        30, 2, [(0, 0, 2, "similarity", 0.9), (0, 2, 3, "specialization", 0.3), (1, 1, 3, "specialization_split", 0.7)]
    ),
]


def records_of(events: list[dict[str, Any]]) -> RunRecords:
    return RunRecords(name="run", path="run", train=TRAIN, loads=LOADS, events=events)


@pytest.mark.covers("VIS-09")
def test_the_lives_are_those_of_the_event_log_and_are_drawn() -> None:
    records = records_of([*EVENTS, *CYCLES])
    found = {(one.layer, one.expert): (one.born, one.ended, one.end, one.heir) for one in lives_of(records)}
    assert found == {
        (0, 0): (0, None, None, None), (0, 1): (0, 25, "merged", 2), (0, 2): (0, None, None, None),
        (0, 3): (12, None, None, None), (0, 4): (33, None, None, None),
        (1, 0): (0, None, None, None), (1, 1): (0, None, None, None), (1, 2): (0, 28, "pruned", None),
        (1, 3): (14, None, None, None),
    }  # fmt: skip
    spec = lives_spec(records)
    assert spec is not None and spec["events"] == {"born": 3, "merged": 1, "pruned": 1}
    for event in EVENTS:
        own = [key for key in living_at(lives_of(records), event["step"]) if key[0] == event["layer"]]
        assert len(own) == event["count"]
    bars, counts = lives(spec).axes[:2]
    drawn = {tuple(line.get_xdata()) for line in bars.lines if len(line.get_xdata()) == 2}
    assert {(0, 40), (0, 25), (12, 40), (33, 40)} <= drawn
    assert list(counts.lines[0].get_ydata()) == [3, 4, 3, 4, 4]
    assert list(counts.lines[0].get_xdata()) == [0, 12, 25, 33, 40]
    assert lives_spec(RunRecords(name="run", path="run", train=TRAIN)) is None
    stopped = lives_spec(records_of([*EVENTS, {**EVENTS[3], "step": 45, "ids": [3]}]))
    assert stopped is not None and stopped["last"] == 45, "also after the last row that was logged"


@pytest.mark.covers("VIS-08")
def test_six_panels_hold_the_numbers_of_the_cycles() -> None:
    spec = sleep_spec(records_of([*EVENTS, *CYCLES]))
    assert spec is not None and len(spec["panels"]) == 6
    between, load, rates, kinds, uncertainty, loss = figure(spec).axes
    assert list(between.lines[0].get_ydata()) == [20, 10]
    assert [bar.get_height() for bar in load.patches] == [0.25, 0.25, 0.5, 1.0], "experts in the order of their ids"
    assert [one.get_text() for one in load.get_xticklabels()] == ["0.0", "0.2", "0.10", "1.0"]
    assert [list(line.get_ydata()) for line in rates.lines] == [[0.75, 0.75], [0.5, 0.5]]
    assert {line.get_label(): list(line.get_ydata()) for line in kinds.lines} == {
        "similarity": [2, 4],
        "dependency": [1, 1],
    }
    assert [bar.get_height() for bar in uncertainty.patches] == [3] * 10
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 1.0], [1.5, 0.75], [1.4, 0.7]]
    assert sleep_spec(records_of(EVENTS)) is None


@pytest.mark.covers("VIS-10")
def test_drift_and_recovery_are_those_between_and_in_the_cycles() -> None:
    spec = drift_spec(records_of([*EVENTS, *CYCLES]))
    assert spec is not None
    drift, recovery = figure(spec).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in drift.lines] == [([30], [0.25]), ([30], [0.5])]
    lost, back = (list(line.get_ydata()) for line in recovery.lines)
    assert lost == pytest.approx([1.0 - 1.4]) and back == pytest.approx([1.0 - 0.7])
    assert drift_spec(records_of(CYCLES[:1])) is None


@pytest.mark.covers("VIS-05")
def test_one_graph_for_each_epoch_with_the_experts_that_live_then(tmp_path: Path) -> None:
    specs = graph_specs(records_of([*EVENTS, *CYCLES]))
    assert list(specs) == [1, 2, 3, 4]
    nodes = {epoch: [(node["layer"], node["expert"]) for node in spec["nodes"]] for epoch, spec in specs.items()}
    assert nodes[1] == [(layer, expert) for layer in (0, 1) for expert in range(3)]
    assert nodes[4] == [(0, 0), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 3)]
    assert [spec["of_step"] for spec in specs.values()] == [None, 20, 30, 30]
    assert [edge["type"] for edge in specs[2]["edges"]] == ["similarity", "dependency", "composition"]
    assert {len(figure.axes) for figure in map(knowledge_graph, specs.values())} == {2}
    for name, rows in (("metrics", TRAIN), ("events", [*EVENTS, *CYCLES]), ("experts", LOADS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_report(RunFolder.open(str(tmp_path)))
    written = sorted(path.name for path in (tmp_path / "report").glob("knowledge_graph_epoch_*.png"))
    assert written == [f"knowledge_graph_epoch_{n}.png" for n in (1, 2, 3, 4)]
    for name in (*written, "expert_lifecycle.png", "sleep_cycles.png", "concept_drift.png"):
        pixels = imread(io.BytesIO((tmp_path / "report" / name).read_bytes()))
        assert pixels.std() > 0.01, name
    first, second = ((tmp_path / "report" / name).read_bytes() for name in written[:2])
    assert first != second


@pytest.mark.parametrize(
    "back",
    [
        {"kind": "attempt", "attempt": 2, "from_step": 12},
        {"kind": "decision", "what": "rewind", "value": 12},
        {"kind": "decision", "what": "rollback", "value": 12},
    ],
)
def test_what_the_run_went_back_behind_is_counted_once(back: dict[str, Any]) -> None:
    log = sorted([*EVENTS, *CYCLES], key=lambda row: row["step"])
    lost = [row for row in log if row["step"] < 31]
    lost.append({"kind": "expert_pruned", "step": 31, "layer": 0, "ids": [3], "reason": "r", "count": 2})
    again = [row for row in log if row["step"] > 12]
    repeated = records_of([{"kind": "attempt", "attempt": 1, "from_step": 0}, *lost, back, *again])
    for of in (lives_spec, sleep_spec, drift_spec, graph_specs):
        assert of(repeated) == of(records_of(log))


def test_an_empty_place_for_an_expert_is_no_expert_without_rows() -> None:
    loads = loads_of(records_of([]))
    assert loads is not None
    assert loads.dead() == [(0, 3), (1, 3)]
    assert loads.imbalance() == [5 * 4 / 15, 5 * 3 / 15]
