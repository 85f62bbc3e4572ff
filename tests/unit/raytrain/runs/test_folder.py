"""The run folder: new each time, owned by one, on a disk or in an object store."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raytrain.errors import InputError, RunError
from raytrain.runs import folder as attempts
from raytrain.runs import storage
from raytrain.runs.folder import RunFolder, find_unfinished, process_start, this_process
from raytrain.runs.records import StepRecord, rows_of

JOB = {"model": {"builder": "m:f"}, "optim": {"betas": [0.9, 0.99]}, "loop": {"max_steps": 5}}


@pytest.fixture(params=["local", "object store"])
def save_dir(request, tmp_path):
    """A `save.dir` of both kinds; the object store is pyarrow's local file system under a URI."""
    return str(tmp_path / "runs") if request.param == "local" else f"file://{tmp_path}/runs"


def on_disk(run: RunFolder) -> Path:
    return Path(run.path.removeprefix("file://"))


@pytest.mark.covers("VIS-01")
def test_every_run_gets_its_own_timestamped_folder(save_dir):
    runs = [RunFolder.create(save_dir, "bert-1.5_x") for _ in range(3)]
    names = [run.path.rpartition("/")[2] for run in runs]
    assert len(set(names)) == 3
    runs[0].write_text("note.txt", "first")
    again = RunFolder.create(save_dir, "bert-1.5_x")
    assert runs[0].read_text("note.txt") == "first" and not again.exists("note.txt")
    stem, _, stamp = names[0].rpartition("-")
    assert stem == "bert-1.5_x" and len(stamp) == len("20260101T000000Z") and stamp.endswith("Z")


def test_runs_of_the_same_second_are_numbered(save_dir, monkeypatch):
    from datetime import UTC, datetime

    class Frozen(datetime):
        """The same second for everybody."""

        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    monkeypatch.setattr("raytrain.runs.folder.datetime", Frozen)
    names = [RunFolder.create(save_dir, "a").path.rpartition("/")[2] for _ in range(3)]
    assert names == ["a-20260102T030405Z", "a-20260102T030405Z-2", "a-20260102T030405Z-3"]


def test_racing_creators_never_share_a_folder(tmp_path):
    start = threading.Barrier(8)
    made = []

    def create():
        start.wait()
        made.append(RunFolder.create(str(tmp_path), "race").path)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert (tmp_path / "latest").resolve() in {Path(path).resolve() for path in made}


def test_latest_points_to_the_newest(save_dir):
    RunFolder.create(save_dir, "a")
    newest = RunFolder.create(save_dir, "a")
    assert RunFolder.open(f"{save_dir}/latest").path == newest.path
    latest = on_disk(newest).parent / "latest"
    if newest.is_local:
        assert os.readlink(latest) == on_disk(newest).name
    else:
        assert latest.read_text() == on_disk(newest).name + "\n"


def test_relative_and_home_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert RunFolder.create("runs", "a").path.startswith(f"{tmp_path}/runs/a-")
    assert RunFolder.create("~/runs", "a").path.startswith(f"{tmp_path}/home/runs/a-")


@pytest.mark.parametrize("place", ["a file", "below a file", "unknown scheme", "latest is a directory"])
def test_a_save_dir_that_cannot_be_written_is_wrong_input(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "latest").mkdir(parents=True)
    path = {
        "a file": f"{tmp_path}/file",
        "below a file": f"{tmp_path}/file/runs",
        "unknown scheme": "s4://bucket/runs",
        "latest is a directory": f"{tmp_path}/taken",
    }[place]
    with pytest.raises(InputError) as caught:
        RunFolder.create(path, "a")
    assert caught.value.key == "save.dir" and path in caught.value.got
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "taken") == ["latest"]


def test_opening_an_empty_path_is_an_input_error(tmp_path, save_dir):
    with pytest.raises(InputError, match="which does not exist"):
        RunFolder.open(f"{save_dir}/none")


