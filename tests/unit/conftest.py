"""The jobs and instruments of tests/numerics (`lab`, `gang`, `lives`) serve unit tests too."""

from __future__ import annotations

import sys
from pathlib import Path

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
