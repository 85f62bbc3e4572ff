"""Whether a user's function may return Ray Datasets is decided from what its modules import."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.environment import KEPT
from raytrain.config.sections import DataConfig
from raytrain.config.user_code import resolve
from raytrain.data.sources import ray_dataset
from raytrain.data.sources.open import open_source
from raytrain.errors import RunError

ROWS = 'def rows():\n    return {"train": {"x": [[1.0], [2.0]], "labels": [0, 1]}, "eval": None}\n'
IMPORTS = {
    "in a function": ("def other():\n    import ray.data\n" + ROWS, True),
    "from it": ("from ray.data import range as numbers\n" + ROWS, True),
    "by name": ('import importlib\nlater = lambda: importlib.import_module("ray.data")\n' + ROWS, True),
    "in another module": ("from imports_guest_other import made\n" + ROWS, True),
    "in a module that a function imports": ("def other():\n    import imports_guest_other\n" + ROWS, True),
    "in a package": ("from imports_package.deep import made\n" + ROWS, True),
    "words": ('"""Cuts each ray of light; see https://docs.ray.io."""\nray = "import ray"\n' + ROWS, False),
    "another package": ("import array as ray\nimport rayon_guest\n" + ROWS, False),
    "an installed package that uses Ray": ("import torch.utils.data\n" + ROWS, False),
}


@pytest.fixture
def folder(user_folder: Path) -> Path:
    (user_folder / "imports_guest_other.py").write_text("def made():\n    import ray\n    return ray\n")
    (user_folder / "rayon_guest.py").write_text("raying = 1\n")
    deep = user_folder / "imports_package" / "deep"
    deep.mkdir(parents=True)
    (deep.parent / "__init__.py").write_text("")
    (deep / "__init__.py").write_text("from ..reader import made\n")
    (deep.parent / "reader.py").write_text("def made():\n    from ray import data\n    return data\n")
    return user_folder


@pytest.mark.parametrize("how", IMPORTS)
def test_only_code_that_imports_ray_is_asked_for_ray_datasets(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, imports = IMPORTS[how]
    module = f"imports_guest_{list(IMPORTS).index(how)}"
    (folder / f"{module}.py").write_text(code)
    asked: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, '{"written": false}', "")

    monkeypatch.setattr(ray_dataset.subprocess, "run", run)
    data = DataConfig(source=f"{module}:rows")
    assert ray_dataset.imports_ray(resolve(f"{module}:rows", "data.source")) == imports
    assert len(open_source(data, context=None).train) == 2 and len(asked) == imports
    assert len(open_source(data, context=None, on_driver=False).train) == 2
    assert len(asked) == imports, "a worker starts no process: the driver has sent what there is"


def test_the_process_has_the_settings_of_a_private_cluster_and_the_programs_variables_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "imports_guest_kept.py").write_text("import ray\n" + ROWS)
    environments: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        environments.append(dict(env))
        answer = {"ray": ["Ray did not start on this machine: no memory", {}]}
        return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")

    monkeypatch.setattr(ray_dataset.subprocess, "run", run)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with pytest.raises(RunError, match=r"^Ray did not start on this machine: no memory$"):
        open_source(DataConfig(source="imports_guest_kept:rows"), context=None)
    (environment,) = environments
    assert "PYTHONWARNINGS" not in environment and json.loads(environment[KEPT]) == {"PYTHONWARNINGS": "error"}
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0" and environment["RAY_ENABLE_AUTO_CONNECT"] == "1"
