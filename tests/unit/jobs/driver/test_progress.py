"""Lines without a terminal: at least one every 30 s, in every phase, which says what is awaited and since when."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from jobs.driver.progress import QUIET_S, WINDOW_S, Activity, Phases, RemainingTime, TrainingDisplay, figures
from raytrain.execution.driver_channel import RESTARTING, SETTING_UP


class Printed:
    """A console without a terminal, and a clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._text = io.StringIO()
        self.console = Console(file=self._text, width=200)

    def clock(self) -> float:
        return self.now

    @property
    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()


@pytest.fixture
def printed() -> Iterator[Printed]:
    yield Printed()


def shown(printed: Printed, progress: Any, *, seconds: int, missing: str = "") -> list[tuple[float, str]]:
    """(second, line) of all lines where the display is asked every second; `progress(second)` is what rank 0 sent."""
    display, found = TrainingDisplay(printed.console, clock=printed.clock), []
    begin = printed.now
    for second in range(seconds + 1):
        printed.now, before = begin + second, len(printed.lines)
        display.show(progress(second), missing=lambda: missing)
        found += [(float(second), line) for line in printed.lines[before:]]
    return found


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({}, "still starting workers, for 30 s: 2 workers need 1 CPU each"),
        ({"phase": "measuring precisions"}, "still measuring precisions, for 30 s"),
        ({"phase": "restarting the workers"}, "still restarting the workers, for 30 s"),
        ({"phase": "training", "step": 7, "max_steps": 9, "activity": ""}, "still in step 8/9, for 30 s"),
        ({"phase": "training", "step": 7, "max_steps": 9, "activity": "evaluating"}, "still evaluating, for 30 s"),
        ({"phase": "training", "step": 7, "max_steps": 9, "activity": "saving a checkpoint"}, "still saving a check"),
        ({"phase": "exporting", "step": 9, "max_steps": 9}, "still exporting, for 30 s"),
        ({"phase": "recovering", "step": 4, "max_steps": 9}, "still recovering, for 30 s"),
    ],
)
def test_no_phase_is_silent(printed: Printed, progress: dict[str, Any], words: str) -> None:
    found = shown(printed, lambda _: progress, seconds=125, missing="2 workers need 1 CPU each")
    times = [time for time, _ in found]
    assert times == [0, 30, 60, 90, 120], found
    assert found[1][1].startswith(words)
    assert "for 120 s" in found[-1][1], "since when it is awaited, not since the last line"


def test_how_much_of_the_data_has_been_read_is_shown_until_training_begins(printed: Printed) -> None:
    def progress(time: float) -> dict[str, Any]:
        read = {"detail": f"reading train: {9 * int(time)}/900 rows"}
        return {"phase": "setting up the workers", **read} if time < 70 else {"phase": "training", "step": 1, **read}

    lines = [line for _, line in shown(printed, progress, seconds=125)]
    assert lines[1] == "still setting up the workers, for 30 s: reading train: 270/900 rows", lines
    assert not any("reading" in line for line in lines[3:])


