"""More than one node: the same kind of job on two nodes of a cluster that runs already."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "guest" / "two_nodes.py"


@pytest.mark.timeout(150)
def test_one_job_on_two_nodes(tmp_path: Path) -> None:
    short = tempfile.mkdtemp(prefix="rtn-")  # socket paths end at 107 bytes
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), short, str(tmp_path / "runs")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)
    lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    assert lines, f"{out}\n{err}"
    answer = json.loads(lines[-1][7:])
    assert answer["status"] == "done"
    assert len(answer["losses"]) == 12 and answer["losses"][-1] < answer["losses"][0]
    plan = json.loads((Path(answer["run"]) / "plan.json").read_text())
    # `auto` on a cluster without GPUs is one worker per node, spread over them
    assert plan["choices"]["workers"]["value"] == 2
    assert "SPREAD" in plan["choices"]["placement"]["value"]
    seen, unseen = answer["checks"]
    assert seen[:2] == ["data.path", "ok"]
    assert unseen[:2] == ["save.dir", "fail"] and "127.0.0.1" in unseen[2] and "127.0.0.2" in unseen[2]