def test_json_text_and_rows_round_trip(save_dir):
    run = RunFolder.create(save_dir, "a")
    run.write_json(run.plan, {"lr": float("inf"), "betas": (0.9, 0.99)})
    assert run.read_json("plan.json") == {"lr": float("inf"), "betas": [0.9, 0.99]}
    assert json.loads((on_disk(run) / "plan.json").read_text())["lr"] == "inf"
    run.write_text("deep/er/a.txt", "x")
    assert run.exists("deep/er/a.txt") and run.read_text(f"{run.path}/deep/er/a.txt") == "x"
    run.append_event({"kind": "a"})
    run.append_event({"kind": "b"})
    run.flush()
    assert [row["kind"] for row in run.read_rows(run.events)] == ["a", "b"]
    assert run.read_rows("metrics.jsonl") == []
    with pytest.raises(FileNotFoundError):
        run.read_json(run.result)
    (on_disk(run) / "result.json").write_text("{")
    with pytest.raises(RunError, match=r"result\.json"):
        run.read_json(run.result)
    copy = pickle.loads(pickle.dumps(run))
    assert copy.path == run.path and copy.read_rows(copy.events) == run.read_rows(run.events)
    run.close()


def test_truncated_metrics_hold_each_step_once_and_an_old_writer_is_cut_off(tmp_path):
    run = RunFolder.create(str(tmp_path), "a")
    old = RunFolder(run.path).writer("metrics.jsonl")
    for step in range(1, 6):
        old.write(StepRecord(step=step, epoch=0, loss=1 / step).to_row())
    assert run.truncate_metrics(3) == 2
    old.write(StepRecord(step=6, epoch=0, loss=0.0).to_row())
    run.writer(run.metrics).write(StepRecord(step=4, epoch=0, loss=0.25).to_row())
    assert [row["step"] for row in run.read_rows(run.metrics)] == [1, 2, 3, 4]
    assert run.read_rows(run.metrics)[2]["loss"] == 1 / 3


def test_rows_and_traces_of_experts_are_truncated_with_the_metrics(tmp_path):
    run = RunFolder.create(str(tmp_path), "a")
    for step in (10, 20, 30):
        run.writer(run.experts).write({"kind": "load", "step": step})
        run.write_bytes(run.routing_trace(step - 5), b"x")
    assert run.truncate_metrics(20) == 0
    assert [row["step"] for row in run.read_rows(run.experts)] == [10, 20]
    assert [entry.name for entry in run.store.entries("routing")] == ["step_00000005.npz", "step_00000015.npz"]


def test_truncation_on_an_object_store(tmp_path):
    run = RunFolder.create(f"file://{tmp_path}", "a")
    for step in range(1, 4):
        run.writer(run.metrics).write({"kind": "train", "step": step})
    assert run.truncate_metrics(1) == 2
    run.writer(run.metrics).write({"kind": "train", "step": 2})
    run.close()
    assert [row["step"] for row in rows_of((on_disk(run) / "metrics.jsonl").read_bytes(), origin="")] == [1, 2]


def test_attempts_are_numbered_and_owned(save_dir):
    run = RunFolder.create(save_dir, "a")
    assert run.current_attempt() == 0 and run.alive()["pid"] == os.getpid()
    assert run.next_attempt(this_process()) == 1
    dead = {"host": this_process()["host"], "pid": 1, "start": -1}
    assert RunFolder(run.path).next_attempt(dead) == 2
    assert run.current_attempt() == 2 and run.owner()["pid"] == 1
    assert run.alive() is None


def test_racing_attempts_get_different_numbers(tmp_path):
    run = RunFolder.create(str(tmp_path), "a")
    start = threading.Barrier(8)
    taken = []

    def take():
        start.wait()
        taken.append(RunFolder(run.path).next_attempt(this_process()))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 9))


def test_a_killed_owner_is_dead_at_once_even_as_a_zombie(tmp_path):
    run = RunFolder.create(str(tmp_path), "a")
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        owner = {**this_process(), "pid": child.pid, "start": process_start(child.pid)}
        run.next_attempt(owner)
        assert run.alive()["pid"] == child.pid
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has fetched its status
        assert os.path.exists(f"/proc/{child.pid}") and run.alive() is None


