"""The support bundle: what is in it, and that no secret is."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jobs.checks.bundle import Redaction, check_bundle_path, write_bundle
from jobs.job.spec import load_spec
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import RunFolder

SECRETS = {"HF_TOKEN": "hf_0123456789", "RAY_AUTH_TOKEN": "tok-en/42", "AWS_SECRET_ACCESS_KEY": 'quo"ted\\key',
           "WANDB_API_KEY": "wandb-9999", "DB_PASSWORD": "hunter2!"}  # fmt: skip


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return SECRETS


def a_run(folder: Path) -> RunFolder:
    run = RunFolder.create(str(folder), "failed", job={"name": "failed"})
    run.write_text(run.job, "name: failed\ndata:\n  source: s3://me:pw12345@bucket/rows\n")
    run.write_json(run.result, {"status": "failed", "reason": "KeyError: 'labels'", "steps": 7, "wall_s": 3.0})
    lines = [f"line {n}" for n in range(1000)]
    run.write_text("logs/rank_00000.log", "\n".join([*lines, "logged in with hf_0123456789"]) + "\n")
    run.write_json("faults/0001-rank00000.json", {"attempt": 1, "rank": 0, "error": "KeyError", "message": "labels"})
    return run


def written(path: Path, **more: Any) -> dict[str, str]:
    loaded = load_spec(None, ["loop.max_steps=3"])
    names = write_bundle(path, checked={"status": "ok", "checks": []}, line="ok", loaded=loaded, **more)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == names and archive.testzip() is None
        return {name: archive.read(name).decode() for name in names}


@pytest.mark.covers("TRB-43")
def test_a_bundle_has_the_check_the_environment_and_the_last_of_a_run(tmp_path: Path, secrets: dict[str, str]) -> None:
    files = written(tmp_path / "b.zip", run=a_run(tmp_path))
    assert json.loads(files["check.json"])["status"] == "ok"
    environment = json.loads(files["environment.json"])
    assert environment["versions"]["torch"] and environment["variables"]["NCCL_DEBUG"] == "INFO"
    assert "The run failed: KeyError: 'labels'" in files["run/findings.txt"]
    log = files["run/logs/rank_00000.log"].splitlines()
    assert len(log) == 400 and log[-2] == "line 999" and log[-1] == "logged in with ***"
    assert json.loads(files["run/result.json"])["steps"] == 7 and "run/faults/0001-rank00000.json" in files
    assert "loop.max_steps=5 loop.global_batch_size=1" in files["README.txt"]
    for name in files:
        assert name == "README.txt" or f"  {name}\n" in files["README.txt"]


def test_no_file_of_a_bundle_holds_a_secret(tmp_path: Path, secrets: dict[str, str]) -> None:
    files = written(tmp_path / "b.zip", run=a_run(tmp_path))
    assert "s3://***@bucket/rows" in files["run/job.yaml"]
    assert not set(secrets) & set(json.loads(files["environment.json"])["variables"])
    for name in secrets:
        assert name in files["README.txt"]
    for name, text in files.items():
        for value in [*secrets.values(), "pw12345", *(json.dumps(value)[1:-1] for value in secrets.values())]:
            assert value not in text, f"{value} in {name}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ('{"api_key": "zz zz", "rows": 3}', '{"api_key": "***", "rows": 3}'),
        ("db_password: hunter3", "db_password: ***"),
        ("--auth-token=abc next", "--auth-token=*** next"),
        ("Bearer abcdefghijkl", "Bearer ***"),
        ("tokens_per_s: 123.4", "tokens_per_s: 123.4"),
        ("model.tokenizer: bert", "model.tokenizer: bert"),
        ("token authentication is on", "token authentication is on"),
    ],
)
def test_what_is_named_like_a_secret_is_blanked_and_nothing_else(text: str, shown: str) -> None:
    assert Redaction({})(text) == shown


@pytest.mark.covers("TRB-42")
def test_what_the_gpu_driver_says_and_the_devices_settings_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "memory $1 61000MiB / 143771MiB, CUDA 13.0"; exit 3\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    files = written(tmp_path / "b.zip")
    assert "$ nvidia-smi\nmemory  61000MiB" in files["nvidia-smi.txt"] and "(exit 3)" in files["nvidia-smi.txt"]
    assert "$ nvidia-smi -q\nmemory -q" in files["nvidia-smi.txt"]
    environment = json.loads(files["environment.json"])
    assert environment["variables"]["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "1" and "driver" in environment
    assert "There is no run in it" in files["README.txt"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "old.zip").write_text("")
    for name in ("b.tar", "old.zip", "none/b.zip"):
        with pytest.raises(InputError, match="--bundle"):
            check_bundle_path(str(tmp_path / name))
    assert check_bundle_path(str(tmp_path / "new.zip")) == tmp_path / "new.zip"


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written"):
        write_bundle(tmp_path / "gone" / "b.zip", checked={}, line="ok", loaded=load_spec(None, []))
