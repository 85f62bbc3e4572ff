"""Splits: order, windows, padding, weights, and one-time materialisation."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import raytrain.data.rows.residency as residency
from raytrain.data.rows.contract import holdout
from raytrain.data.rows.map_style import DatasetSplit, ItemSplit
from raytrain.data.rows.residency import place_split, to_device
from raytrain.data.rows.splits import RaggedSplit, TensorSplit, TextSplit
from raytrain.data.sources.in_memory import object_split
from raytrain.errors import InputError
from raytrain.trainable import labels_weight


def text(length: int = 1000, context: int = 16) -> TextSplit:
    return TextSplit((np.arange(length) % 251).astype(np.uint8), context=context)


def assert_same(left: Any, right: Any) -> None:
    """Equal structure, types, dtypes and values, bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_same(left[name], right[name])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(left):
        assert_same(vars(left), vars(right))
    else:
        assert left == right


@pytest.mark.covers("DATA-19")
@pytest.mark.parametrize("split", [text(), TensorSplit({"x": torch.arange(103)})], ids=["text", "rows"])
def test_order_is_a_pure_function_of_seed_and_epoch(split) -> None:
    order = split.order(7, 3)
    assert order.dtype == np.int64
    assert np.array_equal(order, split.order(7, 3))
    assert not np.array_equal(order, split.order(7, 4))
    assert not np.array_equal(order, split.order(8, 3))
    assert not np.array_equal(split.order(7, 0), np.sort(split.order(7, 0)))


def test_order_is_pinned_to_these_numbers() -> None:
    # A change of generator would silently change every run that is resumed.
    assert TensorSplit({"x": torch.arange(8)}).order(42, 1).tolist() == [0, 4, 6, 1, 2, 7, 3, 5]
    assert text(100, 10).order(42, 1).tolist() == [6, 76, 46, 36, 16, 26, 86, 66, 56]


@pytest.mark.parametrize("length", [33, 64, 65, 1000, 1007])
def test_text_windows_of_an_epoch_do_not_overlap_and_always_fit(length: int) -> None:
    split = text(length, 16)
    for epoch in range(40):
        starts = np.sort(split.order(5, epoch))
        assert len(starts) == len(split) == (length - 16) // 16
        assert starts[0] < 16 and (np.diff(starts) == 16).all()
        assert starts[-1] + 16 + 1 <= length
    assert len({int(split.order(5, epoch).min()) for epoch in range(40)}) > 5


def test_text_labels_are_the_tokens_after() -> None:
    split = text()
    batch = split.gather(np.array([3, 500]))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == (2, 16) and batch["labels"].is_contiguous()
    assert batch["input_ids"][0].tolist() == list(range(3, 19))
    assert batch["labels"][0].tolist() == list(range(4, 20))
    assert split.tokens_per_row == 16 and split.weights(np.array([3, 500])) == 32


def test_text_evaluation_covers_the_whole_text_from_its_start() -> None:
    split = text(1000, 16)
    order = split.eval_order()
    assert order.tolist() == list(range(0, 992, 16))
    labels = torch.cat([split.gather(order[i : i + 5])["labels"].reshape(-1) for i in range(0, len(order), 5)])
    assert torch.equal(labels, split.tokens[1:993].to(torch.int64))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_tokens_of_every_type_are_preserved(dtype: type) -> None:
    top = min(np.iinfo(dtype).max, 70_000)
    tokens = np.linspace(0, top, 200).astype(dtype)
    batch = TextSplit(tokens.copy(), context=199).gather(np.array([0]))
    assert batch["input_ids"][0].tolist() == tokens[:-1].tolist()


def test_a_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(InputError, match=r"data.path: got a text of 16 tokens, expected at least 17.*model.context"):
        text(16, 16)


def test_resident_on_the_cpu_shares_memory() -> None:
    rows = TensorSplit({"x": torch.ones(4)})
    assert rows.to("cpu") is rows and place_split(rows, "resident", "cpu") is rows
    tokens = text()
    assert tokens.to("cpu") is tokens
    array = np.zeros((5, 2), np.float32)
    split = object_split({"x": array}, key="data.train")
    assert split.columns["x"].data_ptr() == array.ctypes.data