def test_a_finished_run_is_not_alive_though_its_notebook_is(tmp_path):
    run = RunFolder.create(str(tmp_path), "a")
    run.next_attempt(this_process())
    run.write_json(run.result, {"status": "failed"})
    os.utime(f"{run.path}/attempts/0001.json", (1_000, 1_000))
    assert run.alive() is None and not run.finished()
    run.next_attempt(this_process())
    os.utime(run.result, (2_000, 2_000))
    assert run.alive()["pid"] == os.getpid()


def test_on_another_host_the_heartbeat_decides(save_dir, monkeypatch):
    run = RunFolder.create(save_dir, "a")
    run.next_attempt({"host": "elsewhere", "pid": 1, "start": 1})
    assert run.alive() is None
    run.heartbeat()
    assert run.alive()["host"] == "elsewhere"
    later = attempts.time.time() + attempts.HEARTBEAT_S + 1
    monkeypatch.setattr(attempts.time, "time", lambda: later)
    assert run.alive() is None


def test_resume_auto_resumes_the_newest_unfinished_run_of_this_job(save_dir, monkeypatch):
    def unfinished(job=JOB, name="a"):
        run = RunFolder.create(save_dir, name, job=job)
        run.next_attempt({"host": this_process()["host"], "pid": 1, "start": -1})
        return run

    assert find_unfinished(save_dir, "a", JOB) is None
    older, newer = unfinished(), unfinished()
    unfinished({**JOB, "seed": 1})
    unfinished(name="a-b")
    assert find_unfinished(save_dir, "a", JOB).path == newer.path
    newer.write_json(newer.result, {"status": "interrupted"})
    assert find_unfinished(save_dir, "a", {**JOB, "optim": {"betas": (0.9, 0.99)}}).path == newer.path
    newer.write_json(newer.result, {"status": "done"})
    assert find_unfinished(save_dir, "a", JOB).path == older.path
    older.next_attempt(this_process())
    assert find_unfinished(save_dir, "a", JOB) is None


def test_a_job_with_python_objects_never_equals_another_job(tmp_path):
    run = RunFolder.create(str(tmp_path), "a", job={"model": {"module": object()}})
    run.next_attempt({"host": this_process()["host"], "pid": 1, "start": -1})
    assert find_unfinished(str(tmp_path), "a", {"model": {"module": object()}}) is None


def test_a_full_disk_names_the_file_the_room_and_the_key(tmp_path, monkeypatch):
    run = RunFolder.create(str(tmp_path), "a")
    run.write_text("result.json", "old")

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(RunError, match=r"result\.json.*No space left.*MiB free.*save\.keep.*save\.dir"):
        run.write_json(run.result, {"status": "done"})
    assert run.read_text("result.json") == "old"
    assert not [name for name in os.listdir(run.path) if name.endswith(".tmp")]
    monkeypatch.setattr("raytrain.runs.records.os.write", full)
    with pytest.raises(RunError, match=r"metrics\.jsonl.*No space left"):
        run.writer(run.metrics).write({"step": 1})


def test_local_paths_load_neither_torch_nor_pyarrow(tmp_path):
    code = (
        "import sys; from raytrain.runs.folder import RunFolder; "
        f"RunFolder.create({str(tmp_path)!r}, 'a'); "
        "print(sorted({'torch', 'pyarrow', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_listing_survives_files_that_come_and_go(tmp_path: Path) -> None:
    """The heartbeat's temporary file vanished while the attempts were listed, and the run seemed to have none."""
    store = storage.LocalStore(str(tmp_path))
    store.write_bytes("attempts/0001.json", b"{}")
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for number in range(20):
                (tmp_path / "attempts" / f"{number}.tmp").write_bytes(b"")
            for number in range(20):
                (tmp_path / "attempts" / f"{number}.tmp").unlink()

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        listings = [[entry.name for entry in store.entries("attempts")] for _ in range(3000)]
    finally:
        over.set()
        thread.join()
    assert all("0001.json" in names for names in listings)
    assert any(len(names) > 1 for names in listings), "nothing came and went"
