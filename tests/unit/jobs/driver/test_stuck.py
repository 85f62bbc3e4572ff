"""Workers that do not respond: how long, in which phases that ends their processes, and what is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from jobs.driver.hangs import StuckWorkers
from raytrain.config.sections import RetryConfig
from raytrain.runs.faults import read_faults
from raytrain.runs.folder import RunFolder

TRAINING = {"phase": "training", "step": 3}
PAUSES = "import signal; print(1, flush=True); signal.pause()"


def test_the_process_of_a_silent_worker_is_ended_once_with_its_stacks_in_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    process = subprocess.Popen([sys.executable, "-c", PAUSES], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline(), "it runs Python code"
    stuck = StuckWorkers(run, Channel(), RetryConfig(host_silence_s=0.001), local=True)
    signs = {0: (1.0, "on a (pid 1)"), 1: (1.0, f"on a (pid {process.pid})")}
    evaluating = {**TRAINING, "activity": "evaluating", "max_steps": 9, "nodes": {1: "n2"}}
    lines: list[str] = []
    for turn in range(2, 1000):  # rank 0 responds in each
        signs = {**signs, 0: (float(turn), "on a (pid 1)")}
        lines += stuck.lines(evaluating, signs, {})
        if process.poll() is not None and lines:
            break
    assert process.wait() == -9
    process.stdout.close()
    ended = [line for line in lines if "its process is ended" in line]
    assert len(ended) == 1 and ended[0].startswith("rank 1 has not responded for 0 s (the run: evaluating)")
    assert ended[0].endswith("all restart (retry.host_silence_s)")
    rows = [json.loads(line) for line in (Path(run.path) / "events.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "hang_ended"]
    assert (row["kind"], row["rank"], row["pid"]) == ("hang_ended", 1, process.pid) and row["seconds"] > 0
    (fault,) = read_faults(run, since=0)
    assert (fault.rank, fault.step, fault.error, fault.node) == (1, 4, "WorkerDied", "n2")
    assert fault.message.startswith("rank 1 has not responded for 0 s (the run: evaluating), and its process was ended")
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
    stuck = StuckWorkers(run, channel, RetryConfig(host_silence_s=0.001), local=True)
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
