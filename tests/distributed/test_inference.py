"""Batch inference on Ray Data's actors: the answers of one process, whatever is slow or dies in the middle."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from raytrain.infer.ray_data import LOST_STARTS
from raytrain.models.weights.stored import export_weights

ROWS, UNIT = 400, 20
GUEST = '''
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Fragile(nn.Module):
    """Sums of products; its process is killed at the 200th row, the first time that a marker can be made."""

    def __init__(self, marker):
        super().__init__()
        self.scale, self.marker = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3)), marker

    def forward(self, x):
        if self.marker and (x[:, 3] == 200).any():
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return (x / 100).sin() @ self.scale


def build(marker=None):
    return Fragile(marker)
'''


@pytest.mark.daily
@pytest.mark.timeout(300)
def test_a_killed_worker_costs_its_unit_and_changes_no_answer(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(GUEST)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    x[:, 3] = np.arange(ROWS)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet", row_group_size=30)
    common = ("infer", "fragile:build", "infer.input=in.parquet", f"infer.unit_rows={UNIT}", "infer.batch_size=7",
              "scale.threads=1")  # fmt: skip
    alone = run_cli(*common, "infer.output=one", cwd=tmp_path)
    assert alone.code == 0, alone.text
    both = run_cli(*common, "infer.output=two", "scale.workers=2", f"model.marker={tmp_path / 'killed'}", cwd=tmp_path,
                   timeout=240)  # fmt: skip
    assert both.code == 0, both.text
    assert (tmp_path / "killed").exists()
    first, second = ((tmp_path / name / "predictions.parquet").read_bytes() for name in ("one", "two"))
    assert first == second
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    workers = summary["workers"]
    assert len(workers) >= 2 and sum(worker["units"] for worker in workers) == ROWS // UNIT
    timing = parquet.read_table(tmp_path / "two/timing.parquet")
    assert len(set(timing["worker"].to_pylist())) == len(workers)
    assert min(worker["load_s"] for worker in workers) > 0


CRASHING = '''
import os
import signal

from torch import nn


class Crashing(nn.Linear):
    """Ends its process at the 200th row, each time."""

    def __init__(self, starts):
        super().__init__(4, 3)
        self.starts = starts

    def forward(self, x):
        if (x[:, 3] == 200).any():
            with open(self.starts, "a") as starts:
                starts.write("killed\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def build(starts):
    return Crashing(starts)
'''


@pytest.mark.timeout(200)
def test_a_unit_that_ends_its_worker_each_time_ends_the_job_with_its_rows(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    x = np.zeros((ROWS, 4), dtype=np.float32)
    x[:, 3] = np.arange(ROWS)
    parquet.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}), tmp_path / "in.parquet"
    )
    ended = run_cli(
        "infer", "crashing:build", f"model.starts={tmp_path / 'starts'}", "infer.input=in.parquet", "infer.output=out",
        f"infer.unit_rows={UNIT}", "infer.batch_size=7", "scale.workers=2", "scale.threads=1", cwd=tmp_path,
        timeout=180,
    )  # fmt: skip
    assert ended.code == 1 and (tmp_path / "starts").read_text() == "killed\n" * 3, ended.text
    assert "ended 3 times while it computed rows 200 to 219" in ended.err, ended.text
    assert "Warning" not in ended.text and "Traceback" not in ended.text, ended.text
    assert "--resume" in ended.text and any((tmp_path / "out/parts").iterdir())
    assert not (tmp_path / "out/predictions.parquet").exists()


STAGED = '''
import os
import signal

import torch
from torch import nn


class Fragile(nn.Linear):
    """The last layer; its process is killed in the 9th pass, the first time that a marker can be made."""

    passes, marker, always = 0, None, None

    def forward(self, x):
        self.passes += 1
        if self.always:
            with open(self.always, "a") as starts:
                starts.write("killed\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.marker and self.passes == 9:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, marker, always):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), Fragile(64, 3))
        self.net[-1].marker, self.net[-1].always = marker, always

    def forward(self, x):
        return self.net(x)


def build(marker=None, always=None):
    torch.manual_seed(0)
    return Stack(marker, always)
'''


def write_staged(folder: Path) -> None:
    """staged.py, its weights and in.parquet."""
    (folder / "staged.py").write_text(STAGED)
    built: dict[str, Any] = {}
    exec(STAGED, built)
    export_weights(built["build"]().state_dict(), str(folder / "model.safetensors"))
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}
    parquet.write_table(pa.table(columns), folder / "in.parquet", row_group_size=30)


@pytest.mark.timeout(300)
@pytest.mark.covers("PAR-06", "PAR-09")
def test_replicas_of_two_stages_answer_as_the_whole_model_also_when_a_stage_is_killed(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """Four processes, of which the second stage of one replica dies: the whole replica starts again."""
    write_staged(tmp_path)
    common = ("infer", "staged:build", "model.init_from=model.safetensors", "infer.input=in.parquet",
              f"infer.unit_rows={UNIT}", "infer.batch_size=5", "scale.threads=1")  # fmt: skip
    whole = run_cli(*common, "infer.output=one", cwd=tmp_path)
    assert whole.code == 0, whole.text
    split = run_cli(*common, "infer.output=two", "infer.stages=2", "scale.workers=2",
                    f"model.marker={tmp_path / 'killed'}", cwd=tmp_path, timeout=240)  # fmt: skip
    assert split.code == 0, split.text
    assert (tmp_path / "killed").exists()
    first, second = ((tmp_path / name / "predictions.parquet").read_bytes() for name in ("one", "two"))
    assert first == second
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    assert len(summary["workers"]) >= 2 and sum(worker["units"] for worker in summary["workers"]) == ROWS // UNIT
    stages = summary["stages"]
    assert sum(stages["bytes"]) == 4 * (4 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3) and min(stages["bytes"]) > 0
    assert len(stages["busy"]) == 2 and all(0 < share < 1 for share in stages["busy"])
    assert stages["passes"] >= ROWS // 5 and stages["rounds"] >= 1
    assert stages["bubble"] == pytest.approx(1 - sum(stages["busy"]) / 2)
    assert stages["expected_bubble"] == pytest.approx(1 / (stages["passes"] / stages["rounds"] + 1))
    assert "stages were busy" in split.text
    told = json.loads((tmp_path / "two/manifest.json").read_text())["stages"]
    assert told["balance"] == stages["balance"] == "by bytes" and f"balance: {told['balance']}" in split.text


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory, answer_of: Callable[..., Any]) -> tuple[Path, dict[str, Any]]:
    """A folder with a model for two stages, and what became of the jobs of stage_places.py."""
    folder = tmp_path_factory.mktemp("placed")
    write_staged(folder)
    return folder, answer_of("stage_places.py", folder, timeout=200)


@pytest.mark.timeout(220)
def test_a_replica_without_room_for_its_stages_names_what_is_free_and_gives_its_places_back(
    placed: tuple[Path, dict[str, Any]],
) -> None:
    seen = placed[1]["without room"]
    assert seen["error"] == (
        "infer.stages: got 2 stages, which need 2 CPU, expected as much free in the cluster within 2 s, where 1 of 3"
        " CPU are free; lower infer.stages, wait until other jobs end, or add nodes"
    )
    assert seen["left"] == []


@pytest.mark.timeout(220)
def test_three_replicas_with_room_for_one_do_not_hold_half_of_their_stages_each(
    placed: tuple[Path, dict[str, Any]],
) -> None:
    folder, seen = placed
    assert seen["three"] == {"error": "", "free": 1}, "the others hold nothing while they wait"
    workers = json.loads((folder / "three/summary.json").read_text())["workers"]
    assert [worker["units"] for worker in workers] == [ROWS // UNIT]


@pytest.mark.timeout(220)
def test_a_stage_that_dies_at_each_start_ends_the_job_with_its_error(placed: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = placed
    assert len((folder / "starts").read_text().splitlines()) == LOST_STARTS
    error = seen["killed"]
    assert f"{LOST_STARTS} times in a row a stage ended before a unit was complete; stage 1 of 0 to 1 ended" in error
    assert "worker process has died" in error


# ---------------------------------------------------------------- a cluster of three nodes

TEXTS, TEXT_UNIT = 1009, 16
LABELS = ("BULLISH", "BEARISH", "NEUTRAL")
GUESTS = Path(__file__).parent / "guest"


def write_job(folder: Path) -> None:
    """in.jsonl with texts of many lengths and a label each, and job.yaml."""
    draw = np.random.default_rng(0)
    words = [
        "the",
        "mill",
        "turns",
        "and",
        "the",
        "river",
        "runs",
        "when",
        "rain",
        "falls",
        "on",
        "an",
        "old",
        "roof",
        "of",
        "stone",
    ]
    with (folder / "in.jsonl").open("w") as file:
        for number in range(TEXTS):
            text = " ".join(draw.choice(words, size=int(draw.integers(3, 12))))
            row = {"id": f"q{number:04d}", "question": text, "label": str(draw.choice(LABELS))}
            file.write(json.dumps(row) + "\n")
    infer = {
        "input": str(folder / "in.jsonl"), "template": "Q: {question} A:", "max_new_tokens": 3, "batch_size": TEXT_UNIT,
        "unit_rows": TEXT_UNIT, "id_column": "id", "label": "label",
    }  # fmt: skip
    job = {
        "name": "exact", "model": {"builder": "exact_code:build", "context": 128},
        "data": {"source": "stdlib", "max_bytes": 10000}, "infer": infer, "scale": {"threads": 1},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, start_module_python: Callable[..., Any]) -> Path:
    """A folder with job.yaml and, in `alone`, the answers of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("texts")
    write_job(folder)
    (folder / "orders").mkdir()
    command = in_process(start_module_python, folder, f"infer.output={folder / 'alone'}")
    finished = command.finish(timeout=200)
    assert finished.code == 0, finished.text
    return folder


