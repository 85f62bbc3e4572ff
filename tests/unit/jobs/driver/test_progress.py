"""Lines without a terminal: at least one every 30 s, in every phase, which says what is awaited and since when."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from jobs.driver.progress import QUIET_S, SAY_SILENT_S, Activity, SilentRanks, TrainingDisplay, figures


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


def test_a_row_is_shown_with_its_units() -> None:
    row = {"kind": "train", "loss": 1.5, "tokens_per_s": 2500.0, "samples_per_s": 10.0, "peak_memory_bytes": 3 << 30}
    assert figures(row) == "loss 1.5000  2,500 tokens/s  3,072 MiB"
    assert figures({**row, "kind": "eval", "tokens_per_s": None}) == "eval loss 1.5000  10 samples/s  3,072 MiB"


def test_an_activity_of_the_driver_says_what_is_missing(printed: Printed) -> None:
    activity = Activity(printed.console, clock=printed.clock)
    activity.tick()
    activity.begin("waiting for room in the cluster", missing=lambda: "3 CPU are needed; 1 CPU are free")
    for _ in range(70):
        printed.now += 1
        activity.tick()
    assert printed.lines == [
        f"still waiting for room in the cluster, for {seconds:.0f} s: 3 CPU are needed; 1 CPU are free"
        for seconds in (QUIET_S, 2 * QUIET_S)
    ]
    activity.begin("starting Ray")
    printed.now += QUIET_S - 1
    activity.tick()
    activity.begin("")
    printed.now += 5 * QUIET_S
    activity.tick()
    assert len(printed.lines) == 2


def test_a_rank_that_does_not_respond_is_named_once_and_again_when_it_responds() -> None:
    ranks, began = SilentRanks(), 1_000_000.0
    signs = {0: (began, "on a (pid 1)"), 1: (began, "on b (pid 2)")}
    assert ranks.lines(signs, now=began + SAY_SILENT_S - 1) == []
    signs[0] = (began + SAY_SILENT_S, "on a (pid 1)")
    (line,) = ranks.lines(signs, now=began + SAY_SILENT_S)
    at = time.strftime("%H:%M:%S", time.localtime(began))
    assert line == f"rank 1 on b (pid 2) has not responded since {at}; the run waits for it"
    assert ranks.lines(signs, now=began + SAY_SILENT_S + 1) == []
    signs[1] = (began + 40, "on b (pid 2)")
    (line,) = ranks.lines({1: signs[1]}, now=began + 41)
    assert line == "rank 1 on b (pid 2) responds again, after 40 s"
    assert "has not responded" in ranks.lines({1: signs[1]}, now=began + 60)[0]
    assert ranks.lines({}, now=began + 61) == [], "it has died, which is said elsewhere"
    assert ranks.lines({1: (began + 62, "on b (pid 3)")}, now=began + 62) == [], "another process"
