"""Micro-batches with their weights: whose rows, how much each counts, where they are."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from lab import MLP, class_rows, make_session, token_rows
from torch import Tensor

from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.residency import place_split
from raytrain.data.rows.splits import TextSplit
from raytrain.data.sources.in_memory import object_split
from raytrain.errors import DevicePlacementError
from raytrain.plan.batch import EVAL_MICRO_BATCHES
from raytrain.train.loader import BatchLoader, cast_floating
from raytrain.trainable import labels_weight

CPU = torch.device("cpu")
ROWS = {"x": torch.arange(50.0).reshape(50, 1), "labels": torch.arange(50) % 3}


class Dataset:
    """A map-style dataset, whose labels nobody has counted beforehand."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def feed_of(data: Any, *, rank: int = 0, world_size: int = 1, storage: str = "resident", **more: Any) -> BatchLoader:
    batches = StepBatches(
        place_split(object_split(data, key="data.train"), storage, CPU),
        seed=3,
        global_batch_size=16,
        micro_batch=4,
        rank=rank,
        world_size=world_size,
    )
    return BatchLoader(batches, device=CPU, **{"weight": None, "dtype": torch.float32, **more})


def test_two_workers_take_half_of_the_rows_and_passes_of_one_each() -> None:
    def taken(world_size: int, rank: int) -> list[list[list[float]]]:
        """Steps of an epoch of 48 rows -> micro-batches -> rows."""
        loader = feed_of({name: column[:48] for name, column in ROWS.items()}, rank=rank, world_size=world_size)
        cursor, steps = Cursor(), []
        while cursor.epoch == 0:
            indices, cursor = loader.global_batch(cursor)
            steps.append([micro.batch["x"][:, 0].tolist() for micro in loader.micro_batches(indices)])
        return steps

    one, first, second = taken(1, 0), taken(2, 0), taken(2, 1)
    assert len(one) == len(first) == len(second) == 3, "as many steps"
    for alone, left, right in zip(one, first, second, strict=True):
        assert len(left) == len(right) == len(alone) / 2 == 2, "half of the passes"
        assert sorted(chain(*left, *right)) == sorted(chain(*alone)) and sum(map(len, left)) == 8


def test_the_ranks_share_a_window_and_its_weight() -> None:
    rows = token_rows(50, ragged=True, empty=range(5))
    loaders = [feed_of(rows, rank=rank, world_size=3) for rank in range(3)]
    indices = loaders[0].global_batch(Cursor(0, 48)).indices
    assert len(indices) == 2
    indices = loaders[0].global_batch(Cursor(0, 16)).indices
    shares = [list(loader.micro_batches(indices)) for loader in loaders]
    assert [len(share) for share in shares] == [2, 1, 1]
    ids = torch.cat([micro.batch["input_ids"] for share in shares for micro in share])
    assert torch.equal(ids, rows["input_ids"][torch.from_numpy(indices)])
    weights = [micro.weight for share in shares for micro in share]
    labels = torch.cat([micro.batch["labels"] for share in shares for micro in share])
    assert sum(weights) == int((labels != -100).sum()) == loaders[1].global_weight(indices)


@pytest.mark.parametrize(
    ("data", "storage"),
    [
        (token_rows(50, ragged=True), "resident"),
        (token_rows(50, ragged=True), "stream"),
        (Dataset(token_rows(50, ragged=True)), "stream"),
    ],
)
def test_a_weight_is_the_labels_that_count_whoever_counts_them(data: Any, storage: str) -> None:
    loader = feed_of(data, storage=storage)
    micros = list(loader.micro_batches(np.arange(16)))
    assert [micro.weight for micro in micros] == [int((m.batch["labels"] != -100).sum()) for m in micros]
    known = loader.global_weight(np.arange(16))
    assert known is None if isinstance(data, Dataset) else known == sum(micro.weight for micro in micros)


def test_the_weight_of_a_trainable_has_precedence_and_is_summed() -> None:
    loader = feed_of(ROWS, weight=lambda batch: int(batch["x"].sum()))
    assert loader.global_weight(np.arange(4)) is None
    assert [micro.weight for micro in loader.micro_batches(np.arange(8))] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_a_float64_run_casts_its_inputs(dtype: torch.dtype) -> None:
    loader = feed_of({**ROWS, "half": torch.ones(50, dtype=torch.float16)}, dtype=dtype)
    batch = loader.one(np.arange(3)).batch
    wide = dtype is torch.float64
    assert batch["x"].dtype is dtype and batch["labels"].dtype is torch.int64
    assert batch["half"].dtype is (torch.float64 if wide else torch.float16)


