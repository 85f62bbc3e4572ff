"""Variables in paths, and commands that a shell reads back."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.job.arguments import split_arguments
from jobs.job.facts import path_from_here
from jobs.job.spec import load_spec
from raytrain.errors import InputError, first_line
from raytrain.runs.folder import RunFolder, resume_command, shell_command
from raytrain.runs.storage import typed_path

ROOT = Path(__file__).resolve().parents[4]
JOB: dict[str, Any] = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"source": "csv", "path": "rows.csv"}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save.dir", "${PLACE}/runs"),
        ("model.init_from", "$PLACE/model"),
        ("data.path", '["$PLACE/a.csv", "x/${PLACE}b.csv"]'),
        ("data.eval_path", "s3://bucket/$PLACE"),
        ("infer.input", "$PLACE/in.csv"),
        ("infer.output", "$PLACE"),
    ],
)
def test_variables_in_paths_are_those_of_this_machine(key: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    section, name = key.split(".")
    loaded = load_spec(mapping=JOB, overrides=[f"{key}={value}"])
    found = getattr(getattr(loaded.spec, section), name, None) or loaded.spec.data.keys[name]
    assert "$" not in str(found) and "/scratch" in str(found) and "$" not in loaded.merged_text
    monkeypatch.delenv("PLACE")
    with pytest.raises(InputError, match=r"PLACE is not set") as caught:
        load_spec(mapping=JOB, overrides=[f"{key}={value}"])
    assert caught.value.key == key
    kept = load_spec(mapping=JOB, overrides=[f"{key}={value}"], runs_here=False)
    assert "PLACE" in kept.merged_text, "a submitted job: the cluster has other values"


def test_only_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    assert load_spec(mapping=JOB, overrides=["data.label=$PLACE"]).spec.data.keys["label"] == "$PLACE"
    own = {**JOB, "data": {"source": "mine:rows", "train_file": "$PLACE/a", "pattern": "$PLACE"}}
    assert load_spec(mapping=own).spec.data.keys == {"train_file": "/scratch/a", "pattern": "$PLACE"}


def test_a_path_that_exists_as_it_is_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a $HOME $nothing"
    odd.mkdir()
    (odd / "job.json").touch()
    assert typed_path(str(odd), key="x") == str(odd) == RunFolder.open(str(odd)).path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "${NOTHING}").mkdir()
    with pytest.raises(InputError, match="NOTHING is not set"):
        typed_path("${NOTHING}", key="x")


def test_a_new_folder_goes_where_the_shell_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands `"$PWD/o"`, also where the present folder has a dollar sign in its name."""
    monkeypatch.setenv("PLACE", "elsewhere")
    here = tmp_path / "we$PLACE"
    here.mkdir()
    assert typed_path(f"{here}/o/p", key="x") == f"{here}/o/p"
    assert typed_path(f"{here}/$PLACE/p", key="x") == f"{here}/elsewhere/p"
    assert typed_path(f"{tmp_path}/us$PLACE/o", key="x") == f"{tmp_path}/uselsewhere/o", "no such folder: a variable"
    assert typed_path(r"\$PLACE/$PLACE/a\$b", key="x") == "$PLACE/elsewhere/a$b"
    assert typed_path("$PLACE/o", key="x") == "elsewhere/o"


@pytest.mark.parametrize("name", ["plain", "my runs", "it's", "a$HOME", "*.x", "lr=0.1", "~", "-x", "`id`", 'a"b;c&d'])
def test_a_shell_and_the_command_line_read_a_printed_path_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / name / "t-1"
    run.mkdir(parents=True)
    (run / "plan.json").touch()
    shown = path_from_here(str(run))
    for command in (resume_command("train", shown), shell_command("infer", shown, "infer.input=FILE")):
        seen = subprocess.run(
            ["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
        ).stdout.split("\0")
        assert seen[:-1] == shlex.split(command) and shown in seen
        assert RunFolder.open(shown).path == str(run)
    assert split_arguments((shown, "infer.input=FILE")) == (Path(shown), ["infer.input=FILE"])
    assert split_arguments((str(run), "a.b=c/d=e")) == (run, ["a.b=c/d=e"])


def test_an_error_that_cannot_write_its_message_is_named_by_its_class() -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert first_line(NoText()) == "NoText" and first_line(ValueError("a\nb")) == "a"


FRONT = """
import importlib, sys
import raytrain
assert "jobs.train" not in sys.modules and "torch" not in sys.modules
for name in raytrain.VERBS:
    assert callable(getattr(raytrain, name)), name
import raytrain.train.state, raytrain.plan.plan, raytrain.infer.input, raytrain.report.records
from ray import cloudpickle
plan = cloudpickle.loads(cloudpickle.dumps(raytrain)).plan
job = {"model": {"builder": "raytrain.models.mlp:mlp", "nothing": 1}, "data": {"source": "csv", "path": "rows.csv"}}
for name in ("train", "plan"):
    try:
        getattr(raytrain, name)(job)
    except raytrain.errors.InputError as error:
        print(name, error.key)
"""


def test_the_functions_are_those_of_raytrain_also_where_it_has_packages_of_their_names(tmp_path: Path) -> None:
    done = _python(tmp_path, FRONT)
    assert done.returncode == 0, done.stderr
    assert "train " in done.stdout and "plan " in done.stdout


@pytest.mark.parametrize("name", ["cluster.py", "experts.py", "jobs/mine.py", "jobs/__init__.py"])
def test_a_module_of_the_users_with_our_name_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    package = name.partition("/")[0].removesuffix(".py")
    own = str(tmp_path / name.partition("/")[0])
    beside = _python(tmp_path, "import raytrain; print(raytrain.plan)")
    assert beside.returncode == 0 and own in beside.stderr and f"package {package} of raytrain" in beside.stderr
    trained = _python(tmp_path, f"import raytrain; raytrain.train({JOB!r})")
    assert trained.returncode and f"InputError: {own}" in trained.stderr
    if name == "jobs/mine.py":  # without an `__init__`, Python itself finds ours first
        return
    first = _python(tmp_path, f"import {package}; import raytrain")
    assert first.returncode and "InputError" in first.stderr and package in first.stderr.splitlines()[-1]


def _python(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    (folder / "rows.csv").write_text("a,label\n" + "1,0\n2,1\n" * 20)
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
