"""The cluster's versions against ours, and the runtime environment of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.submission.environment import check_versions, pinned_requirements, runtime_environment, versions_here
from jobs.submission.on_cluster import probe
from jobs.submission.server import SubmittedJob
from raytrain.errors import InputError

HERE = {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0", "product": "a"}


def test_versions_that_differ_are_named_with_both_sides() -> None:
    same = HERE | {"python": "3.11.2", "torch": "2.13.0+cu126", "product": "b"}
    assert check_versions(HERE, same, install=False) == []
    older = HERE | {"torch": "2.12.1+cu126"}
    with pytest.raises(InputError, match=r"got torch 2\.12\.1\+cu126, expected torch 2\.13\.0\+cpu.*--install"):
        check_versions(HERE, older, install=False)
    assert check_versions(HERE, older, install=True) == ["torch"]
    several = HERE | {"ray": "2.59.0", "python": "3.12.1", "torch": None}
    with pytest.raises(InputError, match=r"got python 3\.12\.1, torch not installed, ray 2\.59\.0, expected python"):
        check_versions(HERE, several, install=False)
    with pytest.raises(InputError, match=r"got python 3\.12\.1, ray 2\.59\.0, expected .* start the cluster with"):
        check_versions(HERE, several, install=True)


def test_the_product_goes_along_where_it_differs(tmp_path: Path) -> None:
    same = runtime_environment(HERE, HERE, working_dir=tmp_path, install=False)
    assert same == {"working_dir": str(tmp_path)}
    other = runtime_environment(HERE, HERE | {"product": None}, working_dir=tmp_path, install=True)
    assert [Path(path).name for path in other["py_modules"]] == ["cluster", "raytrain", "experts", "jobs"]
    assert all((Path(path) / "__init__.py").exists() for path in other["py_modules"])
    packages = other["pip"]["packages"]
    assert packages == pinned_requirements()
    assert all("==" in text and "+" not in text for text in packages) and "torch==2.13.0" in packages
    assert not [text for text in packages if text.startswith("ray")]


def test_the_probe_runs_as_text_and_sees_a_changed_file(tmp_path: Path) -> None:
    source = Path(probe.__file__).read_text()
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, check=True)
    here = versions_here()
    assert f'"ray": "{here["ray"]}"' in done.stdout and f'"product": "{here["product"]}"' in done.stdout
    package = tmp_path / "one_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        before = probe.digest(["one_package"])
        (package / "__init__.py").write_text("a = 1\n")
        assert probe.digest(["one_package"]) != before is not None
    finally:
        sys.path.remove(str(tmp_path))
    assert probe.digest(["no_such_package"]) is None


@pytest.mark.parametrize(
    ("status", "exit_code", "verdict", "outcome"),
    [
        ("SUCCEEDED", 0, 0, "SUCCEEDED"), ("FAILED", 1, 1, "FAILED"), ("FAILED", 2, 2, "FAILED"),
        ("FAILED", 130, 130, "STOPPED"), ("STOPPED", None, 130, "STOPPED"), ("FAILED", -9, 137, "FAILED"),
        ("FAILED", 137, 137, "FAILED"), ("FAILED", None, 1, "FAILED"), ("RUNNING", None, None, "RUNNING"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_job(status: str, exit_code: int | None, verdict: int | None, outcome: str) -> None:
    job = SubmittedJob("a", status, exit_code, "", "", {}, None, None, None)
    assert (job.verdict, job.outcome) == (verdict, outcome)
