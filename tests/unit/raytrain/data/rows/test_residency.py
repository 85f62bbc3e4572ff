"""Rows of which a part is on the device: every batch is that of the whole, for every kind of split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.rows.contract import Split
from raytrain.data.rows.map_style import DatasetSplit, PartialDataset
from raytrain.data.rows.residency import PartialTensor, StreamSplit, place_split
from raytrain.data.rows.splits import Ragged, RaggedSplit, TensorSplit, TextSplit
from raytrain.data.sources.in_memory import object_split


def ragged() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 9, size=40)
    return {
        "input_ids": [torch.from_numpy(draw.integers(0, 99, size=n)) for n in lengths],
        "labels": [torch.from_numpy(draw.integers(-1, 99, size=n)) for n in lengths],
        "weight": torch.rand(40),
    }


def filled() -> RaggedSplit:
    """Rows padded with a token of their own, as a tokenizer's are."""
    lengths = np.random.default_rng(2).integers(1, 9, size=40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return RaggedSplit({"input_ids": Ragged(torch.arange(int(offsets[-1])), offsets)}, fills={"input_ids": 999})


class Items:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return {"x": torch.full((index % 3 + 1,), float(index)), "name": f"row {index}", "labels": index % 4}


SPLITS = {
    "columns": lambda: object_split({"x": torch.rand(40, 3), "labels": torch.arange(40) % 5}, key="data.train"),
    "images": lambda: object_split({"x": torch.rand(40, 1, 4, 4).double(), "labels": torch.rand(40)}, key="data.train"),
    "ragged": lambda: object_split(ragged(), key="data.train"),
    "filled": filled,
    "text": lambda: TextSplit(np.random.default_rng(1).integers(0, 256, size=500).astype(np.uint8), context=12),
    "items": lambda: DatasetSplit(Items()),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def equal_batches(one: Split, other: Split) -> None:
    for epoch in (0, 1):
        order = one.order(3, epoch)
        assert np.array_equal(order, other.order(3, epoch))
        for at in range(0, len(order), 7):
            left, right = one.gather(order[at : at + 7]), other.gather(order[at : at + 7])
            assert left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
            assert one.weights(order[at : at + 7]) == other.weights(order[at : at + 7])
    assert one.eval_order().tolist() == other.eval_order().tolist()


@pytest.mark.parametrize("rows", [1, 13, 39, 400])
@pytest.mark.parametrize("name", SPLITS)
def test_partial_residency_gives_the_batches_of_full_residency(name: str, rows: int) -> None:
    split = SPLITS[name]()
    equal_batches(split, place_split(split, "partial", "cpu", resident_rows=rows))


@pytest.mark.parametrize("name", SPLITS)
def test_streaming_gives_the_batches_of_full_residency(name: str) -> None:
    split = SPLITS[name]()
    streamed = place_split(split, "pinned", "cpu")
    assert isinstance(streamed, StreamSplit) and not streamed.pinned, "on a CPU there is nothing to pin for"
    equal_batches(split, streamed)
    again = place_split(streamed, "stream", "cpu")
    assert isinstance(again, StreamSplit) and again.split is split


def test_only_rows_that_are_not_cached_are_read_again() -> None:
    items = Items()
    split = DatasetSplit(items)
    assert split.masked.names == ("x",) and sorted(items.asked) == list(range(40)), "a sample of rows is read once"
    items.asked.clear()
    kept = place_split(split, "partial", "cpu", resident_rows=30)
    assert isinstance(kept, PartialDataset) and sorted(items.asked) == list(range(30))
    items.asked.clear()
    for epoch in (0, 1):
        kept.gather(kept.order(0, epoch))
    assert sorted(items.asked) == sorted([*range(30, 40)] * 2)


def test_rows_are_read_only_from_their_own_part() -> None:
    values = torch.arange(20.0).reshape(10, 2)
    column = PartialTensor(values[:6], values[6:])
    for index in ([0, 5], [6, 9], [9, 0, 7, 3, 3], []):
        assert torch.equal(column.take(np.array(index, dtype=np.int64)), values[index])
    assert torch.equal(column.take(np.array([[1, 8], [9, 0]])), values[torch.tensor([[1, 8], [9, 0]])])
    assert column.shape == (10, 2) and column.numel() == 20 and column.device.type == "cpu"


def test_rows_that_are_held_out_are_padded_as_all_rows_are() -> None:
    split, chosen = filled(), np.array([31, 4, 17])
    held_out, whole = split.select(chosen).gather(np.arange(3)), split.gather(chosen)
    assert held_out.keys() == whole.keys() and all(same(held_out[name], whole[name]) for name in whole)
    assert 999 in whole["input_ids"], "nothing was padded"


@pytest.mark.parametrize("pinned", [True, False])
def test_rows_are_gathered_into_pinned_memory_and_not_copied_there(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    made: dict[int, torch.Tensor] = {}
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool = False, **keys: Any) -> torch.Tensor:
        block = empty(*size, **keys)  # a CPU has no pinned memory
        if pin_memory:
            asked.append(tuple(block.shape))
            made[block.data_ptr()] = block
        return block

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in made)
    columns = {"x": torch.arange(24.0).view(8, 3), "y": torch.arange(8)}
    split = StreamSplit(TensorSplit(columns), device="cpu", pinned=pinned)
    batch = split.gather(np.array([6, 1, 1]))
    assert batch["x"].tolist() == [[18.0, 19.0, 20.0], [3.0, 4.0, 5.0], [3.0, 4.0, 5.0]]
    assert batch["y"].tolist() == [6, 1, 1]
    assert asked == ([(3, 3), (3,)] if pinned else [])
    assert all((value.data_ptr() in made) == pinned for value in batch.values())
    assert StreamSplit(TensorSplit(columns), device="cpu").gather(np.array([0]))["y"].tolist() == [0]
    assert len(asked) == 2 * pinned, "what is gathered for another purpose afterwards is not"
