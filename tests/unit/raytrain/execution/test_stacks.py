"""Where a worker says that it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.execution.driver_channel import write_stacks
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.fsdp import ShardSaver, TimedCollective


def test_a_save_that_waits_for_its_thread_is_where_that_thread_is(tmp_path: Path) -> None:
    """The training thread itself is in a wait of the standard library, which says nothing."""
    run, reached, held = RunFolder.create(str(tmp_path), "test"), threading.Event(), threading.Lock()

    def fence_that_hangs() -> None:
        reached.set()
        held.acquire()
        held.release()

    def save_twice() -> None:
        for step in (1, 2):
            writer.save({"model": {"w": torch.ones(3)}}, {}, step=step)

    writer = CheckpointWriter(run, keep=3, asynchronous=True, fence=fence_that_hangs)
    training, place = threading.Thread(target=save_twice), {}
    with held:
        training.start()
        assert reached.wait(60) and training.ident is not None
        for _ in range(10_000):  # until it has come to the second save
            place = write_stacks(run, 3, training.ident)
            if place["place"].startswith("fence_that_hangs (test_stacks.py:"):
                break
    training.join()
    writer.close()
    assert place["place"].startswith("fence_that_hangs (test_stacks.py:") and place["waits"] is False
    text = Path(run.path, "logs/rank_00003.stacks").read_text()
    assert "fence_that_hangs" in text and "save_twice" in text


def place_in(run: RunFolder, work: Callable[[], object], reached: threading.Event, held: threading.Lock) -> Any:
    """What a worker says once its training thread is in `work`, which sets `reached` and waits for `held`."""
    training = threading.Thread(target=work)
    with held:
        training.start()
        assert reached.wait(60) and training.ident is not None
        place = write_stacks(run, 0, training.ident)
    training.join()
    return place


@pytest.fixture
def waiting() -> tuple[threading.Event, threading.Lock, Callable[..., None]]:
    reached, held = threading.Event(), threading.Lock()

    def wait_for_others(*_: Any, **__: Any) -> None:
        reached.set()
        with held:
            pass

    return reached, held, wait_for_others


def test_a_worker_in_a_collective_of_shards_waits_and_one_that_computes_does_not(tmp_path: Path, waiting: Any) -> None:
    reached, held, wait_for_others = waiting
    run, rows = RunFolder.create(str(tmp_path), "test"), torch.ones(2)
    gather = TimedCollective(Workers(), wait_for_others, lambda: None)
    place = place_in(run, lambda: gather(rows, rows, group=None), reached, held)
    assert place["waits"] is True and place["place"].startswith("__call__ (fsdp.py:")
    reached.clear()
    place = place_in(run, wait_for_others, reached, held)
    assert place["waits"] is False and place["place"].startswith("wait_for_others (test_stacks.py:")


def test_a_save_of_shards_that_waits_for_its_thread_is_where_that_thread_is(tmp_path: Path, waiting: Any) -> None:
    reached, held, write = waiting
    run = RunFolder.create(str(tmp_path), "test")
    saver = ShardSaver.__new__(ShardSaver)  # without the process group that it makes
    with ThreadPoolExecutor(1, thread_name_prefix="shards") as thread:
        with held:
            saver._pending = thread.submit(write)
            assert reached.wait(60)
            training = threading.Thread(target=saver.wait)
            training.start()
            place = {"place": ""}
            for _ in range(10_000):
                assert training.ident is not None
                place = write_stacks(run, 0, training.ident)
                if place["place"].startswith("wait_for_others"):
                    break
        training.join()
    assert place["place"].startswith("wait_for_others (test_stacks.py:") and place["waits"] is False
