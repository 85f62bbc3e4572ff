"""Observers: guests that see every row and can change nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from raytrain.errors import InputError
from raytrain.execution.reporter import Observers, TensorBoard, load_observers
from raytrain.runs.folder import MirroredFolder, RunFolder


class Both:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        self.seen.append(("metrics", row["step"]))

    def event(self, row: dict[str, Any]) -> None:
        self.seen.append(("event", row["step"]))


class OnlyEvents:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def event(self, row: dict[str, Any]) -> None:
        self.seen.append(row["step"])

    def __call__(self, row: dict[str, Any]) -> None:
        raise AssertionError("an object with verbs is not called")


class Needs:
    def __init__(self, something: int) -> None:
        self.something = something


def test_observer_objects_get_the_rows_of_their_methods_and_functions_all_rows() -> None:
    both, events, rows = Both(), OnlyEvents(), []
    observers = Observers([both, events, rows.append], on_failure=lambda *_: pytest.fail("nobody failed"))
    observers.call("metrics", {"step": 1})
    observers.call("event", {"step": 2})
    observers.call("close")
    assert both.seen == [("metrics", 1), ("event", 2)] and events.seen == [2] and rows == [{"step": 1}, {"step": 2}]


def test_a_raising_observer_is_reported_once_and_not_called_again() -> None:
    failures: list[tuple[str, str]] = []
    calls: list[int] = []

    def guest(row: dict[str, Any]) -> None:
        calls.append(row["step"])
        raise KeyError("missing")

    observers = Observers([guest], on_failure=lambda name, trace: failures.append((name, trace)))
    observers.call("metrics", {"step": 1})
    observers.call("metrics", {"step": 2})
    assert calls == [1] and failures[0][0] == "function" and "KeyError: 'missing'" in failures[0][1]


def test_a_row_is_the_observers_own_copy_down_to_its_lists() -> None:
    row = {"step": 1, "load": [1, 2]}
    observers = Observers([lambda mine: mine["load"].clear()], on_failure=lambda *_: pytest.fail("nobody failed"))
    observers.call("metrics", row)
    assert row == {"step": 1, "load": [1, 2]}


def test_observers_are_found_by_name_and_built_without_arguments() -> None:
    found = {"mine:Both": Both, "mine:function": print}
    built = load_observers(list(found), lambda name, key: found[name])
    assert isinstance(built[0], Both) and built[1] is print
    with pytest.raises(InputError, match=r"telemetry\.observers: got mine:Needs .*something.*takes no arguments"):
        load_observers(["mine:Needs"], lambda name, key: Needs)


def scalars(folder: Path) -> set[tuple[str, int, float]]:
    """What a TensorBoard file holds: records of (length, crc, data, crc)."""
    found = set()
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found |= {(value.tag, event.step, value.simple_value) for value in event.summary.value}
            at += size + 16
    return found


def test_tensorboard_files_hold_each_number_of_each_row(tmp_path: Path) -> None:
    board = TensorBoard(MirroredFolder(RunFolder(str(tmp_path)), "board"))
    board.metrics({"kind": "train", "step": 3, "loss": 1.5, "mfu": None, "epoch": 2, "grad_norm": float("nan")})
    board.metrics({"kind": "eval", "step": 4, "loss": 2.5})
    board.close()
    assert scalars(tmp_path / "board") == {("train/loss", 3, 1.5), ("train/epoch", 3, 2.0), ("eval/loss", 4, 2.5)}


def test_a_full_disk_under_tensorboard_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The queue of tensorboardX holds ten events, which its thread no longer takes once a write has failed."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = TensorBoard(MirroredFolder(RunFolder(str(tmp_path)), "board"))
    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter._write_serialized_event", full)
    with pytest.raises(OSError, match="No space left"):
        for step in range(1000):
            board.metrics({"kind": "train", "step": step, "loss": 1.0, "epoch": 1})
    board.close()
    assert not recwarn.list, "its thread has not failed"
