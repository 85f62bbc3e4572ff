"""Bench `startup`: each command's own first step is timed. The bench itself runs the real commands."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.bench import startup, startup_arms
from jobs.bench.harness.options import bench_verb
from raytrain.errors import RunError

SECONDS = {"job.yaml": 4.0, "train_with_ray": 8.0, "train_script": 1.0}


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, command: Any, *keys: str) -> tuple[int, dict[str, Any]]:
    """The document of the bench with another `run_command`."""
    monkeypatch.setattr(startup, "run_command", command)
    code = bench_verb("startup", list(keys), out=str(out), quick=True, as_json=False)
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_the_first_steps_of_three_commands_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def run(command: list[str], *, environment: dict[str, str] | None = None, **_: Any) -> str:
        begun.append(command[3] if environment is None else command[2])
        if environment is None:
            return json.dumps({"seconds": {"machines": float(begun.count("check")), "all": 9.0}})
        note = Path(environment[startup_arms.NOTE])
        assert not note.exists(), "of the command before"
        name = "job.yaml" if command[2] == "jobs" else command[3].partition(":")[2]
        settings = Path(command[-1] if command[2] == "jobs" else command[-2]).read_text()
        assert ("FirstStep" in settings) == (command[2] == "jobs") and (str(note) in settings) == (command[2] != "jobs")
        note.write_text(repr(time.time() + SECONDS[name]))
        return ""

    code, document = measured(monkeypatch, tmp_path / "a.json", run, "blocks=2", "dropped=1")
    assert code == 0 and begun.count("jobs") == 3 and len(begun) == 12
    ours, script, checked = document["ratios"]
    assert checked["goal"]["at_most"] == 1.3 and len(document["arms"]["raytrain check"]["values"]) == 2
    assert document["values"]["seconds of the machine part of raytrain check"] == [2.0, 3.0], "the first is dropped"
    assert ours["median"] == pytest.approx(0.5, rel=0.02) and ours["goal"] == {"at_least": None, "at_most": 1.15}
    assert ours["met"] and script["median"] == pytest.approx(4, rel=0.02) and len(ours["values"]) == 2


def test_a_command_without_a_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"jobs train .* took no step"):
        measured(monkeypatch, tmp_path / "b.json", lambda *_, **__: None)


def test_the_observer_notes_the_first_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup_arms.NOTE, str(tmp_path / "note"))
    observer = startup_arms.FirstStep()
    observer.metrics({"kind": "eval"})
    assert not (tmp_path / "note").exists()
    observer.metrics({"kind": "train"})
    first = (tmp_path / "note").read_text()
    observer.metrics({"kind": "train"})
    assert (tmp_path / "note").read_text() == first and float(first) <= time.time()


def test_the_script_takes_a_step(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the mill turns. " * 64)
    settings = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch": 4, "workers": 1, "threads": 1,
                "text": str(tmp_path / "text"), "note": str(tmp_path / "note")}  # fmt: skip
    startup_arms.train_script(settings, 0)
    assert float((tmp_path / "note").read_text()) <= time.time()
