"""Bench `loop`: the connection between its processes, the plain loop, and the observer that waits between blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from jobs.bench.harness.options import options_of
from jobs.bench.harness.processes import ADDRESS, ArmProcesses, Arms, connect
from jobs.bench.harness.sessions import SessionArm, write_text
from jobs.bench.loop import BlockObserver, LoopOptions, gpt_loop, loop_job
from raytrain.errors import RunError

SMALL = options_of("loop", ["threads=1"], quick=True).model_dump()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path, LoopOptions(**SMALL), steps=50)


def test_the_text_fills_every_step_of_an_epoch(text: Path) -> None:
    options = LoopOptions(**SMALL)
    rows = len(text.read_bytes()) // options.context - 1
    assert rows % options.batch == 0 and rows >= options.batch
    assert text.read_bytes() == write_text(text.parent, options, steps=50).read_bytes()


def test_the_plain_loop_equals_our_loop_across_the_end_of_an_epoch(tmp_path: Path) -> None:
    options = LoopOptions(**{**SMALL, "blocks": 1, "dropped": 1})
    path = write_text(tmp_path, options, steps=7)
    threads = torch.get_num_threads()
    ours = SessionArm(loop_job(options, world_size=1, text=path, folder=tmp_path), precision="fp32")
    ours.run(20)
    settings = {**options.model_dump(), "text": str(path), "max_steps": 20}
    exact = gpt_loop(settings, clip="rows", rank=0, world_size=1).run(20)
    near = gpt_loop(settings, clip="torch", rank=0, world_size=1).run(20)
    torch.set_num_threads(threads)
    assert ours.losses == exact and len(exact) == 3
    assert near == pytest.approx(exact, rel=1e-4)


@pytest.fixture
def arms() -> Iterator[Arms]:
    with Arms() as arms:
        yield arms
    assert not arms.folder.exists()


@pytest.fixture
def arm_of(arms: Arms, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ArmProcesses]:
    """`arm_of(number=1)`: an arm without processes of its own, to which so many threads of this process connect."""

    def make(number: int = 1) -> ArmProcesses:
        arm = ArmProcesses(arms, "ours", "unused:unused", {}, processes=0, connecting=number)
        monkeypatch.setenv(ADDRESS, arm.address)
        return arm

    return make


def test_a_run_waits_between_blocks_and_continues_alone_after_the_last(arm_of: Callable[..., ArmProcesses]) -> None:
    observer, seen = BlockObserver(), []

    def train() -> None:
        observer.event({"kind": "decision"})  # does not wait before the attempt
        observer.event({"kind": "attempt"})
        for step in (10, 20, 30, 40, 50):
            seen.append(step)
            observer.metrics({"step": step, "loss": float(step)})

    arm = arm_of()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    arm.await_ready()
    assert seen == []
    first = arm.ask(steps=20)
    assert first["losses"] == [10.0, 20.0] and first["seconds"] > 0 and seen == [10, 20]
    assert arm.ask(steps=10)["losses"] == [30.0]
    arm.close()
    thread.join(10)
    assert not thread.is_alive() and seen == [10, 20, 30, 40, 50]


def test_the_slowest_process_of_an_arm_counts(arm_of: Callable[..., ArmProcesses]) -> None:
    arm = arm_of(2)
    lines = [connect() for _ in range(2)]
    for line, seconds in zip(lines, (2.0, 1.0), strict=True):
        line.send({"seconds": seconds})
    arm.await_ready()
    assert arm.ask(steps=3, clip="rows") == {"seconds": 2.0}
    assert [line.recv() for line in lines] == [{"steps": 3, "clip": "rows"}] * 2


def test_the_error_names_an_arm_that_died_with_the_end_of_its_log(
    arms: Arms, arm_of: Callable[..., ArmProcesses]
) -> None:
    arm = ArmProcesses(arms, "plain", "jobs.bench.loop:no_such_loop", {})
    with pytest.raises(RunError, match=r"(?s)'plain': ended before its first step.*no_such_loop"):
        arm.await_ready()
    with pytest.raises(RunError, match=r"(?s)'plain': did not end well: exit 1.*no_such_loop"):
        arm.close()
    ours = arm_of()
    line = connect()
    ours.await_ready()
    line.close()
    with pytest.raises(RunError, match="'ours': "):
        ours.ask(steps=1)