def test_steps_without_a_row_are_shown(printed: Printed) -> None:
    """Ten steps of eight seconds each to a logged row."""
    row = {"kind": "train", "step": 10, "loss": 2.0}
    found = shown(
        printed, lambda t: {"phase": "training", "row": row, "step": 10 + t // 8, "max_steps": 90}, seconds=70
    )
    assert [line for _, line in found[1:]] == ["training  step 13/90", "training  step 17/90"]


def test_rows_are_shown_every_ten_seconds_and_nothing_else_beside_them(printed: Printed) -> None:
    def progress(t: int) -> dict[str, Any]:
        return {"phase": "training", "row": {"kind": "train", "step": t, "loss": 2.0}, "max_steps": 90}

    found = shown(printed, progress, seconds=60)
    assert [time for time, _ in found] == [0, 10, 20, 30, 40, 50, 60]
    assert found[2][1] == "training  step 20/90  loss 2.0000"


def test_the_next_phase_is_shown_without_the_figures_of_a_row_from_before_the_newest_step(printed: Printed) -> None:
    """An evaluation since then has printed its own line."""
    row = {"kind": "train", "step": 10, "loss": 2.0}

    def progress(t: int) -> dict[str, Any]:
        phase = "training" if t < 2 else "exporting"
        return {"phase": phase, "row": row, "step": 10 if t < 2 else 12, "max_steps": 90}

    assert shown(printed, progress, seconds=5) == [
        (0.0, "training  step 10/90  loss 2.0000"), (2.0, "exporting  step 12/90"),
    ]  # fmt: skip


def test_the_time_in_which_rows_are_read_is_not_that_of_the_start(printed: Printed) -> None:
    phases = Phases(clock=printed.clock, began=printed.now)
    display = TrainingDisplay(printed.console, phases=phases, clock=printed.clock)
    for phase, detail, seconds in (
        ("setting up the workers", "", 2.0),
        ("setting up the workers", "reading train: 90/900 rows", 7.0),
        ("setting up the workers", "", 1.0),
        ("training", "", 5.0),
    ):
        display.show({"phase": phase, "detail": detail})
        printed.now += seconds
    phases.end()
    assert phases.seconds == {"starting workers": 3.0, "reading the data": 7.0, "training": 5.0}


def test_a_row_is_shown_with_its_units() -> None:
    row = {"kind": "train", "loss": 1.5, "tokens_per_s": 2500.0, "samples_per_s": 10.0, "peak_memory_bytes": 3 << 30}
    assert figures(row) == "loss 1.5000  2,500 tokens/s  3,072 MiB"
    assert figures({**row, "kind": "eval", "tokens_per_s": None}) == "eval loss 1.5000  10 samples/s  3,072 MiB"


class Bar:
    """The bar of a terminal, and a clock that only a test moves."""

    def __init__(self, *, width: int = 80) -> None:
        self.now = 1000.0
        self.console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        self.display = TrainingDisplay(self.console, clock=lambda: self.now)

    def line(self, progress: dict[str, Any]) -> str:
        self.display.show(progress)
        with self.console.capture() as seen:
            self.console.print(self.display._bar.get_renderable())
        (shown,) = seen.get().splitlines()
        return shown.rstrip()


ROW = {"kind": "train", "step": 300, "loss": 1.4606, "tokens_per_s": 12345.0, "peak_memory_bytes": 1 << 30}


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_step_loss_elapsed_time_and_what_is_left(width: int) -> None:
    """And what rank 0 does inside the training, but not after it."""
    bar = Bar(width=width)
    progress = {"phase": "training", "row": ROW, "step": 310, "max_steps": 10400, "activity": "saving a checkpoint"}
    bar.line(progress)
    bar.now += 30.0
    shown = bar.line(progress | {"step": 320, "row": ROW | {"kind": "eval"}})
    assert len(shown) <= width and "…" not in shown
    assert "saving a checkpoint" in shown and "320/10400 eval loss 1.4606" in shown
    assert shown.endswith(" 0:00:30  8:24:00 left"), "1,008 times ten steps of three seconds"
    bar.now += 60.0
    assert bar.line(progress | {"step": 320}).endswith(" 0:01:30  8:23:00 left"), "the time passes without a step"
    assert "exporting" in (shown := bar.line(progress | {"phase": "exporting"})) and "saving" not in shown
    assert "starting workers" in (shown := bar.line({})) and "/" not in shown


def test_a_phase_without_a_known_remaining_time_shows_the_elapsed_time_alone() -> None:
    """Never the word "left", which would make the seconds that pass look like those that are left."""
    bar = Bar()
    bar.display.began -= 5.0  # the command began before its workers
    for phase in ("starting workers", "setting up the workers", "measuring precisions"):
        bar.now += 3.0
        shown = bar.line({"phase": phase})
        assert shown.split()[1:] == [*phase.split(), shown.split()[-2], f"0:00:{5 + bar.now - 1000:02.0f}"]
        assert "left" not in shown
    bar.now += 3.0
    shown = bar.line({"phase": "training", "step": 0, "max_steps": 9})
    assert shown.endswith(" 0/9 0:00:17"), "not known before a step"


def test_after_a_failed_attempt_nothing_of_it_is_shown_and_the_estimate_starts_anew() -> None:
    bar = Bar()
    lost = {"phase": "training", "row": ROW, "step": 300, "max_steps": 400}
    bar.line(lost | {"step": 200, "row": {}})
    bar.now += 100.0
    assert bar.line(lost).endswith("300/400 loss 1.4606 0:01:40  0:01:40 left")
    for phase in (RESTARTING, SETTING_UP):  # as `DriverChannel.report_group` leaves the progress
        shown = bar.line({"phase": phase, "step": 300})
        assert "300" not in shown and "loss" not in shown and "left" not in shown
    bar.now += 100.0
    again = {"phase": "training", "row": {}, "step": 286, "max_steps": 400}
    assert bar.line(again).endswith("286/400 0:03:20")
    bar.now += 28.0
    assert bar.line(again | {"step": 290}).endswith("290/400 0:03:48  0:12:50 left")
    assert bar.line(again).endswith("286/400 0:03:48"), "a step back, as after a rollback"
    bar.now += 10.0
    assert "left" in bar.line(again | {"step": 290})
    bar.line({"phase": RESTARTING, "step": 290})
    assert "left" not in bar.line(again | {"step": 290}), "from the checkpoint of the step that was reached"


def test_a_log_names_the_step_of_a_new_attempt_only(printed: Printed) -> None:
    display = TrainingDisplay(printed.console, clock=printed.clock)
    display.show({"phase": "training", "row": ROW, "step": 300, "max_steps": 400})
    display.show({"phase": RESTARTING, "step": 300, "row": ROW})
    display.show({"phase": "training", "step": 286, "max_steps": 400})
    printed.now += 10.0
    display.show({"phase": "training", "step": 296, "max_steps": 400, "row": {"kind": "train", "step": 290, "loss": 2}})
    assert printed.lines == [
        "training  step 300/400  loss 1.4606  12,345 tokens/s  1,024 MiB", RESTARTING, "training  step 286/400",
        "training  step 290/400  loss 2.0000"
    ]  # fmt: skip


def test_a_terminal_shows_the_seconds_of_an_activity_in_one_line_that_goes_away() -> None:
    text, now = io.StringIO(), 100.0
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    activity = Activity(console, clock=lambda: now)
    activity.begin("starting Ray")
    now += 7
    activity.tick()
    assert activity._live is not None and str(activity._live.status) == "starting Ray  7 s"
    activity.begin("")
    assert activity._live is None and text.getvalue().endswith("\x1b[1A\x1b[2K")


def test_an_activity_of_the_driver_says_what_is_missing(printed: Printed) -> None:
    activity = Activity(printed.console, clock=printed.clock)
    activity.tick()
    activity.begin("waiting for room in the cluster", missing=lambda: "3 CPU are needed; 1 CPU are free")
    for _ in range(70):
        printed.now += 1
        activity.tick()
    assert printed.lines[0] == "waiting for room in the cluster"
    assert printed.lines[1:] == [
        f"still waiting for room in the cluster, for {seconds:.0f} s: 3 CPU are needed; 1 CPU are free"
        for seconds in (QUIET_S, 2 * QUIET_S)
    ]
    activity.begin("starting Ray")
    printed.now += QUIET_S - 1
    activity.tick()
    activity.begin("")
    printed.now += 5 * QUIET_S
    activity.tick()
    assert printed.lines[3:] == ["starting Ray"]


def test_the_remaining_time_is_of_the_last_steps_and_not_of_a_slow_start() -> None:
    """Of at least a window, also where steps are few and of unequal lengths."""
    now = [0.0]
    remaining = RemainingTime(lambda: now[0])
    for step in range(0, 11):  # slow
        remaining.see(step, 1000)
        now[0] += WINDOW_S / 10
    for step in range(11, 141):  # ten times as fast
        remaining.see(step, 1000)
        now[0] += WINDOW_S / 100
    assert remaining.seconds() == pytest.approx((1000 - 140) * WINDOW_S / 100, rel=0.02)
    few = RemainingTime(lambda: now[0])
    for step, lasted in ((1, 0.8 * WINDOW_S), (2, 0.4 * WINDOW_S), (3, 0.0)):
        few.see(step, 10)
        now[0] += lasted
    assert few.seconds() == pytest.approx(7 * 0.6 * WINDOW_S)
