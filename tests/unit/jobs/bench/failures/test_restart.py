"""Bench `restart` reads the notes of two worker groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.bench.failures import restart


def test_a_step_counts_once_its_line_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv(restart.NOTE, str(notes))
    assert restart._after(notes, 1) is None
    restart.note_step(1)
    restart.note_step(2)
    own = os.getpid()
    assert restart._after(notes, 3) is None and restart._after(notes, 2) == (own, 2) == restart._last(notes)
    with notes.open("a") as file:
        file.write("7 1")
    assert restart._first_of_another(notes, own) is None, "the line is being written"
    with notes.open("a") as file:
        file.write("1\n")
    assert restart._first_of_another(notes, own) == (7, 11)
