"""From a "module:function" in a job to the callable, and every way in which that goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.config.user_code import check_shadowing, import_from, resolve
from raytrain.errors import InputError
from raytrain.models.registry import to_trainable


def with_our_code() -> dict[str, str]:
    """The environment of a process that finds our packages, from any folder."""
    return os.environ | {"PYTHONPATH": str(Path(raytrain.__file__).parents[1])}


MINE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self, *, size: int):
        super().__init__(size, size)

def build(*, size):
    return Net(size=size)

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of a user's, with import path and modules put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    (tmp_path / "mine_registry.py").write_text(MINE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_registry"):
            del sys.modules[name]


def test_the_working_directory_is_importable_but_last(folder: Path) -> None:
    build = resolve("mine_registry:build", "model.builder")
    assert to_trainable(build(size=3)).module.weight.shape == (3, 3)
    assert sys.path[-1] == str(folder) and sys.path.count(str(folder)) == 1
    resolve("mine_registry:Net", "model.builder")
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("mine_registry", "'mine_registry', expected module:function"),
        ("mine_registry:", "expected module:function"),
        ("mine registry:build", "expected module:function"),
        (7, "got 7, expected module:function"),
        ("mine_registry:bulid", r"did you mean build\?.*does not define"),
        ("mine_registry:NUMBER", "a int, expected a function or a class"),
        ("nowhere_registry:build", "module nowhere_registry does not exist"),
        ("mine_registry.inner:build", "module mine_registry.inner does not exist"),
        ("needs_registry:build", "imports the missing module not_installed_here"),
        ("broken_registry:build", "whose import raises SyntaxError"),
        ("fails_registry:build", "whose import raises RuntimeError: no config"),
    ],
)
def test_names_that_lead_nowhere_are_input_errors(folder: Path, path: Any, seen: str) -> None:
    (folder / "needs_registry.py").write_text("import not_installed_here\n")
    (folder / "broken_registry.py").write_text("def build(:\n")
    (folder / "fails_registry.py").write_text("raise RuntimeError('no config')\n")
    with pytest.raises(InputError, match=seen) as caught:
        resolve(path, "model.builder")
    assert caught.value.key == "model.builder"


@pytest.mark.parametrize("name", ["raytrain", "experts", "jobs", "cluster"])
def test_code_that_shadows_our_packages_is_named(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "default.yaml").write_text("{}\n")
    check_shadowing()  # a folder without code shadows nothing
    (folder / name / "__init__.py").touch()
    with pytest.raises(InputError, match=f"hides the package {name}") as caught:
        resolve("mine_registry:build", "model.builder")
    assert caught.value.key == str(folder / name)


def test_a_process_of_ray_imports_from_the_folder_of_the_command_and_not_from_that_of_its_daemon(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may be started in a checkout of this product."""
    (folder / "of_the_command_registry.py").write_text("def build(): ...\n")
    (tmp_path / "daemon" / "raytrain").mkdir(parents=True)
    (tmp_path / "daemon" / "raytrain" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "daemon")
    with pytest.raises(InputError, match="hides the package raytrain"):
        resolve("of_the_command_registry:build", "model.builder")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    import_from(str(folder))
    assert resolve("of_the_command_registry:build", "model.builder").__name__ == "build"
    (folder / "jobs.py").touch()
    with pytest.raises(InputError, match=r"jobs\.py"):
        resolve("of_the_command_registry:build", "model.builder")
    (folder / "jobs.py").unlink()
    assert str(tmp_path / "daemon") not in sys.path


def test_a_file_that_shadows_is_named_and_our_own_folder_is_let_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "jobs.py").touch()
    monkeypatch.setattr(sys, "argv", ["-c"])  # no script: its folder is not the current one
    with pytest.raises(InputError, match=r"jobs\.py"):
        check_shadowing(str(folder))
    check_shadowing(str(Path(__file__).parents[4]))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("raytrain.py", "import raytrain\nraytrain.train('job.yaml')\n"),
        ("raytrain/__init__.py", ""),
        ("jobs/__init__.py", f"__path__.append({str(Path(raytrain.__file__).parents[1] / 'jobs')!r})\n"),
    ],
)
def test_the_command_line_names_the_file_that_hides_it_in_one_sentence(folder: Path, own: str, text: str) -> None:
    """An installation for development finds `jobs.__main__` whatever `jobs` is."""
    (folder / own).parent.mkdir(exist_ok=True)
    (folder / own).write_text(text)
    command = [sys.executable, "-m", "jobs", "recipes"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=with_our_code())
    assert ended.returncode == 2 and re.fullmatch(
        rf"error: \S+{own}: got your own module named \w+, .*\n", ended.stderr
    )


def test_the_package_is_the_command_line_too(folder: Path) -> None:
    command = [sys.executable, "-m", "raytrain", "recipes"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=with_our_code())
    assert ended.returncode == 0 and "default" in ended.stdout, ended.stderr


@pytest.mark.parametrize(("given", "refused"), [(["mylab/train.py"], True), (["-m", "mylab.train"], False)])
def test_a_module_beside_a_script_shadows_ours_and_one_inside_a_package_does_not(
    folder: Path, given: list[str], refused: bool
) -> None:
    (folder / "mylab").mkdir()
    (folder / "mylab/experts.py").touch()
    (folder / "mylab/train.py").write_text("from raytrain.config.user_code import check_shadowing\ncheck_shadowing()\n")
    ended = subprocess.run([sys.executable, *given], cwd=folder, capture_output=True, text=True, env=with_our_code())
    assert ("hides the package experts" in ended.stderr) == refused == bool(ended.returncode), ended.stderr
