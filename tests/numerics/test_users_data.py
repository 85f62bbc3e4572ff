"""Jobs on the user's own rows: of different lengths, by a budget of tokens, without labels, from loader processes, and
with a collate function. Losses and updates equal those of the rows one by one."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
from lab import make_session, train
from torch import Tensor, nn
from torch.nn import functional as F

from raytrain.train.session import Session

WIDTH, CLASSES = 6, 5


class Tagger(nn.Module):
    """A class for each token; a token sees the mean of its row's visible tokens."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(11, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(WIDTH, CLASSES, generator=generator))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        visible = attention_mask[..., None].to(self.table.dtype)
        seen = self.table[input_ids] * visible
        mean = seen.sum(1, keepdim=True) / visible.sum(1, keepdim=True)
        return F.cross_entropy(((seen + mean) @ self.head).flatten(0, 1), labels.flatten())


def token_rows(count: int, *, unlabelled: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        ids = torch.randint(11, (1 + index % 7,), generator=draw)
        labels = torch.full_like(ids, -100) if index in unlabelled else ids % CLASSES
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def one_by_one(module: nn.Module, rows: list[dict[str, Tensor]]) -> float:
    """The mean loss over the labels of all rows, each row computed alone and without padding."""
    total, count = 0.0, 0
    for row in rows:
        labels = int((row["labels"] != -100).sum())
        if labels:
            mask = torch.ones_like(row["input_ids"])[None]
            total += float(module(row["input_ids"][None], row["labels"][None], mask).detach()) * labels
            count += labels
    return total / count


def session_of(data: dict[str, Any], *, module: nn.Module | None = None, loop: dict[str, Any] | None = None) -> Session:
    return make_session(
        {"module": module or Tagger()},
        {"eval_fraction": 0.0, **data},
        precision="fp64",
        loop={"global_batch_size": 24, "max_steps": 3, "log_every": 1, **(loop or {})},
    )


def losses_of(data: dict[str, Any], **loop: Any) -> tuple[list[float], dict[str, Tensor]]:
    session = session_of(data, loop=loop)
    reporter, _ = train(session)
    return reporter.losses, session.trainable.module.state_dict()


@pytest.mark.covers("DATA-20")
@pytest.mark.parametrize("storage", ["resident", "stream"])
@pytest.mark.parametrize("kind", ["items", "columns"])
def test_the_loss_of_padded_rows_is_that_of_the_rows_one_by_one(kind: str, storage: str) -> None:
    rows = token_rows(24)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    data = {"train": rows if kind == "items" else columns, "storage": storage}
    losses, _ = losses_of(data, micro_batch_size=8)
    assert losses[0] == pytest.approx(one_by_one(Tagger().double(), rows), rel=1e-13)
    whole, _ = losses_of(data, micro_batch_size=24)
    assert losses == pytest.approx(whole, rel=1e-12), "padding differs between micro-batches, the steps do not"


@pytest.mark.covers("DATA-21")
def test_a_budget_of_tokens_bounds_every_micro_batch_and_changes_no_step() -> None:
    rows = token_rows(72)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    sizes: list[tuple[int, int]] = []

    class Watched(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
            sizes.append((input_ids.numel(), int(attention_mask.sum())))
            return super().forward(input_ids, labels, attention_mask)

    session = session_of({"train": columns, "tokens_per_batch": 28}, module=Watched())
    reporter, _ = train(session)
    by_budget = list(sizes)
    assert by_budget and all(computed <= 28 for computed, _ in by_budget)
    assert sum(real for _, real in by_budget) == sum(len(row["input_ids"]) for row in rows), "every token of the epoch"
    (report,) = [event for event in reporter.events if event["kind"] == "token_budget"]
    assert report["budget"] == pytest.approx(1 - sum(real for _, real in by_budget) / sum(n for n, _ in by_budget))
    assert report["micro_batches"] == len(by_budget)
    # as many rows as are safe if all were of the longest length: four of seven tokens, in the order of the epoch
    order = session.source.train.order(42, 0).tolist()
    lengths = [[len(rows[index]["input_ids"]) for index in order[at : at + 4]] for at in range(0, 72, 4)]
    computed = sum(len(part) * max(part) for part in lengths)
    assert report["fixed"] == pytest.approx(1 - sum(map(sum, lengths)) / computed)
    assert report["budget"] < report["fixed"] and report["fixed_micro_batches"] == 18
    plain, _ = losses_of({"train": columns}, micro_batch_size=24)
    assert reporter.losses == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("storage", ["resident", "stream"])
def test_a_micro_batch_without_labels_weighs_nothing(storage: str) -> None:
    """The 24 rows of a step in micro-batches of 4, of which some have no label at all: as if they were in one."""
    order = session_of({"train": token_rows(24)}).source.train.order(42, 0)[0:24].tolist()
    empty = tuple(order[4:8] + order[20:24])
    rows = token_rows(24, unlabelled=empty)
    data = {"train": rows, "storage": storage}
    split, weights = losses_of(data, micro_batch_size=4, max_steps=1)
    whole, expected = losses_of(data, micro_batch_size=24, max_steps=1)
    assert split[0] == pytest.approx(one_by_one(Tagger().double(), rows), rel=1e-13)
    assert split == pytest.approx(whole, rel=1e-13)
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-12) for name in weights)


