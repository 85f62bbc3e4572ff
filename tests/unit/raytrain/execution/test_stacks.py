"""Where a worker says that it is."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.execution.driver_channel import write_stacks
from raytrain.runs.folder import RunFolder


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
