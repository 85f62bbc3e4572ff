"""What a search shows: the table with the line of what happens now, plain lines in a pipe, and the final table."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jobs.tuning.batch.results import decision_table, untold_warning
from jobs.tuning.command import TuneCommand
from jobs.tuning.space.results import print_files
from jobs.tuning.table import BATCH_COLUMNS, CHOOSING, PLAIN_EVERY_S, SweepTable, print_table
from raytrain.autotune.search.batch_size import BatchDecision, TableRow
from raytrain.autotune.search.measurement import Candidate
from raytrain.plan.choice import Resolved


class Seconds:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(width: int | None = None) -> Console:
    """A terminal of that width, or a pipe."""
    return Console(file=io.StringIO(), force_terminal=width is not None, width=width or 80, highlight=False)


def printed(shown: Console) -> list[str]:
    assert isinstance(shown.file, io.StringIO)
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]


def test_in_a_pipe_the_start_of_a_process_its_measurement_and_long_waits_are_lines() -> None:
    clock, pipe = Seconds(), console()
    with SweepTable(pipe, BATCH_COLUMNS, title="", clock=clock) as table:
        table.show()
        table.propose(1, ["time", "fp32", "2"], left="about 9 more after it")
        table.show()
        table.show()
        clock.now = PLAIN_EVERY_S
        table.show()
        table.start(1)
        table.show()
        table.end(1, ["time", "fp32", "2", "5", "", ""], "fp32, 2 rows, time: 5 rows/s")
        table.show()
    starting = "starting trial 1 (about 9 more after it)"
    measuring = "measuring trial 1 (about 9 more after it)"
    assert printed(pipe) == [
        starting,
        f"still {starting}, for 10 s",
        measuring,
        "trial 1  fp32, 2 rows, time: 5 rows/s",
    ]


def test_on_a_terminal_something_counts_before_the_first_trial_while_one_starts_and_while_it_runs() -> None:
    clock, terminal = Seconds(), console(80)
    table = SweepTable(terminal, BATCH_COLUMNS, title="", clock=clock)
    with table:
        assert CHOOSING in "\n".join(printed(terminal)), "before the first trial"
        table.propose(3, ["time", "fp32", "2"], left="2 of 8 done")
        table.show()
        clock.now = 7.0
        table.show()
        row = console()
        row.print(table.drawn())
        assert "starting 7 s" in "\n".join(printed(row))
        table.start(3)
        table.show()
    shown = "\n".join(printed(terminal))
    assert "measuring trial 3 (2 of 8 done), 0 s" in shown
    clock.now, row = 9.0, console()
    row.print(table.drawn())
    assert "running 2 s" in "\n".join(printed(row))


def decision(*rows: TableRow, untold: tuple[str, ...] = ()) -> BatchDecision:
    one = Candidate("fp32", 16)
    return BatchDecision(one, Resolved("fp32", ""), Resolved(16, ""), 78.0, None, None, rows, {}, {}, {}, True,
                         untold=untold)  # fmt: skip


QUIET = TableRow("fp32", 16, 9, 78.21, 77.0, 79.4, None, 446 << 20)
NOISY = TableRow("bf16", 64, 5, 156.3, 23.0, 1067.0, None, None)


def table_lines(found: BatchDecision, width: int) -> list[str]:
    shown = console(width)
    print_table(shown, decision_table(found, kind=""))
    return printed(shown)


@pytest.mark.parametrize("width", [80, 120])
def test_a_rate_has_a_possible_interval_and_one_that_says_little_is_called_too_noisy(width: int) -> None:
    lines = table_lines(decision(QUIET, NOISY), width)
    text = "\n".join(lines)
    assert "±" not in text and "78.21 [77, 79.4]" in text and "160 [23, 1,100]" in text
    assert "too noisy" in next(line for line in lines if line.startswith("bf16"))
    assert "too noisy" not in next(line for line in lines if "fp32" in line)


def test_a_column_without_a_value_is_left_out() -> None:
    head = table_lines(decision(QUIET, NOISY), 120)[0]
    assert "predicted" not in head and "peak" in head
    assert "predicted" in table_lines(decision(replace(QUIET, predicted_peak=440 << 20)), 120)[0]


def test_precisions_that_noise_does_not_tell_apart_are_named() -> None:
    assert untold_warning(decision(QUIET)) == ""
    assert "to tell bf16 from fp32 at the same number of rows: fp32 stays" in untold_warning(
        decision(QUIET, untold=("bf16",))
    )


def command_at(shown: Console) -> TuneCommand:
    made = TuneCommand.__new__(TuneCommand)
    made.console = shown
    return made


@pytest.mark.parametrize("width", [80, 120])
def test_sentences_are_broken_between_words_and_only_on_a_terminal(width: int) -> None:
    text = "precision   bf16: " + "each at its own best size, loss and gradient norm agree " * 4
    terminal, pipe = console(width), console()
    command_at(terminal).print_line(text)
    command_at(pipe).print_line(text)
    lines = printed(terminal)
    assert len(lines) > 1 and max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(text.split()), "no word is cut"
    assert printed(pipe) == [text.rstrip()]


def test_a_command_to_copy_stays_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.tuning.space.results.build_sweep_report", lambda sweep: f"{sweep.path}/report")
    folder = "/a folder/" + "long/" * 20
    sweep: Any = SimpleNamespace(path=folder, trials="t", picture="p", best=f"{folder}best.yaml")
    terminal = console(80)
    made = command_at(terminal)
    made.sweep = sweep
    print_files(made, died=[])
    assert f"raytrain train '{folder}best.yaml'" in printed(terminal), "below its label, where both do not fit"
