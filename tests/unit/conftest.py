"""The jobs and instruments of tests/numerics (`lab`, `gang`, `lives`) serve unit tests too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

PLACE = str(Path(__file__).resolve().parents[1] / "numerics")
if PLACE not in sys.path:
    sys.path.append(PLACE)


@pytest.fixture(autouse=True)
def no_ray_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Ray raises an error where none is running: by default it starts one, which later tests would use."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    if (hook := sys.modules.get("ray._private.auto_init_hook")) is not None:
        monkeypatch.setattr(hook, "enable_auto_connect", False)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, from which code is imported first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def ray_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that passes all of its checks ends with this error in the place of a start of Ray."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("jobs.driver.attempts.connected", refuse)
