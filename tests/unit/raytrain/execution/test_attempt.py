"""How an attempt begins: nothing is given up for an error of reading, and restarts come to an end."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab import MLP, class_rows, make_job

from raytrain.checkpoint.reader import list_checkpoints
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.data.rows.batches import Cursor
from raytrain.data.rows.residency import TransferCounts
from raytrain.errors import CollectiveFailed, InputError
from raytrain.execution.recovery import agree_on_start, take_attempt_number
from raytrain.execution.worker import Worker, fault_of, transfers_row
from raytrain.runs import storage
from raytrain.runs.faults import read_faults, record_lost_ranks, write_fault
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(str(tmp_path), "a")
    made.next_attempt({"pid": 1})
    with CheckpointWriter(made, keep=3, asynchronous=False) as writer:
        writer.save({"model": {"w": torch.ones(3)}}, {"step": 5}, step=5)
    return made


def started_attempt(run: RunFolder, **sections: Any) -> Any:
    """As a worker does: a number, the checkpoint; what goes wrong is a fault of that attempt."""
    job, _ = make_job(MLP, {"train": class_rows(64)}, run=run, **sections)
    job.owner.update({"pid": 1})
    faults = read_faults(run, since=1)
    attempt = take_attempt_number(job, run, faults=faults)
    try:
        return agree_on_start(job, run, workers=Workers(), attempt=attempt, faults=faults)
    except OSError as error:
        write_fault(run, fault_of(error, attempt=attempt, rank=0, step=0, precision="", from_step=0))
        return error


def test_unreadable_data_ends_attempts_and_after_the_limit_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_arguments: Any) -> str:
        raise OSError(116, os.strerror(116))

    with monkeypatch.context() as patch:
        patch.setattr(storage.LocalStore, "local_copy", stale)
        started = [started_attempt(run) for _ in range(4)]
        assert [type(one) for one in started[:3]] == [OSError] * 3 and run.current_attempt() == 4
        assert started[3].decision.action == "stop" and started[3].checkpoint is None
        assert (
            "3 attempts ended without progress" in started[3].decision.reason and "Stale" in started[3].decision.reason
        )
    assert [info.step for info in list_checkpoints(run)] == [5]


def test_after_a_transient_error_a_run_resumes(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(storage.LocalStore, "read_head", lambda *_: (_ for _ in ()).throw(OSError(5, os.strerror(5))))
        assert isinstance(started_attempt(run), OSError)
    started = started_attempt(run)
    assert (started.attempt, started.decision.action, started.from_step, started.checkpoint.step) == (2, "go_on", 5, 5)


def test_a_rollback_that_is_newer_than_all_checkpoints_is_applied(run: RunFolder) -> None:
    assert started_attempt(run).cursor is None
    run.append_event({"kind": "decision", "what": "rollback", "value": 5, "epoch": 1, "position": 16})
    assert started_attempt(run).cursor == Cursor(1, 16)


@pytest.mark.covers("TRB-15")
def test_the_event_about_copies_has_the_sum_and_the_counts_of_each_rank() -> None:
    one, other = TransferCounts(3, 300, pinned=3, non_blocking=3), TransferCounts(2, 200, 5, pageable=2)
    row = transfers_row([one, other], device="cuda")
    assert (row["workers"], row["tensors"], row["bytes"], row["in_place"]) == (2, 5, 500, 5)
    assert (row["pinned"], row["non_blocking"], row["pageable"], row["other_device"]) == (3, 3, 2, 0)
    assert [rank["tensors"] for rank in row["ranks"]] == [3, 2] and "waited for 2 whose source" in row["reason"]


def test_an_error_of_the_users_code_is_told_with_its_own_frames_and_again_in_one_line(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong_net.py").write_text("def forward(x):\n    return part(x)\n\n\ndef part(x):\n    return x['y']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    forward = importlib.import_module("wrong_net").forward
    job, _ = make_job(MLP, {"train": class_rows(64)}, run=run)
    worker = Worker(job, workers=Workers(), local_rank=0, channel=None)
    worker.attempt = 2

    def told(call: Any) -> list[str]:
        try:
            torch.utils.checkpoint.checkpoint(call, {}, use_reentrant=False)
        except Exception as error:
            worker._print_error(error)
            write_fault(run, fault_of(error, attempt=2, rank=0, step=7, precision="", from_step=0))
        return capsys.readouterr().err.splitlines()

    lines = told(forward)
    assert lines[:2] == ["rank 0 failed at step 0: KeyError: 'y'", "it was raised at"] and "test_attempt.py" in lines[2]
    assert lines[3:] == [
        "  wrong_net.py:2 in forward: return part(x)",
        "  wrong_net.py:6 in part: return x['y']",
        f"all frames: {run.path}/faults/0002-rank00000.json",
    ]
    (fault,) = read_faults(run, since=1)
    assert fault.place == "wrong_net.py:6 in part" and fault.what == "KeyError: 'y' at wrong_net.py:6 in part"
    assert "checkpoint.py" in fault.traceback, "the record has all frames"
    worker._known_places = {fault.place}
    assert told(forward)[1:] == ["again at wrong_net.py:6 in part"]
    wrong = InputError("data.source", got="keys that forward does not accept", expected="x")

    def refuse(_: Any) -> None:
        raise wrong

    assert told(refuse) == [f"rank 0 failed at step 0: {wrong}"], "what is wrong with the input needs no frames"
    monkeypatch.setattr("raytrain.config.user_code.is_users_file", lambda path: False)
    assert told(forward)[0].startswith("Traceback"), "without a frame of the user all are shown"


def test_a_lost_node_explains_the_collective_that_failed_because_of_it(run: RunFolder) -> None:
    attempt = run.current_attempt()
    write_fault(run, fault_of(CollectiveFailed("pair.cc"), attempt=attempt, rank=0, step=7, precision="", from_step=5))
    assert [fault.error for fault in read_faults(run, since=1)] == ["CollectiveFailed"]
    record_lost_ranks(run, [0, 1], message="its node 10.0.0.2 was lost")
    (fault,) = read_faults(run, since=1)
    assert (fault.error, fault.rank, fault.message) == ("WorkerDied", 1, "its node 10.0.0.2 was lost")
    own = run.read_json(f"faults/{attempt:04d}-rank00000.json")
    assert own["error"] == "CollectiveFailed", "what a worker recorded itself stays"


def damage(run: RunFolder, step: int) -> None:
    """Change a byte of the weights of a checkpoint."""
    file = Path(run.checkpoint_dir(step), "model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_resume_without_a_valid_checkpoint_stops_and_a_restart_begins_at_step_0(run: RunFolder) -> None:
    damage(run, 5)
    stopped = started_attempt(run)
    assert (stopped.decision.action, stopped.from_step, len(stopped.damaged)) == ("stop", 0, 1)
    assert "step_00000005" in stopped.decision.reason and "SHA-256" in stopped.decision.reason
    assert f"`raytrain train {run.path}/job.yaml` starts a new run" in stopped.decision.reason
    write_fault(run, fault_of(ValueError("x"), attempt=1, rank=0, step=9, precision="", from_step=5))
    again = started_attempt(run)
    assert (again.attempt, again.decision.action, again.from_step) == (2, "go_on", 0)
    assert again.damage.startswith("damaged and not used: the checkpoint of step 5 (")
    assert again.damage.endswith("; training starts from step 0: there is no valid one")


def test_an_older_valid_checkpoint_in_place_of_a_damaged_one_is_named(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save that was interrupted is no damage: it is only recorded."""
    assert started_attempt(run).damage == ""
    with CheckpointWriter(run, keep=3, asynchronous=False) as writer:
        writer.save({"model": {"w": torch.ones(3)}}, {"step": 9}, step=9)
        writer.save({"model": {"w": torch.ones(3)}}, {"step": 12}, step=12)
    Path(run.checkpoint_dir(12), "COMPLETE").unlink()
    job, _ = make_job(MLP, {"train": class_rows(64)}, run=run)
    worker = Worker(job, workers=Workers(), local_rank=0, channel=None)
    worker.attempt = 1
    assert started_attempt(run).damage == "" and len(started_attempt(run).refused_checkpoints) == 1
    damage(run, 9)
    started = started_attempt(run)
    assert (started.from_step, [step for step, _ in started.damaged]) == (5, [9])
    capsys.readouterr()
    worker._open_reporter(started).close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("damaged and not used: the checkpoint of step 9 (") and "SHA-256" in line
    assert line.endswith("; training starts from that of step 5")


def test_the_driver_is_told_how_much_of_the_data_has_been_read(run: RunFolder) -> None:
    job, _ = make_job(MLP, {"train": class_rows(64)}, run=run)
    told: list[dict[str, Any]] = []
    channel = SimpleNamespace(report_progress=SimpleNamespace(remote=told.append))
    worker = Worker(job, workers=Workers(), local_rank=0, channel=channel)
    events: list[str] = []
    reporter: Any = SimpleNamespace(event=lambda kind, **_: events.append(kind))
    worker._say_event(reporter, "preparation", phase="start", reason="preparing")
    for done in (30, 60):
        reason = f"train: {done}/60 rows"
        worker._say_event(reporter, "preparation", phase="progress", done=done, of=60, reason=reason)
    worker._say_event(reporter, "decision", what="precision")
    assert told == [{"detail": ""}, {"detail": "reading train: 30/60 rows"}, {"detail": ""}]
    assert events == ["preparation"] * 3 + ["decision"]
