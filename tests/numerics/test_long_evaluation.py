"""A long evaluation keeps nothing from batch to batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab import MLP, class_rows, make_session

from cluster.telemetry.processes import process_memory
from raytrain.plan.batch import EVAL_MICRO_BATCHES
from raytrain.train.memory.device import keep_freed_memory
from raytrain.train.step import evaluate


@pytest.mark.covers("MEM-06")
@pytest.mark.parametrize("clear_every", [None, 50])
def test_a_thousand_batches_need_the_memory_of_the_first(clear_every: int | None) -> None:
    data = {"train": class_rows(64), "eval": class_rows(1000 * EVAL_MICRO_BATCHES)}
    session = make_session(MLP, data, loop={"max_steps": 1, "micro_batch_size": 1})
    assert session.source.eval is not None
    resident: list[int] = []

    def watched():
        for number, micro in enumerate(session.loader.eval_batches(session.source.eval, limit=None)):
            if number % 20 == 0:
                resident.append(process_memory().rss)
            yield micro

    for _ in range(2):
        resident.clear()
        found = evaluate(session.step, watched(), workers=session.workers, clear_every=clear_every)
    assert len(resident) == 50 and found["loss"] > 0
    slope = np.polyfit(np.arange(50) / 5, np.array(resident) / 1e6, 1)[0]
    assert slope <= 1.0, f"{slope:.2f} MB for each 100 batches"


@pytest.mark.parametrize("clear_every", [None, 2])
def test_clearing_returns_freed_memory_to_the_system(clear_every: int | None) -> None:
    session = make_session(MLP, {"train": class_rows(64), "eval": class_rows(64)}, loop={"max_steps": 1})
    keep_freed_memory()
    resident: list[int] = []

    def batches():
        for number, micro in enumerate(list(session.loader.eval_batches(session.source.eval, limit=None)) * 6):
            if number == 1:
                parts = [torch.ones(8000) for _ in range(3000)]
                kept = parts[-1]  # the end of the heap stays in use
                del parts
            if number in (1, 5):
                resident.append(process_memory().rss)
            yield micro
        assert len(kept)

    evaluate(session.step, batches(), workers=session.workers, clear_every=clear_every)
    returned = resident[0] - resident[1]
    assert (returned > 48e6) is (clear_every is not None), f"{returned / 1e6:.0f} of 96 MB"
