"""Real jobs whose model watches the worker that trains it, or breaks inside of it."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.driver.progress import PLAIN_EVERY_S, TrainingDisplay
from tests.unit.raytrain.report.test_build import summary_from_text

GUEST = Path(__file__).parent / "guest" / "watching.py"
INSTRUMENTS = Path(__file__).resolve().parents[1] / "numerics"
READS_A_ROW = ["tolist in raytrain/train/loop.py:read_row"]
LIMIT_S = 240


@pytest.fixture
def watched(fit: Callable[..., Any], place: Any) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """`watched({"fault": ..., "at": ...}, section={...})`: a run of the watching model, and the lines that it wrote."""

    def run(model: dict[str, Any], **sections: Any) -> tuple[Any, list[dict[str, Any]]]:
        shutil.copy(GUEST, place.folder)
        note = place.folder / "note.jsonl"
        keys = {"builder": "watching:watched", "note": str(note), "instruments": str(INSTRUMENTS), **model}
        data = {"source": "watching:rows", "eval_fraction": 0.0}
        made = fit(place.job(model=keys, data=data, **sections), timeout=LIMIT_S)
        return made, [json.loads(line) for line in note.read_text().splitlines()]

    return run


def reads_of_training(line: dict[str, Any]) -> list[str]:
    """Reads of the device by a step and its row; saving a checkpoint reads all there is to save."""
    return [spot for spot in line["reads"] if "raytrain/checkpoint/" not in spot and not spot.endswith("loop.py:_save")]


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("LOOP-17", "TRB-36")
@pytest.mark.parametrize(("log_every", "rows"), [(50, [1, 50]), (0, [1])])
def test_steps_that_are_not_finite_end_between_rows_and_nothing_but_a_row_reads_the_device(
    watched: Callable[..., Any], log_every: int, rows: list[int]
) -> None:
    """Steps 60, 61 and 62 fail; the host knows two steps later, and goes back."""
    run, lines = watched(
        {"fault": "overflows", "at": 60},
        precision={"dtype": "bf16"},
        loop={"max_steps": 80, "log_every": log_every},
        save={"every": 55},
    )
    before, after = [line for line in lines if line["half"]], [line for line in lines if not line["half"]]
    assert [line["step"] for line in before] == list(range(1, 65))
    assert {line["step"] - 1: reads for line in before if (reads := reads_of_training(line))} == dict.fromkeys(
        rows, READS_A_ROW
    )
    (decision,) = run.events("decision")
    assert (decision["what"], decision["value"], decision["precision"]) == ("rollback", 55, "fp32")
    assert decision["skipped"] == 5 and decision["reason"].startswith(
        "5 steps in a row were not finite (the limit is 3; 2 more ran"
    )
    assert "(the loss was inf) before step 64" in decision["reason"]
    assert [line["step"] for line in after] == list(range(56, 81)) and lines == before + after
    assert [spot for spot in after[0]["reads"] if "read_row" in spot] == READS_A_ROW, "that of step 64, dropped since"
    assert not any(reads_of_training(line) for line in after[1:])
    assert [step for step, _ in run.losses()] == [*rows, 80] and run.result["status"] == "done"


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("MON-01", "MON-06", "VER-12")
@pytest.mark.parametrize(
    ("log_every", "rows"), [(100, [1, 100, 200, 250]), (50, [1, 50, 100, 150, 200, 250]), (0, [1, 250])]
)
def test_rows_come_at_the_interval_first_and_last_and_nothing_asks_for_memory_between_them(
    watched: Callable[..., Any], log_every: int, rows: list[int]
) -> None:
    run, lines = watched({}, loop={"max_steps": 250, "log_every": log_every})
    logged = run.rows("train")
    assert [row["step"] for row in logged] == rows
    assert all(0 < row["peak_memory_bytes"] < 64 << 30 for row in logged)
    assert [line["step"] for line in lines] == list(range(1, 251))
    # two of a row: the peak since the last row, and what is in use now
    assert {line["step"] - 1: line["queries"] for line in lines if line["queries"]} == dict.fromkeys(rows[:-1], 2)
    # what the terminal shows of them, where rows are as far apart as its lines
    printed, now = io.StringIO(), 0.0
    display = TrainingDisplay(Console(file=printed, width=200), clock=lambda: now)
    for row in logged:
        now += PLAIN_EVERY_S
        display.show({"phase": "training", "row": row, "step": row["step"], "max_steps": 250})
    shown = printed.getvalue().splitlines()
    assert [line.split()[2] for line in shown] == [f"{step}/250" for step in rows]
    assert all(f"loss {row['loss']:.4f}" in line and " MiB" in line for row, line in zip(logged, shown, strict=True))


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("MON-07", "MON-08", "VER-11")
def test_by_epoch_there_is_one_row_and_one_line_with_the_memory_of_each(watched: Callable[..., Any]) -> None:
    """Fifteen steps are an epoch; the run ends within the fourth."""
    loop = {"max_steps": 50, "global_batch_size": 16, "log_every": "epoch"}
    run, lines = watched({}, loop=loop)
    logged = run.rows("train")
    assert [(row["step"], row["epoch"]) for row in logged] == [(1, 0), (15, 0), (30, 1), (45, 2), (50, 3)]
    assert [row.get("ends_epoch", False) for row in logged] == [False, True, True, True, False]
    assert {line["step"] - 1 for line in lines if line["queries"]} == {1, 15, 30, 45}, "memory is asked for with a row"
    printed = (run.path / "logs" / "rank_00000.log").read_text()
    memory = r"memory (\d+\.\d\d) GiB allocated, (\d+\.\d\d) GiB reserved\n"
    found = re.findall(r"epoch (\d) ended at step (\d+): loss ([\d.]+), .* " + memory, printed)
    expected = [
        (str(row["epoch"]), str(row["step"]), f"{row['loss']:.4f}",
         *(f"{row[f'memory_{name}_bytes'] / 2**30:.2f}" for name in ("allocated", "reserved")))
        for row in logged[1:-1]
    ]  # fmt: skip
    assert found == expected and printed.count(" ended at step ") == 3


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("MEM-01")
def test_a_quarter_of_a_gibibyte_that_the_model_keeps_is_in_every_figure_of_memory_from_then_on(
    watched: Callable[..., Any],
) -> None:
    run, _ = watched({"fault": "keeps", "at": 30}, loop={"max_steps": 40, "log_every": 1})
    rows = {row["step"]: row for row in run.rows("train")}
    for name in ("memory_allocated_bytes", "memory_reserved_bytes", "peak_memory_bytes"):
        before, after = rows[29][name], rows[31][name]
        assert abs(after - before - (256 << 20)) <= 16 << 20, (name, before, after)
        assert abs(rows[40][name] - after) <= 16 << 20, "and stays"


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("DEV-08", "TRB-14")
def test_a_weight_that_leaves_the_device_at_step_five_ends_the_run_there_and_is_named(
    watched: Callable[..., Any],
) -> None:
    run, lines = watched({"fault": "moves", "at": 5}, loop={"max_steps": 9})
    assert run.result["status"] == "failed" and run.result["steps"] == 4
    assert "layers.0.weight is on meta, expected every tensor on cpu" in run.result["reason"], run.result
    line = 1 + GUEST.read_text().splitlines().index("class Watched(nn.Module):")
    assert f"it is of Watched (watching.py:{line}), and something moved it during training" in run.result["reason"]
    assert [step for step, _ in run.losses()] == [1, 2, 3, 4]
    assert {row["step"] for row in run.events("fault")} == {5}
    assert {row["error"] for row in run.events("fault")} == {"DevicePlacementError"}
    assert max(line["step"] for line in lines) == 4, "no step was committed with it"


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.covers("COMP-05")
def test_the_report_says_what_compilation_achieved_for_each_part(fit: Callable[..., Any], place: Any) -> None:
    """One part compiles and compiles again after step 3, one has a graph break, one runs eager."""
    shutil.copy(GUEST, place.folder)
    loop = {"max_steps": 5, "compile": "default", "compile_parts": ["smooth", "looks", "plain"]}
    data = {"source": "watching:rows", "eval_fraction": 0.0}
    run = fit(place.job(model={"builder": "watching:parted"}, data=data, loop=loop), timeout=LIMIT_S)
    assert run.result["status"] == "done", run.result
    text = summary_from_text((run.path / "report" / "performance_summary.txt").read_text())
    twin = json.loads((run.path / "report" / "performance_summary.json").read_text())
    assert text["compile"] == twin["compile"] == "default", "requested"
    assert json.loads(text["compile_parts"]) == {"smooth": "compiled", "looks": "compiled", "plain": "eager"}
    assert text["compile_achieved"] == "2 of 3 parts"
    # Graphs: one of each of two parts, one more behind the break, one more after step 3. The number that passes the
    # break differs in step 2, whose graph is compiled again; in step 3 the part is traced again, for any number.
    figures = ("compile_graphs", "compile_graph_breaks", "compile_recompiles")
    assert [int(text[name]) for name in figures] == [7, 3, 4] == [twin[name] for name in figures]
    assert "torch.compiler.disable()" in text["compile_reasons"] and ".item()" not in text["compile_reasons"]
    (early, *_, last) = run.events("compile")
    assert (early["step"], last["step"], early["recompiles"]) == (1, 4, 0)
    assert twin["compile_seconds"] == pytest.approx(run.result["time"]["compile"], rel=1e-3) and last["seconds"] > 0
    assert last["seconds"] > early["seconds"] == pytest.approx(sum(part["seconds"] for part in early["parts"]))
