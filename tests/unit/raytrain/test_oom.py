"""What is let go of, put back and said where memory runs out; without a second process."""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lab import MLP, Rows, class_rows, make_session
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.oom import Shortage, StepDropped, Undo, attempt, heard, told
from raytrain.session import Session

CPU = torch.device("cpu")


class Refused(torch.OutOfMemoryError):
    """What an allocator raises."""


def test_it_is_known_by_type_and_never_by_words() -> None:
    for error in (torch.OutOfMemoryError("x"), MemoryError(), Refused()):
        assert isinstance(attempt(partial(fails, error), device=CPU, who="rank 0"), Shortage)
    with pytest.raises(RuntimeError, match="out of memory"):
        attempt(lambda: fails(RuntimeError("out of memory")), device=CPU, who="rank 0")


def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("chained", [False, True])
def test_what_the_pass_held_is_free_as_soon_as_it_is_noticed(chained: bool) -> None:
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
        short = attempt(passes, device=CPU, who="rank 3")
        assert held[0]() is None
    finally:
        gc.enable()
    assert short == Shortage("rank 3", "OutOfMemoryError: no room")
    assert "rank 3: OutOfMemoryError: no room" in str(StepDropped([short]))


def test_what_workers_say_to_each_other_comes_back() -> None:
    one = Shortage("rank 1", "OutOfMemoryError: é", 2**40, 5)
    assert heard([told(None), told(one), told(None)]) == [one]
    assert str(one) == "rank 1: OutOfMemoryError: é (held 1,099,511,627,776 bytes, free 5 bytes)"


class Counting(nn.Module):
    """Counts, draws and learns in its forward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor in its place
        return self.norm(x)


def test_generators_and_buffers_are_as_before() -> None:
    module = Counting()
    undo = Undo(module, CPU)
    for _ in range(2):  # the second time over the same buffers
        undo.take()
        before = {name: value.clone() for name, value in module.named_buffers()}
        places = {name: id(value) for name, value in module.named_buffers()}
        drawn = (float(torch.rand(())), float(np.random.rand()), random.random())
        module(torch.randn(8, 4))
        assert int(module.calls) != int(before["calls"])
        assert undo.put_back() is False
        assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())
        assert {name: id(value) for name, value in module.named_buffers()} == places
        assert (float(torch.rand(())), float(np.random.rand()), random.random()) == drawn
        module(torch.randn(8, 4))


def test_a_model_that_draws_nothing_comes_to_the_same() -> None:
    module = nn.Linear(3, 3)
    undo = Undo(module, CPU)
    undo.take()
    module(torch.ones(2, 3))
    assert undo.put_back() is True
    random.random()
    assert undo.put_back() is False


def test_a_draw_after_many_quiet_steps_is_told_and_not_taken_for_undone() -> None:
    undo = Undo(nn.Linear(3, 3), CPU)
    for _ in range(6):
        undo.take()
    np.random.rand()  # between two steps, or in this one: nobody knows
    after = np.random.get_state()
    assert undo.put_back() is False
    assert all(map(np.array_equal, np.random.get_state(), after))
    undo.take()
    before, drawn = np.random.get_state(), np.random.rand()
    assert undo.put_back() is False and all(map(np.array_equal, np.random.get_state(), before))
    assert np.random.rand() == drawn


def session_of() -> Session:
    data = {"train": class_rows(12), "eval_fraction": 0.0}
    return make_session(MLP, data, loop={"global_batch_size": 6, "micro_batch_size": 3, "max_steps": 2})


def test_a_single_row_that_does_not_fit_ends_the_run_with_the_keys() -> None:
    session, rows = session_of(), Rows()
    inner = session.trainable.loss

    def loss(module: Any, batch: Any) -> Any:
        if module.training and session.state.step == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return inner(module, batch)

    session.trainable.loss = loss
    with pytest.raises(RunError, match=r"step 2 with loop.micro_batch_size 1: rank 0: .*2.00 GiB.*data.storage"):
        session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    assert [row["micro_batch_size"] for row in rows.events] == [2, 1]
    assert session.state.step == 1 and all(row["seconds"] > 0 for row in rows.events)


def test_a_batch_that_does_not_fit_is_a_shortage_too() -> None:
    """Where only the batches know what they weigh, all are fetched before the passes."""
    session, rows = session_of(), Rows()
    session.feed._weight = lambda batch: len(batch["labels"])
    inner, failures = session.feed._gather, iter([True])

    def gather(split: Any, handles: Any) -> Any:
        if next(failures, False):
            raise MemoryError
        return inner(split, handles)

    session.feed._gather = gather  # type: ignore[method-assign]
    session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    (event,) = [row for row in rows.events if row["kind"] == "out_of_memory"]
    assert event["step"] == 1 and event["shortages"][0]["error"] == "MemoryError"
    assert session.state.step == 2
