"""The same YAML as a Ray job on a running cluster: `ray job submit -- python -m jobs train JOB.yaml`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

START_S, JOB_S = 120, 240


def free_ports(count: int) -> list[int]:
    """Free ports on loopback."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def jobs_of(address: str) -> dict[str, dict[str, Any]]:
    """submission id -> the head's record of a job; {} while it does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/api/jobs/", timeout=10) as answer:
            return {row["submission_id"]: row for row in json.load(answer)}
    except OSError:
        return {}


@pytest.fixture
def head(start_python: Callable[..., Any], place: Any) -> Iterator[str]:
    """A Ray head as an administrator starts it, on loopback, with its own ports and folder; returns its address.

    It claims four GPUs that this machine does not have.
    """
    gcs, dashboard, client, agent = free_ports(4)
    options = {
        "node-ip-address": "127.0.0.1", "dashboard-host": "127.0.0.1", "port": gcs, "dashboard-port": dashboard,
        "ray-client-server-port": client, "dashboard-agent-listen-port": agent,
        "num-cpus": 2, "num-gpus": 4, "temp-dir": place.temp / "r",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the job's `python` is this one
    env = place.env | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "PATH": path}
    command = start_python(
        "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", *arguments,
        cwd=place.folder, env=env,
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard}"

    def answers() -> bool:
        with urllib.request.urlopen(f"{address}/api/version", timeout=10) as answer:
            return answer.status == 200

    place.wait_for(lambda: not_yet(answers), limit=START_S, command=command)
    yield address
    command.signal_group(signal.SIGKILL)  # and `place` ends the rest


def not_yet(answers: Callable[[], bool]) -> bool:
    """False instead of a refused connection."""
    try:
        return answers()
    except OSError:
        return False


@pytest.mark.timeout(580)
@pytest.mark.covers("DEV-01")
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
    assert "optim.learning_rate" in said["wrong"].text
    assert (rows["lost"]["status"], rows["lost"]["driver_exit_code"]) == ("FAILED", 2), said["lost"].text
    assert "save.dir: " in said["lost"].text and "Ray deletes that copy" in said["lost"].text
    run = place.run
    assert run.result["status"] == "done" and len(run.losses()) == 20
    assert "Ray lists 4 GPU slots" in said["good"].out and "its driver shows no device" in said["good"].out
    assert run.plan["device"]["value"] == "cpu"
    assert (run.path / "weights" / "model.safetensors").exists() and (run.path / "report" / "report.html").exists()
    assert len(list((place.folder / "runs").glob("guest-*"))) == 1
