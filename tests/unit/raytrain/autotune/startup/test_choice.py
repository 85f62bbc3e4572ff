"""What the terminal shows of choices that are measured at the start of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raytrain.autotune.startup.choice import Calibration, Record
from raytrain.autotune.startup.inflight import InflightChoice
from raytrain.autotune.startup.layers import LayersChoice
from raytrain.autotune.startup.micro_batch import MicroBatchChoice, use_fitting_rows
from raytrain.autotune.startup.precision import PrecisionChoice
from raytrain.autotune.startup.shares import SharesChoice
from raytrain.plan.choice import Deferred
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

REASON = "bf16 measured 0.58 times as fast as fp32"


def calibration(run: RunFolder, *, rank: int = 0) -> Calibration:
    """Of an attempt whose choices are measured elsewhere."""
    workers = SimpleNamespace(rank=rank, broadcast_object=lambda value: value)
    plan = SimpleNamespace(precision=Deferred("measured", ("bf16", "fp32")))
    session = SimpleNamespace(
        workers=workers, job=SimpleNamespace(plan=plan), settings=SimpleNamespace(micro_batch=None),
        loader=SimpleNamespace(),
    )  # fmt: skip
    reporter = SimpleNamespace(event=lambda *_, **__: None)
    return Calibration(cast(Session, session), run, cast(Any, reporter), lambda _: None)


def decided(made: Calibration, kind: Any, value: Any, **arguments: Any) -> None:
    """Decide a choice of this kind, which measures this value."""

    class Planted(kind):
        def applies(self) -> bool:
            return True

        def settings(self) -> None:
            return None

        settings_of = unmeasured = lambda self, *_: None

        def measure(self, settings: Any) -> Record:
            return {"value": value, "reason": REASON}

        def apply(self, record: Record) -> None:
            assert record["value"] == value

    Planted(made, **arguments).decide()


@pytest.mark.parametrize(
    ("kind", "value", "arguments", "words"),
    [
        (PrecisionChoice, "fp32", {"forced": None, "loaded": None}, "precision fp32"),
        (MicroBatchChoice, 16, {}, "batch     micro-batches of 16"),
        (LayersChoice, ["head"], {"precisions": ["bf16"]}, "precision 1 layer in fp32 where others are in bf16"),
        (SharesChoice, {"micro_batch": 1}, {}, "shares    unequal"),
        (LayersChoice, [], {"precisions": ["bf16"]}, None),
        (SharesChoice, "equal", {}, None),
        (InflightChoice, 2, {}, None),
    ],
)
def test_a_measured_choice_stays_on_the_terminal_where_the_first_lines_left_it_open_or_it_is_unusual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any, value: Any, arguments: Any, words: str | None
) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    decided(calibration(run, rank=1), kind, value, **arguments)
    assert capsys.readouterr().out == "", "rank 0 says it for all"
    decided(calibration(run), kind, value, **arguments)
    assert capsys.readouterr().out == ("" if words is None else f"{words}: {REASON}\n")
    decided(calibration(run), kind, value, **arguments)
    assert capsys.readouterr().out == "", "another attempt uses what the first has measured"


def test_a_size_that_was_measured_for_the_comparison_of_precisions_is_said_when_it_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibration(RunFolder.create(str(tmp_path), "a"))
    monkeypatch.setattr(MicroBatchChoice, "settings", lambda _: None)
    monkeypatch.setattr(MicroBatchChoice, "settings_of", lambda _, known: None)
    monkeypatch.setattr(MicroBatchChoice, "unmeasured", lambda _: None)
    monkeypatch.setattr(MicroBatchChoice, "measure", lambda _, settings: {"value": 16, "reason": REASON})
    use_fitting_rows(made)
    assert capsys.readouterr().out == "" and made.session.loader.micro_batch == 16
    decided(made, MicroBatchChoice, 16)
    assert capsys.readouterr().out == f"batch     micro-batches of 16: {REASON}\n"
