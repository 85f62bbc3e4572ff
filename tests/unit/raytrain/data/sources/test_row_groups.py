"""Parquet by row groups: the same rows in the same order wherever they are kept, read when their turn comes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from raytrain.config.sections import DataConfig
from raytrain.data.prefetch import BatchUploader
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.contract import Source
from raytrain.data.rows.map_style import longest_row
from raytrain.data.rows.residency import StreamSplit, place_split
from raytrain.data.sources import parquet as parquet_folder
from raytrain.data.sources.open import describe_shapes, describe_source, open_source
from raytrain.data.sources.row_groups import GroupOrder, GroupSplit, Piece, held_out
from raytrain.errors import InputError, RunError
from raytrain.train.loader import BatchLoader
from raytrain.trainable import MicroBatch

ROWS, PER_GROUP, FILES = 1000, 60, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of seventeen row groups together, a list column and a string label among them."""
    draw = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(ROWS), FILES)):
        lengths = draw.integers(1, 6, size=len(rows))
        table = pa.table(
            {
                "a": rows.astype(np.float64),
                "b": draw.normal(size=len(rows)),
                "tokens": [draw.integers(0, 99, size=n).tolist() for n in lengths],
                "y": [("cat", "dog", "elk")[row % 3] for row in rows],
            }
        )
        parquet.write_table(table, tmp_path / "set" / f"part-{number}.parquet", row_group_size=PER_GROUP)
    (tmp_path / "set" / "_SUCCESS").touch()
    return tmp_path / "set"


def opened(folder: Path, **keys: Any) -> Source:
    section = {"source": "parquet", "path": str(folder), "label": "y", "order": "groups", **keys}
    return open_source(DataConfig(**section), context=None)


def rows_of(split: Any, indices: np.ndarray) -> list[int]:
    return split.gather(indices)["x"][:, 0].long().tolist()


def epoch_rows(split: Any, *, epoch: int = 0) -> list[int]:
    batches = StepBatches(split, seed=5, global_batch_size=64, micro_batch=64)
    cursor, found = Cursor(epoch), []
    while cursor.epoch == epoch:
        indices, cursor = batches.global_batch(cursor)
        found += rows_of(split, indices)
    return found


def test_a_folder_is_its_files_and_every_row_is_in_one_of_the_splits(folder: Path) -> None:
    source = opened(folder)
    assert source.facts.kind == "groups" and len(source.train) == 900 and source.eval is not None
    assert source.classes == 3 and source.class_names == ("cat", "dog", "elk")
    train = rows_of(source.train, source.train.eval_order())
    held = rows_of(source.eval, source.eval.eval_order())
    assert sorted(train + held) == list(range(ROWS)) and len(held) == 100
    facts = describe_source(DataConfig(source="parquet", path=str(folder), label="y", order="groups"), context=None)
    assert facts is not None and (facts.kind, facts.train_rows, facts.eval_rows) == ("groups", 900, 100)
    assert describe_shapes(DataConfig(source="parquet", path=str(folder), label="y"))["num_features"] == 2
    whole = opened(folder, order="rows")
    batch = whole.train.gather(whole.train.eval_order()[:1])
    assert whole.facts.kind == "memory" and batch.keys() == source.train.gather(np.arange(1)).keys()


@pytest.mark.parametrize("window_bytes", [1, 12_000, 1 << 30])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(folder: Path, window_bytes: int) -> None:
    whole = opened(folder).train
    assert isinstance(whole, GroupSplit)
    known = {"classes": whole._read._classes, "row_bytes": 40, "weighs_rows": True}
    split = GroupSplit(whole.pieces, whole._choice, window_bytes=window_bytes, **known)
    first, again, second = epoch_rows(split), epoch_rows(split), epoch_rows(split, epoch=1)
    assert first == again != second and sorted(first) == sorted(second) and len(set(first)) == 900
    distance = np.abs(np.diff(np.array(first))).mean()
    assert distance > (10 if window_bytes == 1 else 100), "rows of a window are shuffled together"


