"""`data.collate`: the same batches from every storage, and clear errors for what is not a batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.config.sections import DataConfig
from raytrain.data.prepare import DataPlan, open_pool, prepare_source
from raytrain.data.rows.map_style import gathered, longest_row
from raytrain.data.rows.residency import StreamSplit
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError

CPU = torch.device("cpu")
WORDS = [{"text": "abcdefgh"[: 1 + i % 8], "label": i % 3} for i in range(40)]


def tokens(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens on the fly, as long as the longest text, some of them masked at random."""
    longest = max(len(row["text"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row["text"])] = torch.tensor([ord(letter) for letter in row["text"]])
    drop = torch.rand(ids.shape) < 0.3
    return {
        "input_ids": ids.masked_fill(drop, 0),
        "labels": torch.where(drop, ids, -100),
        "classes": torch.tensor([row["label"] for row in rows]),
        "noise": torch.tensor([random.random(), np.random.rand()]),
    }


def joined(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """All rows end to end as one, as some attention kernels take them."""
    assert all(set(row) == {"x", "labels"} and row["x"].ndim == 1 for row in rows), "rows are dicts without padding"
    ends = torch.tensor([len(row["x"]) for row in rows]).cumsum(0)
    flat = torch.cat([row["x"] for row in rows])[None]
    return {"x": flat, "ends": ends, "labels": torch.stack([row["labels"] for row in rows])}


COLUMNS = {"x": [torch.arange(1 + i % 5) + 0.5 for i in range(40)], "labels": torch.arange(40) % 3}


def batches(data: DataConfig, **plan: Any) -> list[dict[str, Any]]:
    """The batches of some rows of both splits, in two epochs, as training reads them."""
    source = prepare_source(open_source(data, context=8), DataPlan(**plan), device=CPU, report=lambda *_, **__: None)
    found = []
    for epoch, rows in ((0, [3, 1, 9]), (1, [3, 1, 9]), (0, [5])):
        for split in (source.train, source.eval):
            assert split is not None
            kept = split.split if isinstance(split, StreamSplit) else split
            found.append(gathered(kept, np.array(rows) % len(split), seed=7, epoch=epoch))
            assert split.weights(np.array(rows)) is None, "only the batch tells"
    return found


@pytest.mark.parametrize("data", [{"train": WORDS, "collate": tokens}, {"train": COLUMNS, "collate": joined}])
def test_every_storage_gives_the_same_batches_of_the_users_function(data: dict[str, Any]) -> None:
    expected = batches(DataConfig(**data, eval_fraction=0.25), storage="stream", seed=7)
    for storage in ("resident", "partial", "pinned"):
        other = batches(DataConfig(**data, eval_fraction=0.25), storage=storage, resident_rows=4, seed=7)
        for one, two in zip(expected, other, strict=True):
            assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), storage


def test_what_the_function_draws_is_given_by_seed_epoch_and_row_and_leaves_the_generators_alone() -> None:
    data = DataConfig(train=WORDS, collate=tokens)
    before = torch.get_rng_state()
    first, again = (batches(data, storage="stream", seed=7) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[0]["noise"], again[0]["noise"])
    assert not torch.equal(first[0]["noise"], first[2]["noise"]), "another epoch"
    assert not torch.equal(first[0]["noise"], first[4]["noise"]), "another row"


def test_loader_processes_call_the_function_too() -> None:
    from raytrain.data.prefetch import BatchRequest

    data = DataConfig(train=WORDS, collate=tokens)
    plan = DataPlan("stream", loader_workers=2, seed=7)
    source = prepare_source(open_source(data, context=None), plan, device=CPU, report=lambda *_, **__: None)
    pool = open_pool(source, plan)
    assert pool is not None and isinstance(source.train, StreamSplit)
    try:
        for rows in ([3, 1, 9], [5], [0, 2]):
            read = pool.begin(BatchRequest("train", 1, np.array(rows))).result()
            here = gathered(source.train.split, np.array(rows), seed=7, epoch=1)
            assert all(torch.equal(read[name], here[name]) for name in here)
    finally:
        pool.close()


def test_the_longest_row_is_the_one_with_most_text() -> None:
    source = open_source(DataConfig(train=WORDS, collate=tokens, eval_fraction=0.0), context=None)
    longest = longest_row(source.train)
    assert longest is not None and longest.row % 8 == 7
    columns = open_source(DataConfig(train=COLUMNS, collate=joined, eval_fraction=0.0), context=None)
    longest = longest_row(StreamSplit(columns.train, device="cpu"))
    assert longest is not None and longest.row % 5 == 4


def test_a_budget_of_tokens_counts_the_rows_before_they_are_collated() -> None:
    data = {"train": {"input_ids": COLUMNS["x"], "labels": COLUMNS["labels"]}, "eval_fraction": 0.0}
    source = open_source(DataConfig(**data, collate=lambda rows: {"n": torch.tensor(len(rows))}), context=None)
    assert source.train.lengths(np.arange(6)).tolist() == [1, 2, 3, 4, 5, 1]


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        (torch.zeros(3), "a Tensor"),
        ([torch.zeros(3)], "a list"),
        ({0: torch.zeros(3)}, r"a dict with the keys \[0\]"),
        ({"text": "none"}, "the keys text without a tensor"),
        ({}, "the keys none without a tensor"),
        ({"x": torch.zeros(3, device="meta")}, "x on meta"),
    ],
)
def test_what_is_no_batch_is_refused(returned: Any, seen: str) -> None:
    for train in (WORDS, COLUMNS):
        source = open_source(DataConfig(train=train, collate=lambda rows: returned), context=None)
        with pytest.raises(InputError, match=rf"data\.collate: got .*returned {seen}, expected a dict of tensors on"):
            source.train.gather(np.array([0, 1]))


def test_a_column_of_that_name_is_no_mask_of_ours() -> None:
    train = {"x": COLUMNS["x"], "attention_mask": [torch.ones(1 + i % 5) * i for i in range(40)]}
    seen: list[Any] = []

    def keep(rows: list[Any]) -> dict[str, Any]:
        seen.extend(rows)
        return {"x": torch.zeros(1)}

    open_source(DataConfig(train=train, collate=keep, eval_fraction=0.0), context=None).train.gather(np.array([7, 3]))
    assert [row["attention_mask"].tolist() for row in seen] == [[7.0] * 3, [3.0] * 4]