def test_rows_resident_on_another_device_keep_the_compact_type_and_are_gathered_there() -> None:
    moved = text().to("meta")
    assert moved.tokens.dtype == torch.uint8 and moved.tokens.device.type == "meta"
    batch = moved.gather(moved.order(0, 0)[:3])
    assert batch["input_ids"].device.type == "meta" and batch["input_ids"].dtype == torch.int64
    labelled = TensorSplit({"x": torch.zeros(9, 2), "labels": torch.zeros(9, dtype=torch.uint8)}).to("meta")
    assert labelled.gather(np.arange(3))["labels"].dtype == torch.int64
    assert labelled.weights(np.arange(3)) == 3


def test_a_gpu_gets_the_rows_of_a_batch_from_one_copy_of_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands in for the GPU; also where a column is in two parts, whose index the host divides."""
    rows = np.array([5, 0, 3])
    x, labels = torch.arange(18.0).reshape(6, 3), torch.arange(6)
    splits = [TensorSplit({"x": x, "labels": labels}), TextSplit(np.arange(40), context=4)]
    halves = TensorSplit({"x": x, "labels": labels}).to("cpu", rows=4)
    expected = [split.gather(rows) for split in (*splits, halves)]
    copies: list[int] = []
    copy = residency._index_tensor
    monkeypatch.setattr(residency, "_index_tensor", lambda *given: copies.append(1) or copy(*given))
    monkeypatch.setattr(residency, "on_gpu", lambda device: True)
    for split, batch in zip(splits, expected, strict=False):
        found = split.gather(rows)
        assert found.keys() == batch.keys() and all(torch.equal(found[name], batch[name]) for name in batch)
        assert copies == [1]
        copies.clear()
    monkeypatch.setattr(residency, "_select", lambda column, index, pinned: column[torch.from_numpy(index)])
    found = halves.gather(rows)
    assert all(torch.equal(found[name], value) for name, value in expected[2].items())


def test_scaled_columns_stay_bytes_until_they_are_gathered() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    split = TensorSplit({"x": pixels}, divisors={"x": 255.0})
    x = split.gather(np.array([3, 0]))["x"]
    assert split.nbytes == 256 and x.dtype == torch.float32
    assert torch.equal(x, pixels[[3, 0]].to(torch.float32) / 255) and float(x.max()) == 1.0


def test_weights_count_the_labels_without_reading_the_batch() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100], [3, 4, 5]])
    split = TensorSplit({"x": torch.zeros(3, 1), "labels": labels})
    assert [split.weights(np.array(rows)) for rows in ([0], [1], [0, 2], [2, 2])] == [2, 0, 5, 6]
    assert TensorSplit({"x": torch.zeros(3, 1)}).weights(np.array([0, 1])) == 2
    assert TensorSplit({"labels": torch.zeros(3)}).weights(np.array([0, 1])) == 2  # fractions: rows
    assert split.select(np.array([2, 0])).weights(np.array([1])) == 2


def ragged_rows(count: int = 9) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        tokens = torch.from_numpy(draw.integers(1, 11, draw.integers(1, 8)))
        rows.append({"input_ids": tokens, "labels": tokens % 5, "score": torch.rand(len(tokens))})
    return rows


def test_a_batch_is_padded_to_its_longest_row_with_what_a_loss_ignores() -> None:
    rows = ragged_rows()
    split = object_split({name: [row[name] for row in rows] for name in rows[0]}, key="data.train")
    assert isinstance(split, RaggedSplit)
    chosen = np.array([4, 0, 7, 2])
    batch = split.gather(chosen)
    longest = max(len(rows[i]["input_ids"]) for i in chosen)
    assert batch["input_ids"].shape == (4, longest)
    weight = split.weights(chosen)
    assert weight == sum(len(rows[i]["labels"]) for i in chosen) == int(batch["attention_mask"].sum())
    outside = batch["attention_mask"] == 0
    assert outside.any() and (batch["labels"][outside] == -100).all()
    assert (batch["input_ids"][outside] == 0).all() and (batch["score"][outside] == 0.0).all()
    assert batch["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_labels_that_are_numbers_are_padded_with_zero_as_no_loss_ignores_a_number(dtype: torch.dtype) -> None:
    """Targets of a regression over rows of different lengths; -100 would be one of them."""
    rows = [[0.5, 1.5, 2.5], [-1.0], []]
    data = {"x": [torch.ones(len(row), 2) for row in rows], "labels": [torch.tensor(row, dtype=dtype) for row in rows]}
    split = object_split(data, key="data.train")
    assert isinstance(split, RaggedSplit)
    for order in ([0, 1, 2], [1, 2], [2, 0]):
        batch = split.gather(np.array(order))
        longest = max(len(rows[i]) for i in order)
        assert batch["labels"].dtype == dtype
        assert batch["labels"].tolist() == [rows[i] + [0.0] * (longest - len(rows[i])) for i in order]
        assert batch["attention_mask"].sum(1).tolist() == [len(rows[i]) for i in order]
        assert split.weights(np.array(order)) == len(order), "no label is ignored"


def test_a_mask_that_is_given_is_padded_and_not_replaced() -> None:
    data = {"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 0, 1], [1]], "id": [7, 8]}
    batch = object_split(data, key="data.train").gather(np.array([0, 1]))
    assert batch["attention_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch["id"].tolist() == [7, 8]


def test_ragged_rows_survive_selection_and_empty_rows() -> None:
    split = object_split({"input_ids": [[1, 2], [], [3], [4, 5, 6]], "labels": [0, 1, 2, 3]}, key="data.train")
    chosen = split.select(np.array([1, 3]))
    batch = chosen.gather(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[0, 0, 0], [4, 5, 6]]
    assert batch["attention_mask"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [1, 3] and chosen.weights(np.array([0, 1])) == 2


Point = namedtuple("Point", "left right")


@dataclasses.dataclass(frozen=True)
class Patch:
    pixels: torch.Tensor
    name: str
    extra: Any = dataclasses.field(default=None, init=False)


def nested_items(count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "x": torch.full((2, 3), float(i)),
            "nested": {"pair": (np.arange(3) + i, i), "parts": [torch.tensor(i), {"deep": 0.5 * i}]},
            "point": Point(torch.ones(1) * i, "west"),
            "patch": Patch(torch.zeros(2) + i, f"patch {i}"),
            "nothing": None,
            "title": f"row {i}",
            "labels": i % 3,
        }
        for i in range(count)
    ]


@pytest.mark.covers("DATA-12")
def test_nested_items_are_collated_and_moved_part_by_part() -> None:
    batch = DatasetSplit(nested_items()).gather(np.array([5, 1]))
    assert batch["x"].shape == (2, 2, 3) and batch["labels"].tolist() == [2, 1]
    assert batch["nested"]["pair"][0].tolist() == [[5, 6, 7], [1, 2, 3]]
    assert isinstance(batch["nested"]["pair"], tuple) and isinstance(batch["nested"]["parts"], list)
    assert batch["nested"]["parts"][1]["deep"].tolist() == [2.5, 0.5]
    assert isinstance(batch["point"], Point) and batch["point"].right == ["west", "west"]
    assert isinstance(batch["patch"], Patch) and batch["patch"].name == ["patch 5", "patch 1"]
    assert batch["nothing"] is None and batch["title"] == ["row 5", "row 1"]

    there = to_device(batch, "meta")
    assert there["patch"].pixels.device.type == "meta" and there["point"].left.device.type == "meta"
    assert there["nested"]["parts"][1]["deep"].device.type == "meta"
    assert there["nothing"] is None and there["title"] == ["row 5", "row 1"] and there["patch"].name[0] == "patch 5"
    back = to_device(batch, "cpu")
    assert_same(back, batch)
    assert back["patch"].pixels is batch["patch"].pixels, "a tensor that is there already is not copied"


class Counting:
    """Items of one kind that count how often they are asked for."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.asked = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.items[index]


