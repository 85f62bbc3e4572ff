"""What is let go of and said where memory runs out; without a second process."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from lab import MLP, Rows, class_rows, make_session
from torch import Tensor

from raytrain.errors import RunError
from raytrain.train.memory.device import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

CPU = torch.device("cpu")


class Refused(torch.OutOfMemoryError):
    """What an allocator raises."""


def test_out_of_memory_is_recognised_by_type_and_not_by_message() -> None:
    for error in (torch.OutOfMemoryError("x"), MemoryError(), Refused()):
        assert isinstance(run_or_shortage(partial(fails, error), device=CPU, who="rank 0"), Shortage)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_or_shortage(lambda: fails(RuntimeError("out of memory")), device=CPU, who="rank 0")


def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("chained", [False, True])
def test_memory_of_a_failed_pass_is_freed_at_once(chained: bool) -> None:
    held: list[weakref.ref[Tensor]] = []

    def passes() -> None:
        activation = torch.zeros(3)
        held.append(weakref.ref(activation))
        error = torch.OutOfMemoryError("no room\nfor it")  # a local of the frame that its traceback holds: a cycle
        if not chained:
            raise error
        try:
            fails(ValueError("first"))
        except ValueError:
            fails(error)

    gc.disable()
    try:
        short = run_or_shortage(passes, device=CPU, who="rank 3")
        assert held[0]() is None
    finally:
        gc.enable()
    assert short == Shortage("rank 3", "OutOfMemoryError: no room")
    assert "rank 3: OutOfMemoryError: no room" in str(StepDropped([short]))


def test_messages_between_workers_survive_a_round_trip() -> None:
    one = Shortage("rank 1", "OutOfMemoryError: é", 2**40, 5)
    payload = json.dumps(one.to_json()).encode()
    workers = Workers()
    workers.all_gather_bytes = lambda own: [b"null", own, b"null"]  # type: ignore[method-assign]
    assert step_dropped(workers, one).shortages == [one]
    workers.all_gather_bytes = lambda own: [own, payload, own]  # type: ignore[method-assign]
    assert step_dropped(workers, "a result").shortages == [one]
    assert str(one) == "rank 1: OutOfMemoryError: é (held 1,099,511,627,776 bytes, free 5 bytes)"


def session_of(**sections: Any) -> Session:
    data = {"train": class_rows(12), "eval_fraction": 0.0}
    return make_session(MLP, data, loop={"global_batch_size": 6, "micro_batch_size": 3, "max_steps": 2}, **sections)


def test_a_single_row_that_does_not_fit_ends_the_run() -> None:
    """The driver adds what would need less memory (tests/unit/jobs/driver/test_remedies.py)."""
    session, rows = session_of(), Rows()
    inner = session.trainable.loss

    def loss(module: Any, batch: Any) -> Any:
        if module.training and session.state.step == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return inner(module, batch)

    session.trainable.loss = loss
    with pytest.raises(RunError, match=r"step 2 with loop.micro_batch_size 1: rank 0: .*2.00 GiB; there is nothing"):
        session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    assert [row["micro_batch_size"] for row in rows.events] == [2, 1]
    assert session.state.step == 1 and all(row["seconds"] > 0 for row in rows.events)


def test_a_batch_that_does_not_fit_is_a_shortage_too() -> None:
    """Where only the batches know what they weigh, all are fetched before the passes."""
    session, rows = session_of(), Rows()
    session.loader._weight = lambda batch: len(batch["labels"])
    inner, failures = session.loader._gather, iter([True])

    def gather(split: Any, indices: Any) -> Any:
        if next(failures, False):
            raise MemoryError
        return inner(split, indices)

    session.loader._gather = gather  # type: ignore[method-assign]
    session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    (event,) = [row for row in rows.events if row["kind"] == "out_of_memory"]
    assert event["step"] == 1 and event["shortages"][0]["error"] == "MemoryError"
    assert session.state.step == 2
