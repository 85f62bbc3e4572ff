"""Processes that read a dataset: the same batches as without, kept alive, bounded, and gone in the end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.prefetch import UPLOAD_DEPTH, BatchRequest, BatchUploader, LoaderPool, prefetch
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.map_style import DatasetSplit
from raytrain.data.rows.residency import StreamSplit
from raytrain.errors import InputError, RunError
from raytrain.train.loader import BatchLoader

CPU = torch.device("cpu")


class Items:
    """Numbers with a random draw beside them; some items may be broken."""

    def __init__(self, count: int = 50, *, breaks: dict[int, str] | None = None) -> None:
        self.count, self.breaks = count, breaks or {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        how = self.breaks.get(index)
        if how == "raises":
            raise ValueError(f"no picture {index}")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "odd":
            return ["no", "row"]  # type: ignore[return-value]
        drawn = torch.rand(1).item() + random.random() + np.random.rand()
        return {"x": torch.full((2,), float(index)), "drawn": drawn, "pid": os.getpid(),
                "name": (lambda: None) if how == "unsendable" else f"row {index}", "labels": index % 3}  # fmt: skip


@pytest.fixture
def pools() -> Iterator[Any]:
    """`pools(dataset, workers=, prefetch=)`; every process is gone at the end of the test."""
    made: list[LoaderPool] = []

    def make(dataset: Any, *, workers: int = 1, prefetch: int = 2) -> LoaderPool:
        named = {"train": DatasetSplit(dataset), "eval": DatasetSplit(Items(20), key="data.eval")}
        made.append(LoaderPool(named, workers=workers, prefetch=prefetch, seed=3))
        return made[-1]

    yield make
    for pool in made:
        pids = pool.pids
        pool.close()
        pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def feed_of(pool: LoaderPool | None, *, micro: int = 4, dataset: Any = None, uploads: Any = None) -> BatchLoader:
    split = DatasetSplit(dataset or Items())
    batches = StepBatches(StreamSplit(split, device=CPU), seed=3, global_batch_size=12, micro_batch=micro)
    return BatchLoader(batches, device=CPU, weight=None, dtype=torch.float32, pool=pool, uploads=uploads)


def windows(loader: BatchLoader, count: int, *, cursor: Cursor | None = None) -> list[list[dict[str, Any]]]:
    cursor, found = cursor or Cursor(), []
    for _ in range(count):
        indices, cursor = loader.global_batch(cursor)
        found.append([micro.batch for micro in loader.micro_batches(indices)])
    return found


def shown(batches: list[list[dict[str, Any]]], *names: str) -> list[Any]:
    return [[{name: batch[name] if name == "name" else batch[name].tolist() for name in names} for batch in w]
            for w in batches]  # fmt: skip


def draws(batches: list[list[dict[str, Any]]]) -> list[tuple[str, float]]:
    return [pair for w in batches for b in w for pair in zip(b["name"], b["drawn"].tolist(), strict=True)]


@pytest.mark.covers("DATA-05")
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (3, 2)])
def test_the_order_is_kept_and_prefetching_is_bounded(pools: Any, workers: int, prefetch: int) -> None:
    pool = pools(Items(), workers=workers, prefetch=prefetch)
    read, here = windows(feed_of(pool), 10), windows(feed_of(None), 10)
    assert shown(read, "x", "name", "labels") == shown(here, "x", "name", "labels")
    assert pool.high_water == workers * prefetch and pool.depth == workers * prefetch


@pytest.mark.covers("DATA-04")
def test_processes_stay_from_epoch_to_epoch_and_share_the_work(pools: Any) -> None:
    pool = pools(Items(), workers=2)
    loader = feed_of(pool)
    epochs = [{int(pid) for batch in windows(loader, 5, cursor=Cursor(epoch)) for part in batch for pid in part["pid"]}
              for epoch in (0, 1, 2)]  # fmt: skip
    assert epochs[0] == epochs[1] == epochs[2] == set(pool.pids) and os.getpid() not in epochs[0]


class Late(Items):
    """A batch of four takes a quarter of a second; an epoch is one window of three."""

    def __init__(self) -> None:
        super().__init__(12)

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.06)
        return super().__getitem__(index)


@pytest.mark.covers("DATA-04")
def test_the_first_batch_of_a_later_epoch_is_prefetched(pools: Any) -> None:
    pool = pools(Late())
    loader, pids, latency = feed_of(pool, dataset=Late()), [], []
    for epoch in (0, 1, 2):
        indices, _ = loader.global_batch(Cursor(epoch))
        begin = time.perf_counter()
        for number, micro in enumerate(loader.micro_batches(indices)):
            latency += [time.perf_counter() - begin] if not number else []
            pids.append({int(pid) for pid in micro.batch["pid"]})
            assert pool._pipes[0].poll(30), "the step goes on until the next batch is there"
    assert all(seen == set(pool.pids) for seen in pids), "one process for all of them"
    assert latency[1] < latency[0] and latency[2] < latency[0], "the first one waits for items, the others for none"


def test_random_draws_of_an_item_depend_only_on_seed_epoch_and_row(pools: Any) -> None:
    here = feed_of(None)
    one, two = feed_of(pools(Items(), workers=1)), feed_of(pools(Items(), workers=2), micro=3)
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    left, right, plain = draws(windows(one, 5)), draws(windows(two, 5)), draws(windows(here, 5))
    assert left == right == plain and len({drawn for _, drawn in left}) == 50
    assert state[:2] == (random.getstate(), np.random.get_state()[1].tolist()), "the training process draws as before"
    assert torch.equal(state[2], torch.get_rng_state())
    later = dict(draws(windows(one, 5, cursor=Cursor(1))))
    assert all(later[name] != drawn for name, drawn in left), "another epoch draws anew"
    for workers in (0, 1, 2):
        resumed = feed_of(pools(Items(), workers=workers) if workers else None)
        assert draws(windows(resumed, 2, cursor=Cursor(0, 24))) == left[24:48], "so does no resume in mid-epoch"


def test_a_dataset_that_reads_many_at_once_draws_the_same_in_any_process(pools: Any) -> None:
    class Many(Items):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [self[index] for index in indices]

    readers = (None, pools(Many()), pools(Many(), workers=2))
    found = [draws(windows(feed_of(pool, dataset=Many()), 10)) for pool in readers]
    assert found[0] == found[1] == found[2] and found[0][:50] != found[0][50:]


def test_another_micro_batch_size_or_position_discards_prefetched_batches(pools: Any) -> None:
    pool = pools(Items(), workers=2)
    loader, here = feed_of(pool), feed_of(None)
    windows(loader, 2)
    loader.batches.micro_batch = here.batches.micro_batch = 2
    assert shown(windows(loader, 2, cursor=Cursor(0, 24)), "x") == shown(windows(here, 2, cursor=Cursor(0, 24)), "x")
    assert shown(windows(loader, 3, cursor=Cursor(2, 12)), "x") == shown(windows(here, 3, cursor=Cursor(2, 12)), "x")
    evaluated = [m.batch["name"] for m in loader.eval_batches(DatasetSplit(Items(20)), limit=None)]
    assert [name for batch in evaluated for name in batch] == [f"row {i}" for i in range(20)]
    assert shown(windows(loader, 2, cursor=Cursor(2, 48)), "x") == shown(windows(here, 2, cursor=Cursor(2, 48)), "x")
    assert loader._ahead is not None and loader._ahead.restarts == 3, "what was ahead survived the evaluation"


@pytest.mark.parametrize("uploads", [False, True])
def test_an_error_of_an_item_is_one_message_with_its_traceback(pools: Any, uploads: bool) -> None:
    ups = BatchUploader(CPU) if uploads else None
    loader = feed_of(pools(Items(breaks={17: "raises"})), uploads=ups)
    with pytest.raises(RunError, match=r"data.train failed while rows .*17.* were read: ValueError: no picture 17\n"):
        windows(loader, 5)
    with pytest.raises(InputError, match=r"data\.train: got an item that is a list"):
        windows(feed_of(pools(Items(breaks={17: "odd"}))), 5)
    with pytest.raises(RunError, match=r"(?s)data.train failed while rows .*17.* were read.*lambda"):
        windows(feed_of(pools(Items(breaks={17: "unsendable"}))), 5)
    loader.close()


def test_a_process_that_dies_is_one_message(pools: Any) -> None:
    with pytest.raises(RunError, match=r"loader process 0 \(pid \d+\) ended by SIGKILL while it read data"):
        windows(feed_of(pools(Items(breaks={17: "dies"}))), 5)


@pytest.mark.covers("DATA-01", "BP-15")
def test_the_upload_thread_pins_and_the_order_stays(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from raytrain.data.rows import residency

    threads: list[str] = []
    monkeypatch.setattr(residency, "pin", lambda value: threads.append(threading.current_thread().name) or value)
    uploads = BatchUploader(CPU)
    loader = feed_of(pools(Items(), workers=2), uploads=uploads)
    loader.batches.split.pinned = True  # as `place` makes it where there is a GPU
    assert shown(windows(loader, 10), "x") == shown(windows(feed_of(None), 10), "x")
    assert threads and all(name.startswith("upload") for name in threads), "never the training thread"
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


def test_the_number_of_prefetched_batches_is_bounded_and_the_rest_is_cancelled() -> None:
    begun, cancelled = [], []

    class Slow:
        def __init__(self, item: int) -> None:
            begun.append(item)
            self.item = item

        def result(self) -> int:
            return self.item

        def cancel(self) -> None:
            cancelled.append(self.item)

    running = prefetch(range(100), Slow, depth=UPLOAD_DEPTH + 1)
    assert [next(running)[1].result() for _ in range(4)] == [0, 1, 2, 3]
    assert begun == list(range(4 + UPLOAD_DEPTH))
    running.close()
    assert cancelled == [4, 5]
    wanted = BatchRequest("train", 0, np.arange(3))
    assert wanted.same(BatchRequest("train", 0, np.arange(3))) and not wanted.same(
        BatchRequest("train", 1, np.arange(3))
    )
