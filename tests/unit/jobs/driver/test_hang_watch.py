"""When a step is late, and who is named."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.driver.hangs import HangWatch


def late_steps(*seconds: float, hang_s: float | None = 300.0, **progress: Any) -> list[float]:
    """When, of these seconds without another step, the workers are asked where they are."""
    now = [1000.0]
    watch = HangWatch(hang_s=hang_s, clock=lambda: now[0])
    row = {"step": 7, "step_time_s": 0.1, "step_ms_p95": 200.0}
    shown = {"phase": "training", "step": 7, "activity": "", "row": row, **progress}
    assert watch.due(shown) is False
    asked = []
    for at in seconds:
        now[0] = 1000.0 + at
        asked += [at] if watch.due(shown) else []
    return asked


def test_a_step_is_late_once_after_five_seconds_or_ten_steps() -> None:
    """The driver knows rank 0's step to five seconds."""
    assert late_steps(4.0, 9.9, 10.1, 11.0, 60.0) == [10.1]
    slow = {"step": 7, "step_time_s": 2.0, "step_ms_p95": 3000.0}
    assert late_steps(30.0, 34.9, 35.1, 36.0, row=slow) == [35.1]
    assert late_steps(10.1, 200.0, 304.0, 305.1, compiles=True) == [305.1]
    assert late_steps(4000.0, phase="restarting the workers") == late_steps(4000.0, phase="starting workers") == []


@pytest.mark.parametrize(("activity", "late"), [("evaluating", 65.0), ("saving a checkpoint", 305.0)])
def test_what_has_no_usual_duration_is_late_after_minutes_or_after_hang_s(activity: str, late: float) -> None:
    """A slow store may take minutes to close one file."""
    before, after = late - 0.1, late + 0.1
    assert late_steps(10.1, before, after, 400.0, activity=activity) == [after]
    assert late_steps(before, after, hang_s=None, activity=activity) == [after]
    assert late_steps(12.9, 13.1, 66.0, hang_s=8.0, activity=activity) == [13.1]
    assert late_steps(65.1, 304.0, 305.1, compiles=True, activity=activity) == [305.1]


def test_the_set_up_and_the_first_step_are_late_after_five_minutes_without_a_row_that_is_read_or_a_micro_batch() -> (
    None
):
    for phase in ("setting up the workers", "exporting"):
        assert late_steps(304.0, 305.1, phase=phase) == [305.1]
    assert late_steps(44.0, 45.1, phase="setting up the workers", hang_s=8.0) == [45.1], "five times as long"
    assert late_steps(44.0, 45.1, row={}, hang_s=8.0) == [45.1]
    assert late_steps(304.0, 305.1, phase="measuring memory", row={}) == [305.1]
    assert late_steps(304.0, 305.1, row={}) == late_steps(304.0, 305.1, row={}, activity="evaluating") == [305.1]
    now = [0.0]
    watch = HangWatch(hang_s=300.0, clock=lambda: now[0])
    for done in range(100):
        now[0] += 100.0
        assert not watch.due({"phase": "setting up the workers", "detail": f"reading train: {done}/100 rows"})
    for done in range(100):
        now[0] += 100.0
        assert not watch.due({"phase": "training", "step": 0, "row": {}, "work": done})


def stalled(where: dict[str, Any], *, absent: bool) -> tuple[str, list[float]]:
    """The line about workers that do no work in 10 minutes' steps, and when, in minutes, rank 1 or a rank is ended."""
    now = [0.0]
    watch = HangWatch(hang_s=300.0, clock=lambda: now[0])
    shown = {"phase": "training", "step": 7, "row": {"step": 7, "step_time_s": 0.1}, "work": 40, **where}
    signs = dict.fromkeys((0, 1), (0.0, "on a (pid 1)"))
    stacks = {0: {"waits": True, "place": "w"}, 1: {"waits": not absent, "place": "mine"}}
    watch.due(shown)
    lines, ended = [], []
    for second in range(1, 1600):
        now[0] = float(second)
        watch.due(shown)
        lines += watch.lines(signs, stacks, now=0.0)
        if watch.overdue(signs):
            assert watch.overdue(signs) == [1 if absent else 0]
            ended.append(now[0])
    (line,) = lines
    return line.partition(";")[0], ended[:1]


