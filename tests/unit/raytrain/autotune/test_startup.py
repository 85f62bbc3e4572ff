"""What the terminal shows of choices that are measured at the start of a run, and what of earlier records counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from raytrain.autotune import startup
from raytrain.autotune.startup import (
    Calibration,
    settle_layers,
    settle_micro_batch,
    settle_precision,
    settle_shares,
    use_fitting_rows,
)  # fmt: skip
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

REASON = "bf16 measured 0.58 times as fast as fp32"


class Settings(SimpleNamespace):
    """The settings of a step, of which a copy is made."""

    def __replace__(self, **changes: Any) -> Settings:
        return Settings(**{**vars(self), **changes})


def calibration(run: RunFolder, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0) -> Calibration:
    """Of an attempt whose choices are all open, and measured elsewhere."""
    workers = SimpleNamespace(
        rank=rank, world_size=2, broadcast_object=lambda value: value, all_gather_object=lambda value: [value]
    )
    names = ("precision", "fp32_layers", "micro_batch_size", "shares")
    plan = SimpleNamespace(**dict.fromkeys(names, Deferred("measured", ("bf16", "fp32"))), model_facts=object())
    job = SimpleNamespace(plan=plan, planned=lambda _: 32, cluster=SimpleNamespace(memory_limit=None), found=None)
    session = SimpleNamespace(
        workers=workers, job=job, settings=Settings(micro_batch=None, fp32_layers=()), precision=None,
        loader=SimpleNamespace(batches=SimpleNamespace(micro_batch=4)), device=torch.device("cpu"),
    )  # fmt: skip
    session.use_precision = session.prepare = lambda name: setattr(session, "precision", name)
    session.use = lambda settings: setattr(session, "settings", settings)
    monkeypatch.setattr(startup, "replace", lambda settings, **changes: settings.__replace__(**changes))
    monkeypatch.setattr(startup, "device_name", str)
    monkeypatch.setattr(startup, "fallen_precision", lambda _: None)
    monkeypatch.setattr(startup, "give_back_freed_memory", lambda: True)
    monkeypatch.setattr(Calibration, "probe", None)
    reporter = SimpleNamespace(event=lambda *_, **__: None)
    return Calibration(cast(Session, session), run, cast(Any, reporter), lambda _: None)


def plant(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """Every measurement has this result."""
    chosen = Resolved(value, REASON)
    record = {"value": value, "reason": REASON, "peak_bytes": None, "budget_bytes": None}
    monkeypatch.setattr(startup, "_measured_precision", lambda *_: record)
    monkeypatch.setattr(startup, "measure_micro_batch", lambda _, settings: (chosen, {**record, "settings": settings}))
    for name in ("measure_layers", "measure_shares"):
        monkeypatch.setattr(startup, name, lambda *_: (chosen, []))
    monkeypatch.setattr(startup, "use_fitting_rows", lambda _: None)
    monkeypatch.setattr(startup, "shares_of", lambda value: value)


@pytest.mark.parametrize(
    ("settle", "value", "arguments", "words"),
    [
        (settle_precision, "fp32", {"forced": None, "loaded": None}, "precision fp32"),
        (settle_micro_batch, 16, {}, "batch     micro-batches of 16"),
        (settle_layers, ["head"], {"precisions": ["bf16"]}, "precision 1 layer in fp32 where others are in bf16"),
        (settle_shares, {"micro_batch": 1}, {}, "shares    unequal"),
        (settle_layers, [], {"precisions": ["bf16"]}, None),
        (settle_shares, "equal", {}, None),
    ],
)
def test_a_measured_choice_stays_on_the_terminal_where_the_first_lines_left_it_open_or_it_is_unusual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settle: Any, value: Any,
    arguments: Any, words: str | None,
) -> None:  # fmt: skip
    run = RunFolder.create(str(tmp_path), "a")
    plant(monkeypatch, value)
    settle(calibration(run, monkeypatch, rank=1), **arguments)
    assert capsys.readouterr().out == "", "rank 0 says it for all"
    settle(calibration(run, monkeypatch), **arguments)
    assert capsys.readouterr().out == ("" if words is None else f"{words}: {REASON}\n")
    settle(calibration(run, monkeypatch), **arguments)
    assert capsys.readouterr().out == "", "another attempt uses what the first has measured"


def test_a_size_that_was_measured_for_the_comparison_of_precisions_is_said_when_it_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = use_fitting_rows
    made = calibration(RunFolder.create(str(tmp_path), "a"), monkeypatch)
    plant(monkeypatch, 16)
    fitting(made)
    assert capsys.readouterr().out == "" and made.session.loader.batches.micro_batch == 16
    settle_micro_batch(made)
    assert capsys.readouterr().out == f"batch     micro-batches of 16: {REASON}\n"


@pytest.mark.parametrize(
    ("known", "again"),
    [
        ({"settings": "bf16"}, False),
        ({"settings": "fp16"}, True),
        ({"trials": []}, True),  # as earlier versions wrote it
    ],
)
def test_a_record_counts_for_the_settings_it_was_measured_with(
    known: dict[str, Any], again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibration(RunFolder.create(str(tmp_path), "a"), monkeypatch)
    made.write("layers", {"value": 1, "reason": "", **known})
    found = made.settle("layers", lambda: {"value": 2, "reason": ""}, settings="bf16")
    assert found["value"] == (2 if again else 1)
