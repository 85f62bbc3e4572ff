"""Bench `placement`: its document, and traces from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.harness.command import bench_verb
from jobs.bench.harness.inputs import draw_trace, read_trace
from raytrain.errors import InputError


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`bench(*keys)` runs it with small sizes and returns the document."""

    def run(*keys: str) -> dict[str, Any]:
        out = tmp_path / "placement.json"
        code = bench_verb("placement", keys, out=str(out), quick=True, as_json=False)
        document = json.loads(out.read_text())
        assert code == 0 and document["gate"]["passed"], document["gate"]
        return document

    return run


def write_trace(path: Path, trace: list[list[list[float]]]) -> str:
    path.write_text("".join(json.dumps({"step": 10 * n, "layers": w}) + "\n" for n, w in enumerate(trace)))
    return str(path)


def test_every_policy_is_scored_on_every_interval(bench: Callable[..., Any]) -> None:
    document = bench()
    arms, policies = document["arms"], document["values"]["policies"]
    assert set(arms) == set(policies) and len(arms) == 14
    for name, arm in arms.items():
        assert len(arm["values"]) == document["settings"]["blocks"] == 3 and min(arm["values"]) >= 1 - 1e-9
        row = policies[name]
        assert (
            row["next_interval"] == pytest.approx(sum(arm["values"]) / 3) and row["worst_layer"] >= row["next_interval"]
        )
        assert len(row["per_host"]) == 4 and row["solve_s"] > 0
    for title in ("equal", "unequal"):
        assert policies[f"{title}, static"]["bytes_moved"] == policies[f"{title}, round_robin"]["bytes_moved"] == 0
        assert policies[f"{title}, lpt"]["doubled_on_a_host"] == 0
        split, frozen = (policies[f"{title}, lpt{end}"] for end in (" re-split", ""))
        assert split["next_interval"] <= frozen["next_interval"]
        # no placement without replicas can be below the bound
        bounds = document["values"]["bound"][title]
        for other in ("static", "round_robin", "lpt, no replicas"):
            values = arms[f"{title}, {other}"]["values"]
            assert all(value >= bound - 1e-9 for value, bound in zip(values, bounds, strict=True))
    by_speed = policies["unequal, lpt"]["next_interval"]
    assert by_speed < policies["unequal, eplb"]["next_interval"] < policies["unequal, round_robin"]["next_interval"] * 2


def test_the_document_holds_the_readme_example_and_the_planning_times(bench: Callable[..., Any]) -> None:
    values = bench("blocks=1")["values"]
    assert values["readme"]["eplb"] == pytest.approx([1.2081, 1.2422], abs=1e-4)
    assert max(values["readme"]["lpt"]) <= 1.02
    assert {kind: len(seconds) for kind, seconds in values["plan_s"].items()} == {"new": 1, "again": 1, "eplb": 1}


def test_a_trace_from_a_file_is_scored_from_its_second_interval_on(bench: Callable[..., Any], tmp_path: Path) -> None:
    steady = [[[80.0, 10.0, 10.0, 10.0], [1.0, 1.0, 1.0, 1.0]]] * 3
    document = bench(f"trace={write_trace(tmp_path / 't.jsonl', steady)}", "hosts=2", "replicas=0", "blocks=20")
    assert document["settings"]["blocks"] == 2
    # slots: two on each host, so 80 + 10 against 10 + 10, and 2 against 2
    assert document["arms"]["equal, lpt"]["values"] == pytest.approx([(90 + 2) / (55 + 2)] * 2)
    assert document["values"]["policies"]["equal, lpt"]["bytes_moved"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 intervals"),
        ('{"step": 1, "layers": [[1, 2]]}\n', "1 intervals"),
        ('{"layers": [[1, 2]]}\n{"layers": [[1, 2, 3]]}\n', "interval 2 of another shape"),
        ('{"layers": [[1, 2]]}\n{"layers": [[1, -2]]}\n', "line 2"),
        ('{"layers": [[1, 2]]}\nnot json\n', "line 2"),
        ('{"layers": [[1, 2]]}\n{"rows": []}\n', "line 2"),
        ('{"layers": [[1, NaN]]}\n{"layers": [[1, 2]]}\n', "line 1"),
        ('{"layers": [[1, 2], [1]]}\n{"layers": [[1, 2], [1]]}\n', "different numbers"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        bench_verb("placement", [f"trace={path}"], out=str(tmp_path / "x.json"), quick=True, as_json=False)
    assert refused.value.key == "trace"
    with pytest.raises(InputError, match="trace"):
        read_trace(str(tmp_path / "nowhere.jsonl"))


def test_a_generated_trace_drifts_and_keeps_its_rows() -> None:
    keys: dict[str, Any] = {"intervals": 6, "layers": 2, "experts": 32, "sigma": 1.0, "rows": 10_000, "seed": 0}
    calm, wild = (draw_trace(drift=drift, **keys) for drift in (0.01, 0.5))
    assert calm == draw_trace(drift=0.01, **keys)
    assert all(sum(row) == 10_000 for trace in (calm, wild) for interval in trace for row in interval)

    def change(trace: list[list[list[float]]]) -> float:
        return sum(abs(a - b) for a, b in zip(trace[0][0], trace[-1][0], strict=True))

    assert change(wild) > 2 * change(calm)