class WatchedItems:
    """Items that note in shared memory how many of them were read, and by which process."""

    def __init__(self, count: int) -> None:
        self.rows = token_rows(count)
        self.read = multiprocessing.get_context("fork").Value("q", 0)
        self.readers = multiprocessing.get_context("fork").Array("q", count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.readers[index] = os.getpid()
        with self.read.get_lock():
            self.read.value += 1
        return self.rows[index]


@pytest.mark.covers("DATA-03")
@pytest.mark.timeout(120)
def test_a_loader_process_reads_the_next_rows_while_a_micro_batch_computes() -> None:
    """The first pass ends only when rows of a later micro-batch were read, which the process that waits cannot do."""
    items = WatchedItems(24)
    passes: list[int] = []

    class Waiting(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
            passes.append(len(input_ids))
            while items.read.value - before < min(24, sum(passes) + 8):
                os.sched_yield()
            return super().forward(input_ids, labels, attention_mask)

    data = {"train": items, "storage": "stream", "loader_workers": 1}
    session = session_of(data, module=Waiting(), loop={"micro_batch_size": 8, "max_steps": 1})
    before = items.read.value
    reporter, _ = train(session)
    assert session.loader.pool is not None and passes == [8, 8, 8]
    assert set(items.readers) == set(session.loader.pool.pids), "every row was read by the loader process"
    session.close()
    alone, _ = losses_of({"train": items, "storage": "stream", "loader_workers": 0}, micro_batch_size=8, max_steps=1)
    assert reporter.losses == alone and set(items.readers) == {os.getpid()}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What raytrain does by itself, as a function of the user's."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows])
        for name, fill in fills.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return {**batch, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


@pytest.mark.parametrize("storage", ["resident", "stream", "stream, loader"])
@pytest.mark.parametrize("kind", ["items", "columns"])
def test_a_collate_function_that_pads_trains_as_raytrain_does(kind: str, storage: str) -> None:
    rows = token_rows(48, unlabelled=(3, 17))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    data = {"train": rows if kind == "items" else columns, "eval_fraction": 0.25, "storage": storage.split(",")[0]}
    own = {**data, "collate": padded, "loader_workers": int("loader" in storage and kind == "items")}
    for loop in ({"micro_batch_size": 12}, {"micro_batch_size": 5, "global_batch_size": 10}):
        one, two = (session_of(each, loop={"eval_every": 2, **loop}) for each in (data, own))
        expected, found = train(one)[0], train(two)[0]
        assert found.losses == expected.losses and len(found.losses) == 3
        assert found.of("eval", "loss") == expected.of("eval", "loss") and len(found.of("eval", "loss")) >= 2
        one.close()
        two.close()