def test_casting_reaches_into_nested_batches() -> None:
    nested = {"a": [torch.zeros(2), {"b": (torch.zeros(1), torch.zeros(1, dtype=torch.int32))}], "c": "text"}
    cast = cast_floating(nested, torch.float64)
    assert cast["a"][0].dtype is torch.float64 and cast["a"][1]["b"][0].dtype is torch.float64
    assert cast["a"][1]["b"][1].dtype is torch.int32 and cast["c"] == "text"


def test_the_first_batch_is_checked_and_a_tensor_on_another_device_is_named() -> None:
    loader = feed_of(ROWS)
    gather = loader.batches.split.gather
    loader.batches.split.gather = lambda rows: {**gather(rows), "mask": [torch.zeros(1, device="meta")]}
    with pytest.raises(DevicePlacementError, match=r"batch\.mask\[0\] is on meta"):
        next(loader.micro_batches(np.arange(4)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("limit", "rows"), [(None, 50), (1, 16), (2, 32), (9, 50)])
def test_evaluation_visits_each_row_once_over_all_ranks_in_larger_batches(
    world_size: int, limit: int | None, rows: int
) -> None:
    split = object_split(ROWS, key="data.eval")
    seen: list[float] = []
    for rank in range(world_size):
        for micro in feed_of(ROWS, rank=rank, world_size=world_size).eval_batches(split, limit=limit):
            assert micro.weight == len(micro.batch["x"]) <= 4 * EVAL_MICRO_BATCHES
            seen += micro.batch["x"].flatten().tolist()
    assert seen == list(range(rows))


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("tokens", [13, 24, 25, 60, 107, 108, 109, 117, 120, 121, 264, 265])
def test_all_workers_run_as_many_evaluation_passes_as_the_busiest(tokens: int, micro: int, budget: int | None) -> None:
    """Of a text, whose windows of an evaluation are not as many as an epoch's."""
    split = TextSplit(np.arange(tokens) % 7, context=12)
    for world_size in (1, 2, 3, 5):
        for limit in (None, 1, 2):
            loaders = [feed_of(ROWS, rank=rank, world_size=world_size) for rank in range(world_size)]
            for loader in loaders:
                loader.batches.micro_batch, loader.batches.tokens_per_batch = micro, budget
            taken = [len(list(loader.eval_batches(split, limit=limit))) for loader in loaders]
            assert [loader.eval_passes(split, limit=limit) for loader in loaders] == [max(taken)] * world_size, (
                world_size,
                limit,
            )


def test_a_limited_evaluation_scores_the_same_rows_in_micro_batches_of_any_size() -> None:
    split, loader = object_split(ROWS, key="data.eval"), feed_of(ROWS)
    planned = [micro.weight for micro in loader.eval_batches(split, limit=2)]
    loader.batches.micro_batch = 1
    smaller = [micro.weight for micro in loader.eval_batches(split, limit=2)]
    assert len(smaller) > len(planned) and sum(smaller) == sum(planned) == 2 * loader.batches.global_batch_size


@pytest.mark.parametrize(("storage", "weight", "ahead"), [
    ("resident", labels_weight, True), ("resident", None, False), ("stream", labels_weight, False),
])  # fmt: skip
def test_on_a_gpu_a_function_weighs_resident_rows_in_the_stream_of_uploads(
    storage: str, weight: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There its device read waits for the rows alone; in the stream of the training it would wait for all work."""
    session = make_session(MLP, {"train": class_rows(32), "storage": storage, "eval_fraction": 0.0})
    started: list[Any] = []
    monkeypatch.setattr("raytrain.train.loader.BatchUploader", lambda device: started.append(device))
    gpu = torch.device("cuda", 0)
    more = {"workers": session.workers, "weight": weight, "dtype": torch.float32}
    BatchLoader.open(session.job, session.settings, session.source, device=gpu, **more)
    BatchLoader.open(session.job, session.settings, session.source, device=CPU, **more)
    assert started == [gpu] * ahead