def in_process(start: Callable[..., Any], folder: Path, *more: str) -> Any:
    """The job as a command with one worker, which needs no Ray."""
    given = ("-m", "jobs", "infer", str(folder / "job.yaml"), *more)
    return start(*given, cwd=GUESTS, env={"ORDERS": str(folder / "orders")})


@pytest.fixture(scope="module")
def disturbed(texts: Path, answer_of: Callable[..., Any]) -> dict[str, Any]:
    """What exact_inference.py saw, in the same folder."""
    return answer_of("exact_inference.py", texts, timeout=560)


def same(texts: Path, output: str) -> bool:
    """Whether a job left the predictions of one process, bit for bit."""
    alone, found = ((texts / name / "predictions.parquet").read_bytes() for name in ("alone", output))
    return alone == found


@pytest.mark.timeout(590)
@pytest.mark.covers("PAR-10", "INF-03", "INF-16")
def test_four_workers_answer_each_row_once_as_one_process_does(disturbed: dict[str, Any], texts: Path) -> None:
    assert same(texts, "four")
    table = parquet.read_table(texts / "four/predictions.parquet")
    given = [json.loads(line) for line in (texts / "in.jsonl").read_text().splitlines()]
    assert table.select(["id", "label"]).to_pylist() == [{"id": row["id"], "label": row["label"]} for row in given]
    assert table["status"].to_pylist() == ["ok"] * TEXTS
    assert disturbed["four"]["rows"] == TEXTS, "no row is computed by two of them"
    timing = parquet.read_table(texts / "four/timing.parquet")
    assert len(set(timing["worker"].to_pylist())) == 4 and not any(timing["again"].to_pylist())
    assert timing["row"].to_pylist() == list(range(TEXTS))


