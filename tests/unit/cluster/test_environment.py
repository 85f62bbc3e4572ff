"""The record of where a run runs, and the environment of Ray."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cluster.devices.inventory import local_inventory
from cluster.environment import (
    environment_record,
    git_commit,
    ray_environment,
    restored_environment,
    take_variables,
    variables_kept_from_ray,
)


def test_ray_uses_loopback_only_if_the_cluster_is_local() -> None:
    assert ray_environment()["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in ray_environment(local_cluster=False)


def test_only_a_quiet_command_hides_what_ray_says_of_a_death() -> None:
    said = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    assert re.search(ray_environment(quiet=True)["RAY_DEDUP_LOGS_SKIP_REGEX"], said)
    assert "RAY_DEDUP_LOGS_SKIP_REGEX" not in ray_environment()


def test_ray_is_polled_often_and_prints_once() -> None:
    variables = ray_environment()
    assert 0.5 <= float(variables["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"]) < 2, "each poll holds the training thread up"
    assert variables["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"
    assert variables["RAY_CHDIR_TO_TRIAL_DIR"] == "0"
    assert all(isinstance(value, str) for value in variables.values())


def test_only_the_variables_of_a_command_are_restored() -> None:
    environ = {"RAY_ADDRESS": "mine", "RAY_DEDUP_LOGS": "0", "CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/home/me"}
    before = dict(environ)
    with contextlib.suppress(LookupError), restored_environment(environ):
        environ.update(RAY_ADDRESS="ours", RAY_AUTH_MODE="token", CUDA_VISIBLE_DEVICES="0", TUNE_X="1", USERS="new")
        environ.update(PYTHONBREAKPOINT="ray.util.rpdb.set_trace", HOME="/")
        del environ["RAY_DEDUP_LOGS"]
        raise LookupError
    assert environ == before | {"USERS": "new", "HOME": "/"}


def test_the_record_is_json_and_holds_no_secret(tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "3", "RAY_AUTH_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    record = environment_record(environ=environ, folder=tmp_path)
    assert "secret" not in json.dumps(record)
    assert record["variables"] == {"OMP_NUM_THREADS": "3"}
    assert record["python"] == sys.version.split()[0]
    assert record["versions"]["numpy"].count(".") == 2
    assert record["cores"] == local_inventory().cpus
    assert record["git"] is None


def test_the_commit_of_the_users_code_is_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "one")
    found = git_commit(tmp_path)
    assert found is not None
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (tmp_path / "code.py").write_text("x = 2\n")
    changed = git_commit(tmp_path)
    assert changed is not None and changed["dirty"] is True


def test_rays_daemons_do_not_get_what_the_users_program_has_again(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PYTHONWARNINGS": "error::UserWarning,ignore::FutureWarning", "PYTHONINSPECT": "1", "PATH": "/bin"}
    environ["PYTHONOPTIMIZE"] = "2"
    given = dict(environ)
    with variables_kept_from_ray(environ):
        inherited = dict(environ)
    assert environ == given
    assert {name for name in inherited if name.startswith("PYTHON")} == set() and inherited["PATH"] == "/bin"
    with warnings.catch_warnings():
        take_variables(inherited)
        assert inherited == given
        with pytest.raises(UserWarning):
            warnings.warn("a user's", UserWarning, stacklevel=1)
        warnings.warn_explicit("Ray's", UserWarning, "worker.py", 1, module="ray.train")
        take_variables(inherited)
        assert inherited == given, "nothing is left to take"


def test_a_command_survives_warnings_about_rays_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with restored_environment({}):
            warnings.warn_explicit("Ray's", DeprecationWarning, "context.py", 1, module="ray.data.context")
        with pytest.raises(DeprecationWarning):
            warnings.warn_explicit("Ray's", DeprecationWarning, "context.py", 1, module="ray.data.context")
