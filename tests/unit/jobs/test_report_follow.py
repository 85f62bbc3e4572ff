"""`report --follow`: the run's own elapsed time, one remaining time, and nothing of a lost attempt."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.report import RunView
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_of_a_followed_run(tmp_path: Path, width: int) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    run.write_json(run.plan, {"choices": {"max_steps": {"value": 400}}})
    run.append_event(event("driver_start", process_start=time.time() - 754.5))
    row = {"workers": 1, "device": "cpu"}
    run.append_event(event("attempt", attempt=1, from_step=0, **row))
    metrics = run.writer(run.metrics)
    for step in (310, 320):
        metrics.write({"kind": "train", "step": step, "loss": 1.4506, "step_time_s": 2.0, "tokens_per_s": 1471.0})
    now = 5000.0
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    view = RunView(run, console=console, clock=lambda: now)

    def line() -> str:
        view.update()
        with console.capture() as seen:
            console.print(view.display._bar.get_renderable())
        (shown,) = seen.get().splitlines()
        return shown.rstrip()

    shown = line()
    assert " 320/400 loss 1.4506" in shown and len(shown) <= width
    assert shown.endswith(" 0:12:34  0:02:40 left") and shown.count("left") == 1
    run.append_event(event("fault", attempt=2, failed_attempt=1, rank=0, error="WorkerDied", message="killed"))
    shown = line()
    assert "restarting the workers" in shown and shown.endswith(" 0:12:34")
    assert not any(word in shown for word in ("320", "loss", "left"))
    run.append_event(event("attempt", attempt=2, from_step=286, **row))
    shown = line()
    assert shown.endswith(" 286/400 0:12:34"), "the loss and the remaining time follow with its first row"


def test_a_followed_log_has_the_remaining_time_where_it_is_known(tmp_path: Path) -> None:
    run, now, text = RunFolder.create(str(tmp_path), "a"), 5000.0, io.StringIO()
    view = RunView(run, console=Console(file=text, width=200), clock=lambda: now)
    row: dict[str, Any] = {"kind": "train", "step": 320, "loss": 1.5, "step_time_s": 2.0}
    view.update()
    run.write_json(run.plan, {"choices": {"max_steps": {"value": 400}}})
    run.writer(run.metrics).write(row)
    view.update()
    now += 30.0
    view.update()
    assert text.getvalue().splitlines() == [
        "starting workers",
        "training  step 320/400  loss 1.5000  0:02:40 left",
        "still in step 321/400, for 30 s: 0:02:10 left",
    ]
