"""Checks of a submitted Ray job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.preflight import JOB_ENVIRONMENT, check_ray_job

SUBMITTED = {JOB_ENVIRONMENT: "{}"}


def checks(save_dir: str) -> dict[str, Any]:
    return {check.name: check for check in check_ray_job(save_dir, environ=SUBMITTED)}


def test_a_command_that_was_not_submitted_has_nothing_to_check() -> None:
    assert check_ray_job("runs", environ={}) == []


def test_a_folder_in_rays_package_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    cache.mkdir(parents=True)
    monkeypatch.chdir(cache)
    refused = checks("runs")["save_folder"]
    assert refused.status == "fail" and refused.key == "save.dir" and str(cache / "runs") in refused.seen
    (tmp_path / "link").symlink_to(cache)
    assert checks(str(tmp_path / "link" / "runs"))["save_folder"].status == "fail"
    assert checks(str(tmp_path / "runs"))["save_folder"].status == "ok"
    assert checks("s3://bucket/runtime_resources/runs")["save_folder"].status == "ok"
