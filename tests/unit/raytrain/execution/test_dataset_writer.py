"""The process that writes Ray Datasets starts Ray only for a function that uses it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from raytrain.errors import InputError
from raytrain.execution import dataset_writer
from raytrain.execution.dataset_writer import write_datasets

ROWS = 'def rows():\n    return {"train": {"x": [[1.0], [2.0]], "labels": [0, 1]}, "eval": None}\n'


class Ray:
    """Replaces `ray` in the process that calls the function."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def is_initialized(self) -> bool:
        return bool(self.started)

    def init(self, *, ignore_reinit_error: bool) -> str:
        return "connected"


@pytest.mark.parametrize("fails", [False, True])
def test_ray_starts_when_the_function_first_uses_it(
    fails: bool, user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    rays_own = ray.init

    def start_ray(address: str, options: Any, *, folder: str, imports: str, key: str) -> None:
        assert ray.init == rays_own, "while it is started"
        if fails:
            raise InputError(key, got=address, expected="a head")
        ray.started.append({"address": address, "folder": folder})

    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(dataset_writer, "start_ray", start_ray)
    monkeypatch.setattr(dataset_writer, "take_variables", lambda: None)
    code = "import ray\n" + ROWS + "def used():\n    assert ray.init(num_cpus=3) == ray.init() == 'connected'\n"
    (user_folder / f"writer_guest_{fails}.py").write_text(code + "    return rows()\n")
    request = {"keys": {}, "folder": "", "cluster": {"address": "10.0.0.4:1", "folder": "f", "options": {}}}
    with warnings.catch_warnings():
        assert write_datasets({**request, "source": f"writer_guest_{fails}:rows"}) == {"written": False}
        assert not ray.started
        monkeypatch.setattr(ray, "init", rays_own)
        answer = write_datasets({**request, "source": f"writer_guest_{fails}:used"})
    if fails:
        fields = {"key": "RAY_ADDRESS", "got": "10.0.0.4:1", "expected": "a head", "remedy": ""}
        assert answer == {"ray": ["RAY_ADDRESS: got 10.0.0.4:1, expected a head", fields]}
    else:
        assert answer == {"written": False} and ray.started == [{"address": "10.0.0.4:1", "folder": "f"}]