def test_what_has_not_advanced_is_named_and_ended_after_hang_s_and_the_unknown_after_five_times() -> None:
    """In the set-up, the first step and the export the user's code may read all data or convert the model in one call;
    not where all wait for another."""
    evaluation, save = {"activity": "evaluating"}, {"activity": "saving a checkpoint"}
    who = "rank 1 on a (pid 1) is in mine"
    assert stalled(evaluation, absent=True) == (
        f"the evaluation after step 7 has not advanced for 65 s: {who}",
        [300.0],
    )
    assert stalled(save, absent=True) == (f"saving the checkpoint of step 7 has not advanced for 305 s: {who}", [305.0])
    set_up = {"phase": "setting up the workers"}
    assert stalled(set_up, absent=True) == (f"setting up the workers has not advanced for 305 s: {who}", [1500.0])
    export = {"phase": "exporting"}
    assert stalled(export, absent=True) == (f"exporting the weights has not advanced for 305 s: {who}", [1500.0])
    assert stalled({"row": {}}, absent=True) == (f"step 8 has not ended for 305 s: {who}", [1500.0])
    every = "every rank waits for another"
    assert stalled({"row": {}}, absent=False) == (f"step 8 has not ended for 305 s: {every}", [305.0])
    assert stalled({}, absent=True) == (f"step 8 has not ended for 10 s: {who}", [300.0])


def test_work_in_an_activity_keeps_it_from_being_late_but_not_a_step() -> None:
    """A checkpoint may be written in the background while a step hangs."""
    now = [0.0]
    watch = HangWatch(hang_s=300.0, clock=lambda: now[0])
    row = {"step": 7, "step_time_s": 0.1}
    for activity, expected in (("evaluating", False), ("", True)):
        asked = False
        for second in range(0, 600, 50):
            now[0] += 50.0
            asked |= watch.due({"phase": "training", "step": 7, "row": row, "activity": activity, "work": second})
        assert asked is expected
    assert watch.step == 8
    watch.due({"phase": "training", "step": 7, "row": row, "activity": "evaluating"})
    assert watch.step == 7, "that of the fault: step 8 has not begun"


def test_a_thousand_steps_with_evaluations_and_saves_raise_no_alarm_and_a_late_one_is_forgotten_after_it() -> None:
    now = [0.0]
    watch = HangWatch(hang_s=300.0, clock=lambda: now[0])
    row = {"step_time_s": 0.5, "step_ms_p95": 700.0}
    for step in range(1, 1001):
        for activity, seconds in (
            ("", 0.5),
            ("evaluating", 60.0 * (step % 50 == 0)),
            ("saving a checkpoint", 60.0 * (step % 30 == 0)),
        ):
            now[0] += seconds
            assert not watch.due(
                {"phase": "training", "step": step, "activity": activity, "row": {**row, "step": step}}
            )
    now[0] += 13.0
    last = {"phase": "training", "step": 1000, "activity": "saving a checkpoint", "row": row}
    assert not watch.due(last) and watch.lines({}, {}, now=0.0) == []


def test_the_line_names_who_does_not_respond_else_who_is_not_in_a_collective() -> None:
    now = [0.0]
    watch = HangWatch(hang_s=60.0, clock=lambda: now[0])
    row = {"step": 3, "step_time_s": 0.1}
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
    assert watch.overdue(respond) == []
    now[0] = 72.0  # a minute in step 5
    assert watch.overdue(respond) == [1]
    assert watch.reason_to_end(1) == "is stuck (step 5 has not ended for 61 s)"
    assert watch.reason_to_end(0).startswith("waits (step 5")
    assert watch.overdue({0: respond[0], 2: respond[2]}) == [0], "it has gone, and the others wait"
    watch.due({**progress, "step": 5})
    assert watch.overdue(respond) == [], "the step has ended"
