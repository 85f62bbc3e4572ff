"""Workers that do not respond: how long, in which phases that ends their processes, and what is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.driver.stuck import SETUP_TIMES, Silence, StuckWorkers
from raytrain.config.sections import RetryConfig
from raytrain.runs.folder import RunFolder

TRAINING = {"phase": "training", "step": 3}


def test_silence_counts_from_the_newest_sign_that_this_process_has_seen() -> None:
    now = [0.0]
    silence = Silence(limit_s=10.0, clock=lambda: now[0])
    signs = {0: (5e9, "on a (pid 1)"), 1: (5e9, "on a (pid 2)")}
    assert silence.overdue(signs, TRAINING) == {}, "whatever the wall clock says, as after the machine slept"
    now[0] = 9.0
    signs = {**signs, 0: (5e9 + 9, "on a (pid 1)")}
    assert silence.overdue(signs, TRAINING) == {}
    now[0] = 10.0
    assert silence.overdue(signs, TRAINING) == {1: 10.0}
    assert silence.overdue({**signs, 1: (5e9, "on a (pid 3)")}, TRAINING) == {}, "another process has taken its place"
    now[0] = 19.0
    assert silence.overdue({0: signs[0]}, TRAINING) == {0: 10.0}
    now[0] = 20.0
    assert silence.overdue(signs, TRAINING) == {0: 11.0}, "rank 1 had left"


@pytest.mark.parametrize(
    ("progress", "limit"),
    [
        (TRAINING, 10.0),
        ({**TRAINING, "activity": "evaluating"}, 10.0),
        ({**TRAINING, "activity": "saving a checkpoint"}, 10.0),
        ({"phase": "exporting"}, 10.0),
        ({"phase": "setting up the workers"}, 10.0 * SETUP_TIMES),
        ({}, 10.0 * SETUP_TIMES),
    ],
)
def test_an_evaluation_or_a_save_allows_no_longer_silence_and_the_set_up_does(
    progress: dict[str, Any], limit: float
) -> None:
    now = [0.0]
    silence = Silence(limit_s=10.0, clock=lambda: now[0])
    signs = {1: (0.0, "on a (pid 2)")}
    assert silence.overdue(signs, progress) == {}
    now[0] = limit - 0.1
    assert silence.overdue(signs, progress) == {}
    now[0] = limit
    assert silence.overdue(signs, progress) == {1: limit}


def test_the_process_of_a_silent_worker_is_ended_once_with_its_stacks_in_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    stuck = StuckWorkers(run, None, RetryConfig(host_silence_s=0.001), local=True, compiles=False)
    signs = {0: (1.0, "on a (pid 1)"), 1: (1.0, f"on a (pid {process.pid})")}
    evaluating = {**TRAINING, "activity": "evaluating"}
    lines: list[str] = []
    for turn in range(2, 1000):  # rank 0 responds in each
        signs = {**signs, 0: (float(turn), "on a (pid 1)")}
        lines += stuck.lines(evaluating, signs, {})
        if process.poll() is not None and lines:
            break
    assert process.wait() == -9
    ended = [line for line in lines if "its process is ended" in line]
    assert len(ended) == 1 and ended[0].startswith("rank 1 has not responded for 0 s (the run: evaluating)")
    (row,) = [json.loads(line) for line in (Path(run.path) / "events.jsonl").read_text().splitlines()]
    assert (row["kind"], row["rank"], row["pid"]) == ("hang_ended", 1, process.pid)
    assert "pause" in (Path(run.path) / "logs" / "rank_00001.stacks").read_text()


class Channel:
    """Counts the requests for stacks."""

    def __init__(self) -> None:
        self.requests = 0
        self.request_stacks = SimpleNamespace(remote=self._request)

    def _request(self) -> None:
        self.requests += 1


def test_in_a_step_all_workers_are_asked_where_they_are_before_a_silent_one_is_ended(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    process, channel = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]), Channel()
    stuck = StuckWorkers(run, channel, RetryConfig(host_silence_s=0.001), local=True, compiles=False)
    step = {**TRAINING, "row": {"step": 3, "step_time_s": 60.0}}  # long before the deadline of a step
    waits = {0: {"waits": True, "place": "all_reduce (collectives.py:60)"}}
    lines: list[str] = []
    for turn in range(2, 1000):
        signs = {0: (time.time() + turn, "on a (pid 1)"), 1: (1.0, f"on a (pid {process.pid})")}
        lines += stuck.lines(step, signs, {})
        if channel.requests:
            break
    assert lines == [] or "its process is ended" not in "".join(lines)
    assert process.poll() is None and channel.requests == 1, "rank 0 has not answered yet"
    lines += stuck.lines(step, signs, waits)
    assert process.wait() == -9
    assert any("rank 1 on a" in line and "rank 0 waits in all_reduce" in line for line in lines)
    rows = [json.loads(line) for line in (Path(run.path) / "events.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["hang", "hang_ended"] and rows[0]["silent"] == [1]
