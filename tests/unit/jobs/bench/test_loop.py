"""Bench `loop`: the connection between its processes, the plain loop, and the observer that waits between blocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from jobs.bench.harness.processes import ArmServer, connect
from jobs.bench.harness.sessions import SessionArm
from jobs.bench.loop import BlockObserver, LoopOptions, gpt_loop, loop_job, make_text
from raytrain.errors import RunError

SMALL = {**LoopOptions.QUICK, "threads": 1}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return make_text(LoopOptions(**SMALL), tmp_path)


def test_the_text_fills_every_step_of_an_epoch(text: Path) -> None:
    options = LoopOptions(**SMALL)
    rows = len(text.read_bytes()) // options.context - 1
    assert rows % options.batch == 0 and rows >= options.batch
    assert text.read_bytes() == make_text(options, text.parent).read_bytes()


def test_the_plain_loop_equals_our_loop_across_the_end_of_an_epoch(tmp_path: Path) -> None:
    options = LoopOptions(**{**SMALL, "blocks": 1, "dropped": 1})
    path = tmp_path / "short.txt"
    path.write_bytes(make_text(options, tmp_path).read_bytes()[: 16 * (4 * 7 + 1)])  # seven steps an epoch
    threads = torch.get_num_threads()
    ours = SessionArm(loop_job(options, world_size=1, text=path, save_dir=tmp_path), precision="fp32")
    ours.run(20)
    settings = {**options.model_dump(), "text": str(path), "max_steps": 20}
    exact = gpt_loop(settings, clip="rows", rank=0, world_size=1).run(20)
    near = gpt_loop(settings, clip="torch", rank=0, world_size=1).run(20)
    torch.set_num_threads(threads)
    assert ours.losses == exact and len(exact) == 3
    assert near == pytest.approx(exact, rel=1e-4)


def test_a_run_waits_between_blocks_and_continues_alone_after_the_last() -> None:
    with ArmServer() as server:
        observer, seen = BlockObserver(), []

        def train() -> None:
            observer.event({"kind": "decision"})  # does not wait before the attempt
            observer.event({"kind": "attempt"})
            for step in (10, 20, 30, 40, 50):
                seen.append(step)
                observer.metrics({"step": step, "loss": float(step)})

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        server.await_arm("ours", processes=1, alive=thread.is_alive)
        assert seen == []
        first = server.ask("ours", steps=20)
        assert first["losses"] == [10.0, 20.0] and first["seconds"] > 0 and seen == [10, 20]
        assert server.ask("ours", steps=10)["losses"] == [30.0]
        server.dismiss("ours")
        thread.join(10)
        assert not thread.is_alive() and seen == [10, 20, 30, 40, 50]


def test_the_slowest_process_of_an_arm_counts() -> None:
    with ArmServer() as server:
        lines = [connect("two") for _ in range(2)]
        for line, seconds in zip(lines, (2.0, 1.0), strict=True):
            line.send({"seconds": seconds})
        server.await_arm("two", processes=2, alive=lambda: True)
        assert server.ask("two", steps=3, clip="rows") == {"seconds": 2.0}
        assert [line.recv() for line in lines] == [{"steps": 3, "clip": "rows"}] * 2


def test_the_error_names_an_arm_that_died() -> None:
    with ArmServer() as server:
        with pytest.raises(RunError, match="'plain' ended before"):
            server.await_arm("plain", processes=1, alive=lambda: False)
        line = connect("plain")
        server.await_arm("plain", processes=1, alive=lambda: True)
        line.close()
        with pytest.raises((RunError, OSError)):
            server.ask("plain", steps=1)
    assert not Path(server.folder).exists()
