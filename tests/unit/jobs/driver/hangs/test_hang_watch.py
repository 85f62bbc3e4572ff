"""When a step is late, and who is named."""

from __future__ import annotations

from typing import Any

from jobs.driver.hangs.hang_watch import HangWatch


def late_steps(*seconds: float, compiles: bool = False, **progress: Any) -> list[float]:
    """When, of these seconds without another step, the workers are asked where they are."""
    now = [1000.0]
    watch = HangWatch(compiles=compiles, clock=lambda: now[0])
    row = {"step": 7, "step_time_s": 0.1, "step_ms_p95": 200.0}
    shown = {"phase": "training", "step": 7, "activity": "", "row": row, **progress}
    assert watch.due(shown) is False
    asked = []
    for at in seconds:
        now[0] = 1000.0 + at
        asked += [at] if watch.due(shown) else []
    return asked


def test_a_step_is_late_once_after_five_seconds_or_ten_steps_and_never_in_an_activity() -> None:
    """The driver knows rank 0's step to five seconds."""
    assert late_steps(4.0, 9.9, 10.1, 11.0, 60.0) == [10.1]
    slow = {"step": 7, "step_time_s": 2.0, "step_ms_p95": 3000.0}
    assert late_steps(30.0, 34.9, 35.1, 36.0, row=slow) == [35.1]
    assert late_steps(10.1, 200.0, 304.0, 305.1, compiles=True) == [305.1]
    assert late_steps(400.0, activity="evaluating") == late_steps(400.0, activity="saving a checkpoint") == []
    assert late_steps(400.0, phase="exporting") == late_steps(400.0, row={}) == []


def test_a_thousand_steps_with_evaluations_and_saves_raise_no_alarm_and_a_late_one_is_forgotten_after_it() -> None:
    now = [0.0]
    watch, row = HangWatch(compiles=False, clock=lambda: now[0]), {"step_time_s": 0.5, "step_ms_p95": 700.0}
    for step in range(1, 1001):
        for activity, seconds in (
            ("", 0.5),
            ("evaluating", 90.0 * (step % 50 == 0)),
            ("saving", 20.0 * (step % 30 == 0)),
        ):
            now[0] += seconds
            assert not watch.due(
                {"phase": "training", "step": step, "activity": activity, "row": {**row, "step": step}}
            )
    now[0] += 13.0
    last = {"phase": "training", "step": 1000, "activity": "saving", "row": row}
    assert not watch.due(last) and watch.lines({}, {}, now=0.0) == []


def test_the_line_names_who_does_not_respond_else_who_is_not_in_a_collective() -> None:
    now = [0.0]
    watch, row = HangWatch(compiles=False, clock=lambda: now[0]), {"step": 3, "step_time_s": 0.1}
    progress = {"phase": "training", "step": 3, "row": row}
    watch.due(progress)
    now[0] = 11.0
    assert watch.due(progress)
    signs = {0: (99.0, "on a (pid 1)"), 1: (90.0, "on b (pid 2)"), 2: (99.0, "on b (pid 3)")}
    waits = {0: {"waits": True, "place": "all_reduce (collectives.py:60)"}}
    assert watch.lines(signs, waits, now=100.0) == [], "rank 2 has not answered yet"
    (line,) = watch.lines(signs, {**waits, 2: waits[0]}, now=100.0)
    assert line.startswith(
        "step 4 has not ended for 11 s: rank 1 on b (pid 2) does not respond; rank 0 waits in all_red"
    )
    assert watch.lines(signs, waits, now=100.0) == [] and watch.event is not None and watch.event["silent"] == [1]
    watch.due({**progress, "step": 4})
    now[0] = 40.0
    assert watch.due({**progress, "step": 4})
    busy = {**waits, 1: {"waits": False, "place": "read (mine.py:5)"}}
    (line,) = watch.lines(dict.fromkeys((0, 1), (99.0, "on b (pid 2)")), busy, now=100.0)
    assert "rank 1 on b (pid 2) is in read (mine.py:5); rank 0 waits" in line
    respond = dict.fromkeys((0, 1, 2), (99.0, "on b (pid 2)"))
    assert watch.overdue(respond, hang_s=60.0) == []
    now[0] = 72.0  # a minute in step 5
    assert watch.overdue(respond, hang_s=60.0) == [1] and watch.overdue(respond, hang_s=None) == []
    assert watch.overdue({0: respond[0], 2: respond[2]}, hang_s=60.0) == [0], "it has gone, and the others wait"
    watch.due({**progress, "step": 5})
    assert watch.overdue(respond, hang_s=60.0) == [], "the step has ended"
