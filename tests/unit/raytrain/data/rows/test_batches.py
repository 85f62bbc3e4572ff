"""Steps, ranks and micro-batches; placement of batches and what is said of a misplaced tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from raytrain.data.prepare import find_misplaced, verify_placement
from raytrain.data.rows.batches import Cursor, StepBatches, rank_micro_batches
from raytrain.data.rows.map_style import DatasetSplit
from raytrain.data.rows.residency import place_split, to_device
from raytrain.data.rows.splits import TensorSplit, TextSplit
from raytrain.errors import DevicePlacementError


def rows(count: int = 103) -> TensorSplit:
    return TensorSplit({"x": torch.arange(count)})


def batches(split, *, rank: int = 0, world_size: int = 1, micro: int = 4, total: int = 16, **more) -> StepBatches:
    return StepBatches(
        split, seed=11, global_batch_size=total, micro_batch=micro, rank=rank, world_size=world_size, **more
    )


def epoch_of(steps: StepBatches, epoch: int) -> list[np.ndarray]:
    cursor, windows = Cursor(epoch), []
    while cursor.epoch == epoch:
        indices, cursor = steps.global_batch(cursor)
        windows.append(indices)
    return windows


def test_windows_cover_an_epoch_once_and_the_last_is_not_dropped() -> None:
    steps = batches(rows())
    windows = epoch_of(steps, 2)
    assert [len(window) for window in windows] == [16] * 6 + [7] and steps.steps_per_epoch == 7
    assert sorted(np.concatenate(windows)) == list(range(103))
    indices, following = steps.global_batch(Cursor(2, 96))
    assert np.array_equal(indices, windows[-1]) and following == Cursor(3, 0)
    exact = batches(rows(32))
    assert exact.global_batch(Cursor(0, 16)).next == Cursor(1, 0) and exact.steps_per_epoch == 2
    assert np.array_equal(exact.global_batch(Cursor(0, 32)).indices, exact.global_batch(Cursor(1, 0)).indices)


@pytest.mark.parametrize("position", [0, 16, 48, 96, 5])
def test_any_position_is_reached_without_the_earlier_batches(position: int) -> None:
    walked = batches(rows(), world_size=3, rank=1)
    for epoch in (0, 1, 2):
        epoch_of(walked, epoch)
    fresh = batches(rows(), world_size=2, rank=0, micro=2)
    left, right = walked.global_batch(Cursor(1, position)), fresh.global_batch(Cursor(1, position))
    assert np.array_equal(left.indices, right.indices) and left.next == right.next


@pytest.mark.parametrize(("count", "micro", "world_size"), [(16, 4, 3), (16, 5, 2), (7, 4, 4), (1, 8, 2), (30, 3, 7)])
def test_micro_batches_are_contiguous_and_even(count: int, micro: int, world_size: int) -> None:
    indices = np.arange(100, 100 + count)
    parts = [
        rank_micro_batches(indices, micro_batch=micro, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    together = [part for rank in parts for part in rank]
    assert np.array_equal(np.concatenate(together), indices)
    assert all(len(part) == micro for part in together[:-1]) and len(together) == -(-count // micro)
    counts = [len(rank) for rank in parts]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@pytest.mark.covers("DATA-18")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_103_samples_on_every_world_size_are_seen_exactly_once(world_size: int) -> None:
    ranks = [batches(rows(), rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [[int(i) for part in rank.epoch_indices(0) for i in part] for rank in ranks]
    assert sorted(i for rank in seen for i in rank) == list(range(103))
    assert sum(len(set(rank)) for rank in seen) == 103, "pairwise disjoint"
    again = [[int(i) for part in rank.epoch_indices(1) for i in part] for rank in ranks]
    assert again != seen and sorted(i for rank in again for i in rank) == list(range(103))
    parts = ranks[0].rank_indices(ranks[0].global_batch(Cursor()).indices)
    gathered = [int(i) for part in parts for i in rows().gather(part)["x"]]
    assert gathered == seen[0][: len(gathered)] and gathered


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_window_is_the_same_for_every_world_size(world_size: int) -> None:
    alone = epoch_of(batches(rows()), 3)
    ranks = [batches(rows(), rank=rank, world_size=world_size) for rank in range(world_size)]
    for number, indices in enumerate(epoch_of(ranks[0], 3)):
        parts = [part for rank in ranks for part in rank.rank_indices(indices)]
        assert np.array_equal(np.concatenate(parts), alone[number])


class Numbered(Dataset):
    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.full((3,), float(index))}


def order_hash(ids: Iterable[int]) -> str:
    return hashlib.sha256(np.array(list(ids), dtype=np.int64).tobytes()).hexdigest()


@pytest.mark.covers("DATA-17", "FUT-01")
@pytest.mark.parametrize("rank", [0, 2])
def test_torch_dataloader_draws_the_same_samples_in_the_same_order(rank: int) -> None:
    steps = batches(DatasetSplit(Numbered()), rank=rank, world_size=3)

    def ours(epoch: int) -> Iterator[int]:
        for indices in epoch_of(steps, epoch):
            for part in steps.rank_indices(indices):
                yield from steps.split.gather(part)["id"].tolist()

    def theirs(epoch: int) -> Iterator[int]:
        sampler = [part.tolist() for part in steps.epoch_indices(epoch)]
        for batch in DataLoader(Numbered(), batch_sampler=sampler, num_workers=2 if rank == 0 else 0):
            assert torch.equal(batch["x"][:, 0], batch["id"].float())
            yield from batch["id"].tolist()

    hashes = {epoch: order_hash(ours(epoch)) for epoch in (0, 1)}
    assert hashes[0] != hashes[1]
    assert {epoch: order_hash(theirs(epoch)) for epoch in (0, 1)} == hashes


def test_the_weight_of_a_global_batch_is_known_before_the_batches_are() -> None:
    labels = torch.tensor([[1, -100], [2, 3], [-100, -100], [4, 5]])
    steps = batches(TensorSplit({"x": torch.zeros(4, 2), "labels": labels}), total=4, micro=1)
    indices = steps.global_batch(Cursor()).indices
    added = sum(int((batch["labels"] != -100).sum()) for batch in map(steps.split.gather, steps.rank_indices(indices)))
    assert steps.split.weights(indices) == added == 5
    tokens = batches(TextSplit(np.zeros(1000, np.uint8), context=10), total=6)
    assert tokens.split.weights(tokens.global_batch(Cursor()).indices) == 60
    assert DatasetSplit([{"x": 1.0, "labels": 0}] * 4).weights(np.arange(2)) is None


@pytest.mark.parametrize("wrong", [{"rank": 2, "world_size": 2}, {"micro": 0}, {"total": 0}])
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        batches(rows(), **wrong)


def test_a_storage_that_is_not_resolved_is_refused() -> None:
    with pytest.raises(ValueError, match="auto"):
        place_split(rows(), "auto", "cpu")


@pytest.mark.covers("DEV-07")
def test_every_misplaced_tensor_of_a_nested_batch_is_named() -> None:
    def batch(**places: str) -> dict:
        on = {"pixels": "cpu", "mask": "cpu", "deep": "cpu"} | places
        return {
            "x": torch.zeros(2),
            "pixels": [
                torch.zeros(1),
                {"mask": torch.zeros(1, device=on["mask"])},
                torch.zeros(1, device=on["pixels"]),
            ],
            "rest": {"pair": (torch.zeros(1, device=on["deep"]), "text", None)},
        }

    assert find_misplaced(batch(), "cpu") == []
    assert find_misplaced(batch(mask="meta"), "cpu") == ["batch.pixels[1].mask"]
    paths = ["batch.pixels[1].mask", "batch.pixels[2]", "batch.rest.pair[0]"]
    assert find_misplaced(batch(mask="meta", pixels="meta", deep="meta"), "cpu") == paths
    with pytest.raises(DevicePlacementError, match=r"batch\.rest\.pair\[0\] is on meta, expected every tensor on cpu"):
        verify_placement(batch(deep="meta"), "cpu")
    verify_placement(batch(), torch.device("cpu"))
    assert find_misplaced(to_device(batch(), "meta"), "meta") == []


def test_misplaced_weights_are_named() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module[0].bias = torch.nn.Parameter(torch.zeros(2, device="meta"))
    module[1].running_mean = torch.zeros(2, device="meta")
    assert find_misplaced(module, "cpu", name="") == ["0.bias", "1.running_mean"]
    assert find_misplaced(module.state_dict(), "cpu", name="") == ["0.bias", "1.running_mean"]


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"sequence": packed}, "cpu")["sequence"]
    assert type(moved) is type(packed) and torch.equal(moved.data, packed.data)
    assert find_misplaced({"sequence": packed}, "meta") == ["batch.sequence.data"]


@pytest.mark.parametrize("position", [0, 97, 103, 110])
def test_rows_from_a_position_go_around_at_the_end_of_the_epoch(position: int) -> None:
    """Also more of them than an epoch has, and from a position of a larger data set."""
    split = TensorSplit({"x": torch.arange(103)})
    batches = StepBatches(split, seed=3, global_batch_size=16, micro_batch=8)
    order = split.order(3, 2).tolist()
    for count in (5, 103, 250):
        expected = [order[(position + n) % 103] for n in range(count)]
        assert batches.rows_from(Cursor(2, position), count).tolist() == expected
