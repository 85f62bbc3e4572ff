"""Loader processes measured with the real feed and the real step: more of them where reading is slow, and no trace."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lab import MLP, class_rows, make_session
from test_probe_is_neutral import state_of

from raytrain.autotune.loaders import choose_count, measure_loaders
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.step_probe import StepProbe
from raytrain.train.session import Session


class Slow:
    """Rows that take their time, and draw from the generators that the model draws from too."""

    def __init__(self, rows: int, pause: float) -> None:
        self.columns, self.pause, self.read_here = class_rows(rows), pause, 0

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        self.read_here += 1
        noise = torch.rand(())
        return {name: column[index] + 0 * noise.to(column.dtype) for name, column in self.columns.items()}


def session_of(rows: Slow, **data: Any) -> Session:
    return make_session(
        {**MLP, "num_classes": 4, "dropout": 0.1},
        {"train": rows, "eval_fraction": 0.25, "storage": "stream", **data},
        loop={"micro_batch_size": 8},
    )


def test_each_count_of_processes_is_measured_and_nothing_is_changed() -> None:
    session = session_of(Slow(64, 0.004))
    before = state_of(session)
    found = measure_loaders(StepProbe(session), Candidate("bf16", 8), most=2, passes=2)
    assert state_of(session) == before
    assert [rate.count for rate in found.rates] == [0, 1, 2]
    assert all(rate.batches >= 4 for rate in found.rates)
    speeds = {rate.count: rate.batches / rate.seconds for rate in found.rates}
    chosen = choose_count(found)
    assert chosen.value == min(count for count, speed in speeds.items() if speed >= 0.97 * max(speeds.values()))
    assert "batches/s of 8 rows" in chosen.reason and "0 to 2 processes" in chosen.reason
    session.close()


def test_with_loader_processes_reading_is_not_part_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise rows that are slow to read would hide how long a size computes. The clock counts rows that this
    process reads."""
    for processes in (0, 1):
        rows = Slow(64, 0.0)
        session = session_of(rows, loader_workers=processes)
        with monkeypatch.context() as patch:
            patch.setattr("raytrain.autotune.step_probe.seconds_of", lambda _, rows=rows: float(rows.read_here))
            found = StepProbe(session).measure(Candidate("fp32", 8), budget=None, passes=3, with_memory=False)
        session.close()
        assert len(found.pass_s) >= 3
        assert min(found.pass_s) >= 8.0 if processes == 0 else max(found.pass_s) == 0.0
