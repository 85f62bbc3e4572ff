"""Rows that are kept are lent as views once the first batch came back unharmed, and protected where it did not."""

from __future__ import annotations

import pytest
import torch

from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.splits import TensorSplit
from raytrain.data.sources.in_memory import object_split
from raytrain.errors import RunError
from raytrain.train.loader import BatchLoader

CPU = torch.device("cpu")


def feed_of(split: TensorSplit) -> BatchLoader:
    batches = StepBatches(split, seed=0, global_batch_size=8, micro_batch=4)
    return BatchLoader(batches, device=CPU, weight=None, dtype=torch.float32)


def columns() -> TensorSplit:
    split = object_split({"x": torch.arange(80.0).reshape(40, 2), "labels": torch.arange(40) % 3}, key="data.train")
    assert isinstance(split, TensorSplit)
    return split


@pytest.mark.covers("DATA-09", "BP-17", "SRC-07")
def test_evaluation_batches_are_the_rows_themselves_from_the_second_pass_on() -> None:
    split = columns()
    loader = feed_of(split)
    passes = [[micro.batch["x"] for micro in loader.eval_batches(split, limit=None)] for _ in range(4)]
    where = [[x.data_ptr() for x in batches] for batches in passes]
    begins = split.columns["x"].data_ptr()
    assert where[0][0] != begins, "the first pass shows what the model does to a copy"
    assert where[1] == where[2] == where[3] and where[1][0] == begins
    assert all(torch.equal(a, b) for one in passes[1:] for a, b in zip(passes[0], one, strict=True))
    assert loader.notices() == []


@pytest.mark.covers("DATA-10")
def test_a_model_that_writes_into_its_input_is_found_at_once_and_gets_copies() -> None:
    split = columns()
    loader, whole = feed_of(split), split.columns["x"].clone()
    for _ in range(3):
        for micro in loader.eval_batches(split, limit=None):
            micro.batch["x"].mul_(2)
    assert torch.equal(split.columns["x"], whole)
    ((kind, fields),) = loader.notices()
    assert kind == "input_written" and fields["tensors"] == ["batch.x"] and fields["split"] == "eval"
    assert "batch.x" in fields["reason"] and loader.notices() == [], "told once"


def test_a_model_that_begins_to_write_later_ends_the_run() -> None:
    split = columns()
    loader = feed_of(split)
    for _ in range(2):
        list(loader.eval_batches(split, limit=None))
    for micro in loader.eval_batches(split, limit=None):
        micro.batch["x"].add_(1)
    with pytest.raises(RunError, match="wrote into its input after it had not done so at first: eval rows"):
        list(loader.eval_batches(split, limit=None))


def test_rows_in_another_order_are_gathered_into_a_copy() -> None:
    split = columns()
    loader, whole = feed_of(split), split.columns["x"].clone()
    cursor = Cursor()
    for _ in range(5):
        indices, cursor = loader.global_batch(cursor)
        for micro in loader.micro_batches(indices):
            micro.batch["x"].zero_()
    assert torch.equal(split.columns["x"], whole)


def test_a_session_that_follows_another_over_the_same_rows_finds_no_damage() -> None:
    split = columns()
    for _ in range(2):  # as after a rewind or a roll-back
        loader = feed_of(split)
        for _ in range(3):
            list(loader.eval_batches(split, limit=None))
        assert loader.notices() == []
