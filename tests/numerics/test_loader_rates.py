"""Loader processes measured with the real feed and the real step: more of them where reading is slow, and no trace."""

from __future__ import annotations

import time
from typing import Any

import torch
from lab import MLP, class_rows, make_session
from test_probe_is_neutral import state_of

from raytrain.autotune.probe.loaders import measure_loaders
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.loaders import choose_count
from raytrain.autotune.search.measurement import Candidate
from raytrain.train.session import Session


class Slow:
    """Rows that take their time, and draw from the generators that the model draws from too."""

    def __init__(self, rows: int, pause: float) -> None:
        self.columns, self.pause = class_rows(rows), pause

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        noise = torch.rand(())
        return {name: column[index] + 0 * noise.to(column.dtype) for name, column in self.columns.items()}


def session_of(pause: float, **data: Any) -> Session:
    return make_session(
        {**MLP, "num_classes": 4, "dropout": 0.1},
        {"train": Slow(64, pause), "eval_fraction": 0.25, "storage": "stream", **data},
        loop={"micro_batch_size": 8},
    )


def test_slow_rows_are_read_by_more_processes_and_nothing_is_changed() -> None:
    """Four milliseconds a row, sleeping: two processes read twice as fast as one, on however many cores."""
    session = session_of(0.004)
    before = state_of(session)
    found = measure_loaders(StepProbe(session), Candidate("bf16", 8), most=2, passes=2)
    assert state_of(session) == before
    assert [rate.count for rate in found.rates] == [0, 1, 2]
    assert all(rate.batches >= 4 for rate in found.rates)
    chosen = choose_count(found)
    assert chosen.value == 2 and "batches/s of 8 rows" in chosen.reason and "0 to 2 processes" in chosen.reason
    session.close()


def test_with_loader_processes_reading_is_not_part_of_a_pass() -> None:
    """Else rows that are slow to read would hide how long a size computes."""
    beside, alone = session_of(0.004, loader_workers=1), session_of(0.004, loader_workers=0)
    candidate = Candidate("fp32", 8)
    shortest = []
    for session in (beside, alone):
        found = StepProbe(session).measure(candidate, budget=None, passes=3, with_memory=False)
        shortest.append(min(found.pass_s))
        session.close()
    assert shortest[1] > 8 * 0.004 > shortest[0], "eight rows sleep so long where they are read in the pass"
