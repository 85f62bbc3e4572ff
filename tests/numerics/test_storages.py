"""Wherever rows are kept and whoever reads them: the same order and bit-equal losses, also after a resume."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lab import GPT, MLP, Rows, class_rows, make_job, token_rows, train

from raytrain.data.rows.batches import Cursor
from raytrain.plan.choice import Resolved
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.step import TrainingStep

STEPS = 13


class Items:
    """Rows of a table, one by one; `asked` counts."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns, self.asked = columns, 0

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked += 1
        return {name: column[index] for name, column in self.columns.items()}


class Drawn(Items):
    """Items with noise from each of the global generators."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + 0.1 * torch.randn(()) + 0.1 * random.random() + 0.1 * np.random.rand()}


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "columns": (MLP, lambda: class_rows(70)),
    "tokens": (GPT, lambda: token_rows(70, ragged=True)),
    "items": ({**MLP, "num_classes": 4}, lambda: Items(class_rows(70))),
}
DRAWN = ({**MLP, "num_classes": 4, "dropout": 0.2}, lambda: Drawn(class_rows(70)))
STORAGES = {
    "resident": {}, "partial": {"resident_rows": 20}, "stream": {}, "pinned": {},
    "stream, one process": {"loader_workers": 1}, "stream, three processes": {"loader_workers": 3},
}  # fmt: skip


def session_of(kind: str, storage: str, **sections: Any) -> Session:
    model, rows = DRAWN if kind == "drawn" else KINDS[kind]
    loop = {"max_steps": STEPS, "micro_batch_size": 8, "eval_every": 5, **sections.pop("loop", {})}
    data = {"train": rows(), "eval_fraction": 0.3, **sections.pop("data", {})}
    job, source = make_job(model, data, loop=loop, **sections)
    chosen = {name: Resolved(value, "this test") for name, value in STORAGES[storage].items()}
    plan = replace(job.plan, storage=Resolved(storage.split(",")[0], "this test"), loader_workers=None)
    session = Session(replace(job, plan=replace(plan, **chosen)), workers=Workers(), source=source)
    session.prepare("fp32")
    return session


@pytest.fixture
def opened() -> Iterator[Any]:
    """`opened(kind, storage)` is a session, closed at the end."""
    sessions: list[Session] = []

    def make(*arguments: Any, **named: Any) -> Session:
        sessions.append(session_of(*arguments, **named))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def series(rows: Rows) -> list[float]:
    return [*rows.losses, *rows.of("eval", "loss")]


@pytest.mark.covers("DATA-07", "PERF-23", "VER-17")
@pytest.mark.parametrize("kind", KINDS)
def test_every_storage_gives_bit_equal_losses(kind: str, opened: Any) -> None:
    losses = {}
    for storage in STORAGES:
        if "process" in storage and kind != "items":
            continue
        session = opened(kind, storage)
        losses[storage] = series(train(session)[0])
        assert (session.loader.pool is not None) == ("process" in storage)
    assert len(losses["resident"]) == STEPS + 3
    assert all(found == losses["resident"] for found in losses.values()), losses


def test_loader_processes_change_neither_the_draws_of_items_nor_of_the_model(opened: Any) -> None:
    storages = ["stream", "stream, one process", "stream, three processes"]
    losses = [series(train(opened("drawn", storage))[0]) for storage in storages]
    assert losses[0] == losses[1] == losses[2]
    again = opened("drawn", "stream")
    torch.rand(3), random.random(), np.random.rand()  # another start of the loop's generators, other masks of dropout
    assert series(train(again)[0]) != losses[0]
    partial = [series(train(opened("drawn", "partial"))[0]) for _ in range(2)]
    assert partial[0] == partial[1] != losses[0], "rows that are kept are drawn once"


@pytest.mark.parametrize("storage", STORAGES)
def test_any_position_is_where_an_unbroken_run_would_be(storage: str, opened: Any) -> None:
    late, unbroken, cursor = opened("items", storage), opened("items", storage), Cursor()
    for _ in range(7):
        indices, cursor = unbroken.loader.global_batch(cursor)
        before = [micro.batch for micro in unbroken.loader.micro_batches(indices)]
    assert cursor == Cursor(1, 48), "49 rows in windows of 16"
    indices, _ = late.loader.global_batch(Cursor(1, 32))
    after = [micro.batch for micro in late.loader.micro_batches(indices)]
    assert len(before) == len(after) == 2
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(before, after, strict=True))


@pytest.mark.covers("DATA-06", "DATA-13", "BP-14")
def test_resident_items_are_converted_once_for_all_epochs(opened: Any) -> None:
    session = opened("items", "resident", loop={"max_steps": 20})
    items = session.job.data.train
    asked = items.asked
    told: list[dict[str, Any]] = []
    train(session)
    session.say = lambda kind, **fields: told.append(fields)
    session.prepare("fp32")
    train(session)
    assert session.state.cursor.epoch >= 5 and items.asked == asked and not told, "each item once, before"
    streamed = opened("items", "stream", loop={"max_steps": 20})
    before = streamed.job.data.train.asked
    train(streamed)
    assert streamed.job.data.train.asked - before > 5 * 49


class Worked(Items):
    """Each item takes the thread that asks 2 ms of a core."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = time.thread_time() + 2e-3
        while time.thread_time() < end:
            pass
        return super().__getitem__(index)


@pytest.mark.covers("DATA-08", "DATA-16")
def test_rows_are_resident_before_the_first_step_and_need_no_further_work(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    run = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda self, *a, **k: order.append("step") or run(self, *a, **k))
    shares = {}
    for storage in ("resident", "stream"):
        model, data = {**MLP, "num_classes": 4}, {"train": Worked(class_rows(70)), "eval_fraction": 0.3}
        job, source = make_job(model, data, loop={"max_steps": STEPS, "micro_batch_size": 8})
        plan = replace(job.plan, storage=Resolved(storage, "this test"), loader_workers=None)
        session = Session(replace(job, plan=plan), workers=Workers(), source=source)
        session.say = lambda kind, **told: order.append(f"{kind} {told['phase']}")
        session.prepare("fp32")
        rows = train(session)[0]
        session.close()
        shares[storage] = rows.of("train", "data_cpu_share")
        prepared = ["preparation start", *["preparation progress"] * (order.count("preparation progress"))]
        assert order == [*prepared, "preparation finished", *["step"] * STEPS], "all uploads end before the first step"
        order.clear()
    assert all(0 <= share <= 1.05 for share in (*shares["resident"], *shares["stream"]))
    resident, streamed = (statistics.median(shares[storage]) for storage in ("resident", "stream"))
    assert resident < streamed / 3, shares


@pytest.mark.parametrize("budget", [24, 60, 1000])
def test_a_budget_of_tokens_changes_no_step(budget: int, opened: Any) -> None:
    """The rows of a step and its divisor stay, so the losses are those of any other cut within rounding."""
    cut = opened("tokens", "resident", data={"tokens_per_batch": budget})
    plain = opened("tokens", "resident")
    rows, reference = train(cut)[0], train(plain)[0]
    (told,) = [event for event in rows.events if event["kind"] == "token_budget"]
    assert told["budget"] == told["fixed"] == 0.0 and "of what is computed is padding" in told["reason"], "equal rows"
    ours, theirs = series(rows), series(reference)
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=2e-5, atol=0)