@pytest.mark.timeout(590)
@pytest.mark.covers("PAR-11", "PERF-32", "PERF-36")
def test_four_workers_compute_four_units_in_the_time_of_one(disturbed: dict[str, Any], texts: Path) -> None:
    """Each unit waits for three others to begin: with a worker that idles, a group would stay incomplete. One worker
    computes the same answers in one turn after another."""
    seen, one = disturbed["four"], disturbed["one"]
    (turns,) = one["units"].values()
    assert turns == -(-TEXTS // TEXT_UNIT) and one["rows"] == seen["rows"] == TEXTS and same(texts, "one")
    assert seen["incomplete"] == 0 and turns / max(seen["units"].values()) >= 3.5
    assert len(seen["loads"]) == len({process for process, _ in seen["loads"]}) == 4, "one load for each worker"
    workers = json.loads((texts / "four/summary.json").read_text())["workers"]
    assert min(worker["load_s"] for worker in workers) > 0


@pytest.mark.timeout(590)
@pytest.mark.covers("PERF-35", "NODE-05")
def test_each_of_four_workers_computes_a_quarter_of_the_units(disturbed: dict[str, Any]) -> None:
    """So units of equal length take four workers a quarter of the time of one, and at most one more at the end."""
    seen = disturbed["four"]
    assert sorted(seen["grouped"].values()) == [15] * 4 and sum(seen["units"].values()) == 64
    assert max(seen["units"].values()) <= 17 and seen["rows"] == TEXTS, "and no row is computed twice"


@pytest.mark.timeout(590)
@pytest.mark.covers("INF-13")
def test_a_worker_five_times_slower_holds_up_nothing(disturbed: dict[str, Any], texts: Path) -> None:
    """In units of the fast worker's time; half of the units for each would take 160."""
    seen = disturbed["slow"]
    slow = seen["units"].pop(seen["slow"])
    (fast,) = seen["units"].values()
    ideal = (slow + fast) / (1 + 1 / 5)
    assert max(fast, 5 * slow) <= 1.3 * ideal < 5 * (slow + fast) / 2
    assert same(texts, "slow")


@pytest.mark.timeout(590)
@pytest.mark.covers("INF-05")
def test_each_actor_sees_its_own_gpu(disturbed: dict[str, Any]) -> None:
    assert disturbed["devices"] == ["0", "1"]


@pytest.mark.timeout(590)
@pytest.mark.covers("NODE-11")
def test_a_killed_worker_node_or_driver_changes_no_answer_and_costs_a_unit_a_worker(
    disturbed: dict[str, Any], texts: Path
) -> None:
    worker, node = disturbed["worker"], disturbed["node"]
    assert same(texts, "worker") and same(texts, "node")
    assert 0 < worker["rows"] - TEXTS <= TEXT_UNIT, "the unit that it was killed in"
    assert len(worker["loads"]) == 3, "another worker takes the place of the killed one"
    assert node["rows"] - TEXTS <= 2 * TEXT_UNIT, node  # processes of the lost node may still write what they began
    assert node["code"] == 0 and len(node["loads"]) > 4
    first, second = disturbed["driver"]["first"], disturbed["driver"]["second"]
    assert same(texts, "driver") and len(first["units"]) == 2
    assert 0 < first["rows"] + second["rows"] - TEXTS <= 2 * TEXT_UNIT


@pytest.mark.timeout(590)
def test_a_unit_that_a_killed_worker_had_written_is_not_computed_again(disturbed: dict[str, Any], texts: Path) -> None:
    """The worker dies between the unit's file and its report, which the one in its place finds in the file."""
    found = disturbed["reporting"]
    assert len(found["loads"]) == 3 and found["rows"] == TEXTS and same(texts, "reporting")


@pytest.mark.timeout(300)
def test_one_process_that_is_killed_resumes_with_the_unit_it_was_in(
    texts: Path, start_python: Callable[..., Any], place: Any
) -> None:
    orders = texts / "orders"
    shutil.rmtree(orders)
    orders.mkdir()
    (orders / "at").write_text("9")
    (orders / "mode").write_text("hold")
    command = in_process(start_python, texts, f"infer.output={texts / 'killed'}")
    place.wait_for(lambda: list(orders.glob("held-*")), limit=120, command=command)
    command.signal_group(signal.SIGKILL)
    command.process.wait()
    begun = Counter(line.split()[0] for line in (orders / "units").read_text().splitlines())
    (orders / "mode").write_text("")
    resumed = in_process(start_python, texts, "--resume", str(texts / "killed")).finish(timeout=120)
    assert resumed.code == 0, resumed.text
    units = len((orders / "units").read_text().splitlines())
    assert sum(begun.values()) == 9 and units == -(-TEXTS // TEXT_UNIT) + 1
    assert same(texts, "killed")
