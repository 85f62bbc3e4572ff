"""Progress is shown at least every 30 seconds, also inside a long unit of another process."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jobs.inference.compute import InferenceDisplay, never_predicted, print_plan, print_summary
from raytrain.infer.input import Unit
from raytrain.infer.output import WorkerProgress, rows_in_progress
from raytrain.infer.summary import ClassQuality


class Shown:
    """A display whose clock the test sets; nothing ticks by itself."""

    def __init__(self, parts: str, *, terminal: bool = False, width: int = 120) -> None:
        self.now, self.out, self.beats, self.needed = 0.0, io.StringIO(), 0, ""
        console = Console(file=self.out, width=width, force_terminal=terminal, highlight=False)
        self.display = InferenceDisplay(
            console, rows=1000, earlier=100, in_progress=lambda: rows_in_progress(parts), beat=self.beat,
            missing=lambda: self.needed, clock=lambda: self.now,
        )  # fmt: skip

    def beat(self) -> None:
        self.beats += 1

    def until(self, second: int) -> list[str]:
        """The lines printed meanwhile."""
        self.out.seek(0)
        self.out.truncate()
        while self.now < second:
            self.now += 1
            self.display.tick()
        return self.out.getvalue().splitlines()


def test_a_line_comes_every_30_seconds_and_counts_rows_of_units_that_are_not_complete(tmp_path: Path) -> None:
    shown, worker = Shown(str(tmp_path)), WorkerProgress(str(tmp_path), "node-1", every_s=0)
    assert shown.until(65) == ["100 of 1,000 rows after 30 s", "100 of 1,000 rows after 60 s"]
    worker.report(Unit(3, 300, 100), 40)
    WorkerProgress(str(tmp_path), "node-2", every_s=0).report(Unit(4, 400, 100), 20)
    assert shown.until(75) == ["160 of 1,000 rows after 70 s"], "how long those took is unknown"
    assert shown.until(99) == []
    shown.display.complete(3, 100)  # its file still says 40
    WorkerProgress(str(tmp_path), "node-3", every_s=0).report(Unit(5, 500, 100), 30)
    assert shown.until(100) == ["250 of 1,000 rows, 3.0 rows/s, about 250 s left"]  # 90 in 30 s, 750 are left
    assert shown.beats == 20


@pytest.mark.parametrize("terminal", [False, True])
def test_a_wait_for_room_says_what_is_needed_until_the_first_row(tmp_path: Path, terminal: bool) -> None:
    shown = Shown(str(tmp_path), terminal=terminal)
    shown.needed = "1 process of a worker needs 1 CPU"
    said = [f"still waiting for room in the cluster, for {second} s: {shown.needed}" for second in (30, 60)]
    assert shown.until(65) == said
    shown.needed = ""
    WorkerProgress(str(tmp_path), "node-1", every_s=0).report(Unit(3, 300, 100), 40)
    shown.needed = "another worker needs 1 CPU"
    assert not [line for line in shown.until(130) if "room" in line], "units are computed"


def test_a_worker_writes_its_progress_every_few_seconds_only(tmp_path: Path) -> None:
    worker = WorkerProgress(str(tmp_path), "node-1", every_s=1e9)
    worker.report(Unit(3, 300, 100), 40)
    assert list(tmp_path.iterdir()) == [] and rows_in_progress(str(tmp_path)) == {}


def test_progress_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    WorkerProgress(str(tmp_path / "file"), "node-1", every_s=0).report(Unit(0, 0, 10), 5)
    assert rows_in_progress(str(tmp_path / "file")) == {}


def test_a_terminal_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(str(tmp_path), terminal=True)
    shown.display.complete(0, 400)
    shown.now = 10.0
    with shown.display:
        shown.display.tick()
        shown.display.complete(1, 100)
        shown.now = 20.0
        shown.display.tick()
    text = shown.out.getvalue()
    assert "600/1,000 rows" in text and "10.0 rows/s" in text, "what loading took before the first is no rate"


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_has_a_remaining_time_once_a_row_is_done(tmp_path: Path, width: int) -> None:
    shown = Shown(str(tmp_path), terminal=True, width=width)

    def bar() -> str:
        shown.display.tick()
        with shown.display._console.capture() as seen:
            shown.display._console.print(shown.display._bar.get_renderable())
        return re.sub(r"\x1b\[\d*m", "", seen.get()).strip()

    shown.now = 10.0
    assert (text := bar()).endswith("0:00:10") and "left" not in text and "rows/s" not in text
    shown.display.complete(0, 200)
    bar()
    shown.now = 20.0
    shown.display.complete(1, 200)
    assert (text := bar()).endswith("500/1,000 rows  20.0 rows/s 0:00:20  0:00:25 left") and len(text) <= width


def planned(*, workers: int = 1, stages: int = 1, units: int = 1, at_once: int | None = None) -> Any:
    """As much of a plan as is printed."""
    return SimpleNamespace(
        units=[SimpleNamespace(rows=2)] * units, rows=SimpleNamespace(rows=4), workers=workers, threads=2,
        at_once=at_once or workers, waits="",
        target=SimpleNamespace(
            model=SimpleNamespace(dtype="fp32", device="cpu"), address="local", name="run", warnings=()
        ),
        hosts=SimpleNamespace(hosts=0, lines=list), stages=SimpleNamespace(stages=stages, lines=list),
        batch_size=2, batch_reason="infer.batch_size", output=SimpleNamespace(path="out"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({}, "workers: this process with 2 threads\n"),
        ({"stages": 2}, "workers: this process, 2 stages each with 2 threads each\n"),
        ({"workers": 3}, "workers: 3 workers with 2 threads each\n"),
        ({"workers": 5, "at_once": 4, "units": 10}, "5 workers with 2 threads each; room for 4 at once\nschedule: 10 "
         "units in 3 rounds: at most 3.33 times the speed of one worker (83% of linear)"),
    ],
)  # fmt: skip
def test_the_plan_says_how_many_compute_with_how_many_threads(how: dict[str, int], says: str) -> None:
    out = io.StringIO()
    print_plan(planned(**how), Console(file=out, width=200, highlight=False))
    assert says in out.getvalue()


def test_the_last_lines_have_the_quality_of_values() -> None:
    quality = {"rows": 2, "failed": 0, "mean_absolute_error": 0.49862, "rmse": 0.62}
    summary = {"rows_per_s": 5.0, "tokens_per_s": None, "quality": quality, "quantized": None, "stages": None}
    out = io.StringIO()
    infer = SimpleNamespace(format="parquet")
    print_summary(planned(), infer, {"rows": 2, "failed": 0}, summary, Console(file=out, width=200))  # pyright: ignore[reportArgumentType]
    assert "mean absolute error 0.4986, root mean square error 0.62" in out.getvalue()


def class_figures(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    measured = ClassQuality()
    for label, prediction in pairs:
        measured.add(label, prediction)
    return measured.figures()


def test_labels_that_were_never_predicted_are_named_with_the_predictions_that_are_no_label() -> None:
    known = [("cat", "cat"), ("dog", "cat"), ("dog", "dog")]
    assert never_predicted(class_figures(known)) == []
    zebras = [*known, ("zebra", "dog"), ("zebra", None)]
    assert never_predicted(class_figures(zebras)) == ["no row was predicted as 'zebra' (2 rows)"]
    by_number = [(number, f"c{number}") for number in range(7) for _ in range(7 - number)]
    assert never_predicted(class_figures(by_number)) == [
        "no row was predicted as '0', '1', '2', '3', '4' and 2 more (28 rows); "
        "predictions that are no label: 'c0', 'c1', 'c2', 'c3', 'c4' and 2 more"
    ]
