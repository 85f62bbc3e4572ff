"""The cluster's versions against ours, and the runtime environment of a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from jobs.submission import on_cluster
from jobs.submission.request import check_versions, pinned_requirements, runtime_environment
from jobs.submission.server import exit_code, outcome
from raytrain.errors import InputError

HERE = {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0"}


def test_versions_that_differ_are_named_with_both_sides() -> None:
    same = HERE | {"python": "3.11.2", "torch": "2.13.0+cu126"}
    check_versions(HERE, same, install=False)
    older = HERE | {"torch": "2.12.1+cu126"}
    with pytest.raises(InputError, match=r"got torch 2\.12\.1\+cu126, expected torch 2\.13\.0\+cpu.*--install"):
        check_versions(HERE, older, install=False)
    check_versions(HERE, older, install=True)
    several = HERE | {"ray": "2.59.0", "python": "3.12.1", "torch": None}
    with pytest.raises(InputError, match=r"got python 3\.12\.1, torch not installed, ray 2\.59\.0, expected python"):
        check_versions(HERE, several, install=False)
    with pytest.raises(InputError, match=r"got python 3\.12\.1, ray 2\.59\.0, expected .* start the cluster with"):
        check_versions(HERE, several, install=True)


def test_the_product_goes_along_and_its_packages_where_they_are_wanted(tmp_path: Path) -> None:
    env = runtime_environment(working_dir=tmp_path, install=False)
    assert env["working_dir"] == str(tmp_path) and "pip" not in env
    assert [Path(path).name for path in env["py_modules"]] == ["cluster", "raytrain", "experts", "jobs"]
    assert all((Path(path) / "__init__.py").exists() for path in env["py_modules"])
    packages = runtime_environment(working_dir=tmp_path, install=True)["pip"]["packages"]
    assert packages == pinned_requirements()
    assert all("==" in text and "+" not in text for text in packages) and "torch==2.13.0" in packages
    assert not [text for text in packages if text.startswith("ray")]


def test_the_question_for_the_versions_runs_as_text(tmp_path: Path) -> None:
    source = [sys.executable, "-c", Path(on_cluster.__file__).read_text(), "versions"]
    done = subprocess.run(source, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout) == on_cluster.versions()


@pytest.mark.parametrize(
    ("status", "reported", "code", "shown"),
    [
        ("SUCCEEDED", 0, 0, "SUCCEEDED"), ("FAILED", 1, 1, "FAILED"), ("FAILED", 2, 2, "FAILED"),
        ("FAILED", 130, 130, "STOPPED"), ("STOPPED", None, 130, "STOPPED"), ("FAILED", -9, 137, "FAILED"),
        ("FAILED", 137, 137, "FAILED"), ("FAILED", None, 1, "FAILED"), ("RUNNING", None, None, "RUNNING"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_job(status: str, reported: int | None, code: int | None, shown: str) -> None:
    details: dict[str, Any] = {"submission_id": "a", "entrypoint": "", "driver_exit_code": reported}
    job = JobDetails(type=JobType.SUBMISSION, status=JobStatus(status), **details)
    assert (exit_code(job), outcome(job)) == (code, shown)
