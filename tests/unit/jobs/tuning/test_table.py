"""What a search shows: lines about its trials, and the final table."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jobs.driver.progress import Activity
from jobs.tuning.batch import decision_table
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import Point
from jobs.tuning.space_trials import SpaceTrials, config_of
from raytrain.autotune.batch_search import BatchDecision, TableRow
from raytrain.autotune.measurement import Candidate
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import SweepFolder


def console(width: int | None = None) -> Console:
    """A terminal of that width, or a pipe."""
    return Console(file=io.StringIO(), force_terminal=width is not None, width=width or 80, highlight=False)


def printed(shown: Console) -> list[str]:
    assert isinstance(shown.file, io.StringIO)
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]


def test_the_start_of_a_process_its_measurement_and_its_result_are_lines(tmp_path: Path) -> None:
    pipe = console()
    first, second = (config_of(Point(number, {"seed": 7 * number}, (), 0, 1, 10)) for number in (1, 2))
    with Activity(pipe) as activity:
        wanted = SimpleNamespace(tune=SimpleNamespace(metric="eval_loss"))
        command: Any = SimpleNamespace(
            the_sweep=SweepFolder(str(tmp_path)), activity=activity, print_line=pipe.print, spec=wanted
        )
        trials = SpaceTrials(command, private=False)
        trials.runs(first, started=False)
        trials.runs(first, started=True)
        trials.runs(second, started=False)
        trials.ended(first, {"final": True, "eval_loss": 0.5, "steps": 10}, None)
    assert printed(pipe) == [
        "starting trial 1 (seed 7)",
        "measuring trial 1 (seed 7)",
        "measuring trial 1 (seed 7) and starting trial 2 (seed 14)",
        "trial 1  seed 7: 10 steps, 0.5 eval loss",
        "starting trial 2 (seed 14)",
    ]


def decision(*rows: TableRow) -> BatchDecision:
    one = Candidate("fp32", 16)
    return BatchDecision(one, Resolved("fp32", ""), Resolved(16, ""), rows, {}, True)


QUIET = TableRow("fp32", 16, 9, 78.21, 77.0, 79.4, None, 446 << 20)
NOISY = TableRow("bf16", 64, 5, 156.3, 23.0, 1067.0, None, None)


def table_lines(found: BatchDecision, width: int) -> list[str]:
    shown = console(width)
    command_at(shown).print_table(decision_table(found))
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
    monkeypatch.setattr("jobs.tuning.driver.build_sweep_report", lambda sweep: f"{sweep.path}/report")
    folder = "/a folder/" + "long/" * 20
    sweep: Any = SimpleNamespace(path=folder, trials="t", picture="p", best=f"{folder}best.yaml", again=list)
    terminal = console(80)
    made = command_at(terminal)
    made.sweep = sweep
    made.print_files()
    assert f"raytrain train '{folder}best.yaml'" in printed(terminal), "below its label, where both do not fit"
