"""The same YAML as a Ray job on a running cluster: `ray job submit -- python -m jobs train JOB.yaml`."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

JOB_S = 240


def jobs_of(address: str) -> dict[str, dict[str, Any]]:
    """submission id -> the head's record of a job; {} while it does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/api/jobs/", timeout=10) as answer:
            return {row["submission_id"]: row for row in json.load(answer)}
    except OSError:
        return {}


@pytest.fixture(scope="module")
def head(start_head: Callable[..., Any]) -> str:
    """The address of a head without a token, which claims four GPUs that this machine does not have."""
    return start_head({"RAY_AUTH_MODE": "disabled"}, num_gpus=4).address


@pytest.mark.timeout(580)
@pytest.mark.covers("DEV-01", "NODE-06", "VIS-11")
def test_a_submitted_job_trains_and_passes_its_exit_code_on(
    start_python: Callable[..., Any], head: str, guest_job: Callable[..., Any], place: Any
) -> None:
    good = guest_job(loop={"max_steps": 20}, save={"dir": str(place.folder / "runs")}, scale={"workers": 2})
    place.write(good, "good.yaml")
    place.write({**good, "optim": {"learning_rate": 0.01}}, "wrong.yaml")
    place.write({**good, "save": {}}, "lost.yaml")  # its runs would be in the copy that Ray deletes
    env = place.env | {"RAY_AUTH_MODE": "disabled"}
    commands = {
        name: start_python(
            "-m", "ray.scripts.scripts", "job", "submit", f"--address={head}", f"--submission-id={name}",
            "--working-dir=.", "--", "python", "-m", "jobs", "train", f"{name}.yaml",
            cwd=place.folder, env=env,
        )
        for name in ("good", "wrong", "lost")
    }  # fmt: skip
    said = {name: command.finish(timeout=JOB_S) for name, command in commands.items()}
    rows = jobs_of(head)
    assert rows["good"]["status"] == "SUCCEEDED" and said["good"].code == 0, said["good"].text
    assert (rows["wrong"]["status"], rows["wrong"]["driver_exit_code"]) == ("FAILED", 2), said["wrong"].text
    assert said["wrong"].code == 1 and "optim.learning_rate" in said["wrong"].text
    assert (rows["lost"]["status"], rows["lost"]["driver_exit_code"]) == ("FAILED", 2), said["lost"].text
    assert "save.dir: " in said["lost"].text and "Ray deletes that copy" in said["lost"].text
    run = place.run
    assert run.result["status"] == "done" and len(run.losses()) == 20
    assert "Ray lists 4 GPU slots" in said["good"].out and "its driver shows no device" in said["good"].out
    assert run.plan["device"]["value"] == "cpu"
    assert (run.path / "weights" / "model.safetensors").exists() and (run.path / "report" / "report.html").exists()
    assert f"watch     {head} (Ray's dashboard)" in said["good"].out.splitlines()
    page = (run.path / "report" / "report.html").read_text()
    assert f'<a href="{head}">' in page and "<script src=" not in page, "the page is one file"
    assert len(list((place.folder / "runs").glob("guest-*"))) == 1
