"""The lines that a person with GPUs runs: complete, and as the README of tests/gpu lists them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import measure
import pytest
import run
import test_runs
from lines import LINES, Line, markdown

GPU = Path(__file__).resolve().parents[2] / "gpu"


def test_the_readme_lists_the_lines_as_they_are() -> None:
    assert f"-->\n\n{markdown()}\n<!-- end of lines" in (GPU / "README.md").read_text(encoding="utf-8")


def test_every_line_has_a_body_and_what_it_equals_runs_before_it() -> None:
    names = [line.name for line in LINES]
    assert len(set(names)) == len(names)
    for number, line in enumerate(LINES):
        assert line.measure == "" or line.measure in {subject.__name__ for subject in measure.SUBJECTS}, line
        assert line.test == "" or (GPU / line.test.partition(" ")[0]).is_file(), line
        assert line.equals == "" or line.equals in names[:number], line
        processes = line.job.get("scale.workers", 1) + (
            hosts if isinstance(hosts := line.job.get("experts.hosts", 0), int) else 0
        )
        share = line.job.get("scale.gpus_per_worker", 1)
        assert line.test or line.environ or round(processes * share) == line.gpus, f"{line.name} needs {processes} GPUs"


def test_lines_on_two_nodes_cannot_fit_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for largest in (1, 4, 8):
        monkeypatch.setenv("RAYTRAIN_GPU_LARGEST", str(largest))
        for line in LINES:
            if line.across:
                processes = test_runs.workers_of(line) + line.gpus - line.job["scale.workers"]
                assert line.nodes == 2 and processes == largest + 1, line.name


def test_two_nodes_are_seen_in_the_events(tmp_path: Path) -> None:
    """Of the workers, or of a host on another node than theirs."""

    def nodes(workers: int, here: int, *hosts: str) -> int:
        attempt = {"kind": "attempt", "workers": workers, "workers_on_node": here, "node": "a"}
        ready = {"kind": "expert_hosts", "hosts": [{"node": name} for name in hosts]}
        (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, (attempt, ready))), encoding="utf-8")
        return test_runs.nodes_of(tmp_path)

    assert [nodes(3, 2), nodes(2, 2, "b"), nodes(2, 2, "a"), nodes(1, 1)] == [2, 2, 1, 1]


def test_what_takes_times_or_fills_the_memory_or_kills_runs_alone() -> None:
    plain, other = Line("plain", 1, "", ""), Line("other", 1, "", "", measure="numerics")
    timed, pair, last = Line("timed", 1, "", "", alone=True), Line("pair", 2, "", ""), Line("last", 1, "", "")
    killing = Line("killing", 1, "", "", kills="TrainWorker")
    lines = [plain, other, timed, last, pair, plain, killing, last]
    groups = run._side_by_side(lines, "")
    assert groups == [[plain, other], [timed], [last], [pair], [plain], [killing], [last]]
    assert run._side_by_side(lines, "auto") == [[line] for line in lines], "a cluster of others is not crowded"


def test_a_line_without_time_left_does_not_run_and_the_table_stands_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["run.py", "--only", "machine,ceilings", "--folder", f"{tmp_path}/runs", "--out", f"{tmp_path}/out"]
    monkeypatch.setattr("sys.argv", [*given, "--seconds", "7"])
    assert run.main() == 0
    table = (tmp_path / "out/table.txt").read_text()
    assert [row.split()[:2] for row in table.splitlines()] == [["machine", "-"], ["ceilings", "-"]]
    assert table in capsys.readouterr().out and "--seconds" in table
    board = run.Board(tmp_path / "runs", tmp_path / "out", until=0.0)
    (tmp_path / "runs/ceilings.log").write_text('a warning\n{"name": "copy", "gb_s": 4201.2}\nE   slow\n')
    board.note(Line("ceilings", 1, "", ""), "FAILED", 2.0, "slow")
    assert json.loads((tmp_path / "out/results.jsonl").read_text()) == {
        "line": "ceilings",
        "name": "copy",
        "gb_s": 4201.2,
    }
    with tarfile.open(tmp_path / "out/logs.tar.gz") as logs:
        assert logs.getnames() == ["ceilings.log"]