PAIRS = [(np.float64(i) * np.ones(2), np.uint8(i % 3)) for i in range(9)]
LISTS = [{"input_ids": list(range(1 + i % 3)), "labels": [1] * (1 + i % 3), "w": 0.5} for i in range(9)]


@pytest.mark.parametrize(
    ("items", "kind"),
    [(PAIRS, TensorSplit), (LISTS, RaggedSplit), (ragged_rows(), RaggedSplit), (nested_items(9), ItemSplit)],
    ids=["pairs", "lists", "ragged", "nested"],
)
def test_resident_and_stream_give_the_same_batches_bit_for_bit(items: list[Any], kind: type) -> None:
    dataset = Counting(items)
    streamed = place_split(DatasetSplit(dataset), "stream", "cpu")
    resident = place_split(DatasetSplit(dataset), "resident", "cpu")
    assert isinstance(resident, kind) and dataset.asked == 9, "each item is converted once"
    assert streamed.gather(np.arange(2)).keys() and dataset.asked == 9 + 9 + 2, "a sample shows that lengths differ"
    dataset.asked = 9
    assert np.array_equal(streamed.order(3, 1), resident.order(3, 1))
    order = streamed.order(3, 1)
    for rows in (order[:4], order[4:8], order[8:], np.array([0, 3, 6])):
        assert_same(streamed.gather(rows), resident.gather(rows))
    assert dataset.asked == 9 + 12


