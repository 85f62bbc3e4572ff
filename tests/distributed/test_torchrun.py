"""Training without a Ray cluster: torchrun starts a process for each worker, on two nodes and on one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

FIRST_STEP_S = 180
END_S = 180
ENDLESS = 100_000


@pytest.fixture
def start_torchrun(start_python: Callable[..., Any], place: Any) -> Iterator[Callable[[str], Any]]:
    """`start_torchrun(line)` starts a line that `plan --print torchrun` printed; all of them share a token."""
    env = place.env | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start(line: str) -> Any:
        command, *arguments = shlex.split(line)
        assert command == "torchrun"
        return start_python("-m", "torch.distributed.run", *arguments, cwd=place.folder, env=env)

    yield start
    end_all(place)


def end_all(place: Any) -> None:
    """Kill what torchrun started: its processes have sessions of their own, and hold its pipes."""
    for pid in place.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finished(command: Any, place: Any) -> Any:
    """The end of torchrun; if it does not come, its processes are killed."""
    try:
        command.process.wait(END_S)
    except subprocess.TimeoutExpired:
        end_all(place)
    return command.finish(timeout=30)


@pytest.mark.timeout(600)
@pytest.mark.covers("NODE-01", "CLI-23")
def test_two_nodes_train_the_steps_of_one_save_when_one_is_interrupted_and_resume_on_one(
    start_torchrun: Callable[[str], Any], run_cli: Any, place: Any, guest_job: Any, fit: Any, free_ports: Any
) -> None:
    """The second node is interrupted, which does not have the driver: the run saves, and nothing is left on either."""
    port, other = free_ports(2)
    job = guest_job(optim={"schedule": "constant"}, loop={"max_steps": ENDLESS})
    del job["scale"]["workers"]
    place.write(job)
    recipe = ("plan", "job.yaml", "--print", "torchrun")
    two = run_cli(*recipe, "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}", cwd=place.folder)
    first, second = [start_torchrun(line) for line in two.out.splitlines()]
    place.wait_for(place.steps_of(1, more_than=12), limit=FIRST_STEP_S, command=first)
    assert len(place.titles("raylet ")) >= 2, "a node of Ray for each node of torchrun"
    second.process.send_signal(signal.SIGINT)
    ended = [finished(node, place) for node in (first, second)]
    assert "exitcode  : 130" in ended[0].err, ended[0].text
    assert ended[1].code != 0 and "error: " not in ended[1].err, ended[1].text
    assert place.end(within=60) == [], place.titles("")
    run = place.run
    assert run.result["status"] == "interrupted", ended[0].text
    assert run.plan["workers"]["value"] == 2, "one for each process"
    (attempt,) = run.events("attempt")
    assert len({rank["pid"] for rank in attempt["ranks"]}) == 2
    steps = run.losses()
    (saved,) = run.checkpoints()[-1:]
    assert saved == steps[-1][0] >= 12, "saved at the step that was interrupted"

    one = run_cli(*recipe, "--nproc_per_node=2", f"--master_port={other}", cwd=place.folder)
    (line,) = one.out.splitlines()
    resumed = finished(start_torchrun(f"{line} --resume {run.path} loop.max_steps={saved + 4}"), place)
    assert resumed.code == 0, resumed.text
    assert place.end(within=60) == []
    assert run.result["status"] == "done" and [step for step, _ in run.losses()] == list(range(1, saved + 5))
    assert run.losses()[:saved] == steps
    assert [row["workers"] for row in run.events("attempt")] == [2, 2]

    alone = fit({**job, "loop": {**job["loop"], "max_steps": 12}, "scale": {"workers": 2, "threads": 1}})
    assert steps[:12] == alone.losses(), "to the last bit"


def test_a_wrong_job_ends_all_processes_with_the_exit_code_of_wrong_input(
    start_torchrun: Callable[[str], Any], place: Any, guest_job: Any, free_port: int
) -> None:
    """Before Ray starts, with one message."""
    place.write(guest_job(scale={"workers": 3}))
    line = f"torchrun --nproc_per_node=2 --master_port={free_port} -m jobs train job.yaml"
    ended = finished(start_torchrun(line), place)
    assert ended.code != 0 and ended.err.count("error: ") == 1, ended.text
    assert "scale.workers: got 3, expected 2, the number of torchrun's processes" in ended.err
    assert "exitcode  : 2" in ended.err
    assert place.end(within=30) == []