def test_rows_kept_in_memory_come_in_the_same_order(folder: Path) -> None:
    split = opened(folder).train
    kept = place_split(split, "resident", "cpu")
    for epoch in (0, 1):
        assert epoch_rows(kept, epoch=epoch) == epoch_rows(split, epoch=epoch)
    indices = np.array([899, 0, 61, 60, 59, 5, 700])
    left, right = kept.gather(indices), split.gather(indices)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert {"x", "tokens", "labels", "attention_mask"} == left.keys()
    longest = longest_row(kept)
    assert longest is not None and longest.size == max(kept.lengths(kept.eval_order())) == 5


def test_any_position_is_reached_without_the_earlier_batches(folder: Path) -> None:
    walked = epoch_rows(opened(folder).train, epoch=2)
    for world_size in (1, 3):
        fresh = opened(folder).train
        parts = []
        for rank in range(world_size):
            own = StepBatches(fresh, seed=5, global_batch_size=64, micro_batch=8, rank=rank, world_size=world_size)
            indices = own.global_batch(Cursor(2, 448)).indices
            parts += [rows_of(fresh, part) for part in own.rank_indices(indices)]
        assert [row for part in parts for row in part] == walked[448:512]


@pytest.mark.parametrize(("groups", "window"), [(1, 1), (5, 1), (5, 2)])
def test_the_rows_of_each_group_have_another_order_in_each_epoch_and_for_each_seed(groups: int, window: int) -> None:
    """Also of a file with one group, where the order of the groups changes nothing."""
    starts = np.arange(groups + 1) * 40

    def inside(seed: int, epoch: int) -> list[list[int]]:
        """The order of the rows of each group, whatever stands between them."""
        order = GroupOrder(starts, seed=seed, epoch=epoch, window=window)
        rows = order[0 : len(order)]
        assert sorted(rows) == list(range(40 * groups))
        return [[int(row) for row in rows if starts[n] <= row < starts[n + 1]] for n in range(groups)]

    for one, other in (((5, 0), (5, 1)), ((5, 1), (5, 2)), ((5, 0), (6, 0))):
        assert all(left != right for left, right in zip(inside(*one), inside(*other), strict=True)), (one, other)


def in_windows_of_two(folder: Path) -> GroupSplit:
    source = opened(folder, eval_fraction=0.0).train
    assert isinstance(source, GroupSplit)
    split = GroupSplit(
        source.pieces, source._choice, classes=source._read._classes, row_bytes=40, weighs_rows=True, window_bytes=5000
    )
    assert split.window == 2
    return split


def test_two_windows_are_in_memory_and_the_next_is_read_meanwhile(folder: Path) -> None:
    split = in_windows_of_two(folder)
    order = split.order(0, 0)
    indices = order[0:10]
    threads = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("row-groups") for name in threads)
    assert len(split._read._kept) == 4, "this window and the next"
    split.gather(indices)
    for at in range(0, len(order), 10):
        split.gather(order[at : at + 10])
    assert len(split._read._kept) <= 7, "these, and the window before"
    assert split.weights(indices) == 10 and split.lengths(indices) is None


def test_prefetched_batches_read_every_row_group_once_per_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, read = in_windows_of_two(folder), []
    piece_to_split = split._read._split
    monkeypatch.setattr(split._read, "_split", lambda piece: read.append(piece) or piece_to_split(piece))
    batches = StepBatches(StreamSplit(split, device="cpu"), seed=5, global_batch_size=16, micro_batch=16)
    uploads = BatchUploader[MicroBatch](torch.device("cpu"))
    loader = BatchLoader(batches, device=torch.device("cpu"), weight=None, dtype=torch.float32, uploads=uploads)
    found: dict[int, list[int]] = {epoch: [] for epoch in range(5)}
    cursor = Cursor()
    while cursor.epoch < len(found):
        indices, following = loader.global_batch(cursor)
        for micro in loader.micro_batches(indices):
            found[cursor.epoch] += micro.batch["x"][:, 0].long().tolist()
        cursor = following
    loader.close()
    assert all(sorted(rows) == list(range(ROWS)) for rows in found.values()) and found[0] != found[1]
    ahead = 2 * split.window
    assert len(read) <= len(found) * len(split.pieces) + ahead


