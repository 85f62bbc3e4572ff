"""`breakpoint()` in the user's code: `train --debug` gives it the terminal, a worker of Ray passes it over."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytrain.runs.folder import RunFolder

CODE = """
import os
import pdb
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
    def forward(self, x, labels=None):
        if self.training and WHERE == "model" and x.device.type != "meta":
            seen_rows, process = len(x), os.getpid()
            STOP()
        return {"logits": self.l(x)} | ({} if labels is None else {"loss": F.cross_entropy(self.l(x), labels)})

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if WHERE == "data" and index == 7:
            number = index
            STOP()
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:3].argmax()}

def build(): return Net()
def data(): return {"train": Rows(), "eval": Rows()}
"""
JOB = {
    "model": {"builder": "user_code:build"}, "data": {"source": "user_code:data"}, "precision": {"dtype": "fp32"},
    "loop": {"max_steps": 6, "global_batch_size": 8, "log_every": 1, "eval_every": 3}, "save": {"every": 2},
}  # fmt: skip
#: Of the first STOP, in the model.
LINE = CODE[: CODE.index("STOP")].count("\n") + 1
PROMPT = b"(Pdb) "
LIMIT_S = 240


def command(place: Path, *arguments: str, stop: str = "breakpoint", where: str = "model") -> list[str]:
    (place / "user_code.py").write_text(CODE.replace("STOP", stop).replace("WHERE", repr(where)))
    (place / "job.yaml").write_text(json.dumps(JOB))
    return [sys.executable, "-m", "jobs", "train", "job.yaml", *arguments]


def at_terminal(place: Path, given: list[str], answers: list[str]) -> tuple[int, str]:
    """Type the answers one by one at the debugger's prompts, the last one at all further ones; exit code and screen."""
    ours, terminal = pty.openpty()
    process = subprocess.Popen(given, cwd=place, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    screen, at, ends = b"", 0, time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < ends:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                screen += os.read(ours, 65536)
            except OSError:  # the process has closed the terminal
                break
            if screen[at:].endswith(PROMPT):
                at = len(screen)
                os.write(ours, f"{answers.pop(0) if len(answers) > 1 else answers[0]}\n".encode())
    finally:
        if process.poll() is None and time.monotonic() > ends:
            process.kill()
        os.close(ours)
    return process.wait(), screen.decode()


@pytest.mark.parametrize(
    ("where", "asked", "seen"), [("model", "p seen_rows + 1000", "1008"), ("data", "p number + 3000", "3007")]
)
def test_a_breakpoint_has_the_terminal_and_the_run_goes_on(tmp_path: Path, where: str, asked: str, seen: str) -> None:
    code, screen = at_terminal(tmp_path, command(tmp_path, "--debug", where=where), [asked, "c", "c"])
    assert code == 0 and f"\r\n{seen}\r\n" in screen, screen
    assert "done after 6 steps" in screen and "starting Ray" not in screen
    run = RunFolder.open(str(tmp_path / "runs/latest"))
    rows = run.read_rows(run.metrics)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [3, 6]
    assert run.exists("checkpoints/step_00000006/COMPLETE") and run.exists(run.weights)


def test_the_debugged_code_runs_in_the_process_of_the_command(tmp_path: Path) -> None:
    _, screen = at_terminal(tmp_path, command(tmp_path, "--debug"), ["p 'the process', process", "q"])
    run = RunFolder.open(str(tmp_path / "runs/latest"))
    (start,) = [row for row in run.read_rows(run.events) if row["kind"] == "driver_start"]
    assert f"('the process', {start['pid']})" in screen


def test_who_leaves_the_debugger_interrupts_the_run_and_can_resume_it(tmp_path: Path) -> None:
    given = command(tmp_path, "--debug")
    code, screen = at_terminal(tmp_path, given, ["c", "c", "c", "q"])
    assert code == 130 and "the debugger was left" in (tmp_path / "runs/latest/result.json").read_text(), screen
    assert "raytrain train --resume" in screen
    again = [*given[:4], "--resume", "runs/latest", "--debug"]
    code, screen = at_terminal(tmp_path, again, ["p 'rows', seen_rows", "c"])
    assert code == 0 and "('rows', 8)" in screen and "done after 6 steps" in screen, screen
    run = RunFolder.open(str(tmp_path / "runs/latest"))
    assert [row["from_step"] for row in run.read_rows(run.events) if row["kind"] == "attempt"] == [0, 3]


def test_without_a_terminal_a_breakpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    given = command(tmp_path, "scale.workers=2")
    ended = subprocess.run(given, cwd=tmp_path, input="", text=True, capture_output=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(f"breakpoint() at user_code.py:{LINE} is passed over") == 1
    assert "--debug" in ended.stdout and "done after 6 steps" in ended.stdout


def test_a_debugger_without_a_terminal_ends_the_run_once_and_names_the_way(tmp_path: Path) -> None:
    given = command(tmp_path, stop="pdb.set_trace")
    ended = subprocess.run(given, cwd=tmp_path, input="", text=True, capture_output=True, timeout=LIMIT_S)
    assert ended.returncode in (1, 2) and "raytrain train --debug" in ended.stdout + ended.stderr
    assert "user_code.py" in ended.stdout + ended.stderr and not (tmp_path / "runs").exists()


def test_an_error_of_a_debugged_run_is_told_as_of_any_other(tmp_path: Path) -> None:
    given = command(tmp_path, "--debug", "loop.max_steps=2", stop="self.broken")
    ended = subprocess.run(given, cwd=tmp_path, input="", text=True, capture_output=True, timeout=LIMIT_S)
    assert ended.returncode == 1 and f"(user_code.py:{LINE} in forward)" in ended.stdout
    assert (tmp_path / "runs/latest/report/report.html").exists()
