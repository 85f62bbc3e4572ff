"""Checks of a submitted Ray job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.preflight import JOB_ENVIRONMENT, SAVE_RATE, STOP_WAIT, check_ray_job

SUBMITTED = {JOB_ENVIRONMENT: "{}"}


def checks(save_dir: str = "/data/runs", environ: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    given = {"checkpoint_bytes": 200 << 20, "grace_s": 30.0} | changes
    return {check.name: check for check in check_ray_job(save_dir, environ=environ or SUBMITTED, **given)}


def test_a_command_that_was_not_submitted_has_nothing_to_check() -> None:
    assert check_ray_job("runs", checkpoint_bytes=1 << 40, grace_s=1.0, environ={}) == []


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


@pytest.mark.parametrize(
    ("changes", "environ", "status"),
    [
        ({}, {}, "ok"),  # 1 s of 3 s
        ({"checkpoint_bytes": 700 << 20}, {}, "warn"),
        ({"checkpoint_bytes": 700 << 20}, {STOP_WAIT: "60"}, "ok"),
        ({}, {STOP_WAIT: "0.5"}, "warn"),
        ({}, {STOP_WAIT: "unclear"}, "ok"),
        ({"checkpoint_bytes": None}, {}, "na"),
    ],
)
def test_a_stop_that_kills_before_a_save_is_a_warning(
    changes: dict[str, Any], environ: dict[str, str], status: str
) -> None:
    check = checks(environ=SUBMITTED | environ, **changes)["job_stop"]
    assert check.status == status
    assert "retry.stop_grace_s says (30 s)" in check.seen
    if status == "warn":
        assert f"{STOP_WAIT}=30" in check.remedy and check.remedy in check.text


def test_a_short_grace_does_not_shorten_what_ray_leaves_and_a_long_one_adds_nothing() -> None:
    for grace_s, stop_s, status in ((0.0, 2.0, "ok"), (1.0, 2.9, "ok"), (60.0, 3.1, "warn")):
        check = checks(checkpoint_bytes=int(stop_s * SAVE_RATE), grace_s=grace_s)["job_stop"]
        assert check.status == status and "after 3 s" in check.seen