def test_one_thread_does_not_lose_rows_to_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = in_windows_of_two(folder)
    reader, make, begun = split._read, split._read._split, split._read._submit
    go_on, asked = threading.Event(), threading.Event()

    def told(number: int) -> Any:
        future = begun(number)
        if number == 1:
            asked.set()
        return future

    monkeypatch.setattr(reader, "_submit", told)
    monkeypatch.setattr(reader, "_split", lambda piece: go_on.wait(60) and make(piece))
    reader.expect([0])  # the reader's thread waits in it
    with ThreadPoolExecutor(1) as thread:
        wanted = thread.submit(reader.piece, 1)
        assert asked.wait(60)
        reader.expect([*range(2, 10), 0])
        assert len(reader._kept) == reader._most, "the one that is wanted was pushed out"
        go_on.set()
        assert len(wanted.result(timeout=60)) == split.pieces[1].rows


def test_held_out_rows_are_few_row_groups_for_any_seed() -> None:
    pieces = [Piece("f", n, 0, 50) for n in range(20)]
    train, held = held_out(pieces, 0.13)
    assert sum(p.rows for p in held) == 130 and sum(p.rows for p in train) == 870
    assert len(held) == 3 and held == sorted(held, key=lambda p: p.group)
    assert held_out(pieces, 0.0) == (pieces, [])
    starts = np.arange(0, 1001, 50)
    order = GroupOrder(starts, seed=1, epoch=0, window=4)
    assert sorted(order[0:1000]) == list(range(1000)) and len(order[990:2000]) == 10 and len(order[5:5]) == 0
    assert np.array_equal(order[100:300], order[0:1000][100:300])


def test_the_order_is_by_row_groups_from_a_size_on_for_any_machine(folder: Path, monkeypatch: Any) -> None:
    assert opened(folder, order="auto").facts.kind == "memory"
    monkeypatch.setattr(parquet_folder, "GROUPS_FROM_BYTES", 1000)
    assert opened(folder, order="auto").facts.kind == "groups"
    with pytest.raises(InputError, match=r'data\.order: got "odd"'):
        opened(folder, order="odd")


def test_mistakes_name_the_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"data\.path: got no \*\.parquet in .*empty"):
        opened(tmp_path / "empty")
    broken = opened(folder, eval_fraction=0.0).train
    wrong = pa.table({"a": [1.0, float("nan")], "b": [1.0, 2.0], "tokens": [[1], [2]], "y": ["cat", "dog"]})
    parquet.write_table(wrong, folder / "part-3.parquet")
    with pytest.raises(InputError, match=r"row group 0 of .*part-3\.parquet: got NaN in column 'a' row 1"):
        split = opened(folder, eval_fraction=0.0).train
        split.gather(np.array([len(split) - 1]))
    (folder / "part-2.parquet").write_bytes(b"gone")
    with pytest.raises(RunError, match=r"row group \d+ of .*part-2\.parquet cannot be read"):
        broken.gather(np.array([len(broken) - 1]))


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([date(2020, 1, 1)] * 8, r"data\.label: got column 'y' of type date32\[day\], expected whole numbers or str"),
        ([[1]] * 8, r"data\.label: got column 'y' of type list<.*>, expected whole numbers or strings"),
        ([b"a"] * 8, r"data\.label: got column 'y' of type binary"),
        ([1] * 4 + [None] * 4, r"data\.path, row group 1 of .*: got a missing value in column 'y' row 0"),
        ([1] * 7 + [None], r"data\.path, row group 1 of .*: got a missing value in column 'y' row 3"),
    ],
)
def test_invalid_labels_are_refused_when_the_data_is_opened(
    labels: list[Any], said: str, statistics: bool, tmp_path: Path
) -> None:
    table = pa.table({"a": np.arange(8.0), "y": labels})
    parquet.write_table(table, tmp_path / "odd.parquet", row_group_size=4, write_statistics=statistics)
    with pytest.raises(InputError, match=said):
        opened(tmp_path / "odd.parquet", eval_fraction=0.0)