def test_text_and_tables_stream_as_they_are_resident() -> None:
    for split in (text(), TensorSplit({"x": torch.rand(20, 3), "labels": torch.arange(20) % 4})):
        streamed, resident = place_split(split, "stream", "cpu"), place_split(split, "resident", "cpu")
        rows = streamed.order(1, 2)[:7]
        assert np.array_equal(rows, resident.order(1, 2)[:7])
        assert_same(streamed.gather(rows), resident.gather(rows))
        assert streamed.weights(rows) == resident.weights(rows) and len(streamed) == len(resident)
    assert place_split(text(), "stream", "meta").gather(np.array([1]))["labels"].device.type == "meta"


def test_a_dataset_with_batched_access_is_called_once() -> None:
    class Many(Counting):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked += 1
            return [self.items[index] for index in indices]

    dataset = Many(PAIRS)
    split = DatasetSplit(dataset, rows=np.array([8, 4]))
    assert not split.masked.names and dataset.asked == 1
    batch = split.gather(np.array([1, 0]))
    assert dataset.asked == 2 and batch["x"][:, 0].tolist() == [4.0, 8.0] and batch["labels"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], r"the keys \['x'\] and \['y'\]"),
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], r"the shapes \(2, 3\) and \(2, 4\) in 'x'"),
        ([(1, 2, 3)], "an item that is a tuple of 3"),
    ],
)
def test_items_that_make_no_batch_are_named(items: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"data.train: got .*{message}"):
        DatasetSplit(items).gather(np.arange(len(items)))


def test_the_held_out_rows_never_depend_on_the_seed() -> None:
    train, held = holdout(103, 0.1)
    assert len(held) == 10 and sorted([*train, *held]) == list(range(103))
    assert np.array_equal(held, holdout(103, 0.1)[1]) and (np.diff(train) > 0).all()
    assert held.tolist() != list(range(93, 103)), "a file sorted by class would otherwise lose its last class"
    assert len(holdout(5, 0.1)[1]) == 0


def test_windows_of_a_model_that_shifts_its_labels_weigh_what_it_learns_from() -> None:
    split = TextSplit(np.arange(100) % 7, context=12, same_labels=True)
    rows = split.eval_order()[:3]
    assert split.weights(rows) == labels_weight(split.gather(rows)) == 3 * 11
