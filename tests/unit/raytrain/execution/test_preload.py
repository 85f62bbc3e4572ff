"""What the processes of a private cluster import before they have work."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.ray_runtime import PRELOAD
from raytrain.execution import preload
from raytrain.execution.preload import FOR_ALL, FOR_WORKERS, take_number


def imports_of(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, processes: int) -> list[list[str]]:
    """The modules that each process imports before its first actor."""
    every: list[list[str]] = []
    for _ in range(processes):
        seen: list[str] = []
        every.append(seen)
        monkeypatch.setattr(importlib, "import_module", seen.append)
        started = preload.preload(environ, loader=SimpleNamespace(load_actor_class=lambda: None))
        assert started is not None
        started.join()
    return every


def test_as_many_processes_as_there_are_workers_import_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {PRELOAD: f"2:{tmp_path}/p"}
    workers, others = [*FOR_ALL, *FOR_WORKERS], [*FOR_ALL]
    assert imports_of(monkeypatch, environ, processes=4) == [workers, workers, others, others]
    assert "torch" in FOR_WORKERS and "torch" not in FOR_ALL


def test_numbers_are_taken_once(tmp_path: Path) -> None:
    assert [take_number(str(tmp_path / "p"), most=2) for _ in range(4)] == [0, 1, 2, 2]


def test_an_actor_is_created_after_the_import_under_way_and_starts_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    importing, go_on = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        importing.set()
        assert go_on.wait(60)
        done.append(name)

    def load_actor_class(job: str, *, described: str) -> str:
        done.append("actor")
        return job + described

    monkeypatch.setattr(importlib, "import_module", slow)
    loader = SimpleNamespace(load_actor_class=load_actor_class)
    started = preload.preload({PRELOAD: f"1:{tmp_path}/p"}, loader=loader)
    assert started is not None and importing.wait(60)
    made: list[str] = []
    actor = threading.Thread(target=lambda: made.append(loader.load_actor_class("a", described="b")))
    actor.start()
    assert started._has_work.wait(60) and done == []
    go_on.set()
    actor.join(60)
    assert done == [FOR_ALL[0], "actor"] and made == ["ab"]


def test_a_module_that_cannot_be_imported_is_left_to_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preload, "FOR_ALL", ("no_such_module", "json"))
    monkeypatch.setattr(preload, "FOR_WORKERS", ())
    started = preload.preload({PRELOAD: f"1:{tmp_path}/p"}, loader=SimpleNamespace(load_actor_class=lambda: None))
    assert started is not None
    started.join()
    assert (tmp_path / "p" / "0").exists()


@pytest.mark.parametrize("value", ["", "2", ":folder", "two:folder"])
def test_without_a_number_of_workers_and_a_folder_nothing_is_imported(value: str) -> None:
    assert preload.preload({PRELOAD: value}, loader=SimpleNamespace(load_actor_class=lambda: None)) is None


def test_another_ray_imports_nothing_in_advance(tmp_path: Path) -> None:
    for loader in (None, SimpleNamespace()):  # an import could meet that of an actor
        assert preload.preload({PRELOAD: f"1:{tmp_path}/p"}, loader=loader) is None
    assert not (tmp_path / "p").exists()
