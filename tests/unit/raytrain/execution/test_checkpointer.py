"""When a checkpoint is due, its contents, and the events about it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lab
import pytest
import torch
from lab import GPT, Rows, digest, make_session, token_rows

from raytrain.checkpoint.reader import best_checkpoint, list_checkpoints, load
from raytrain.checkpoint.snapshot import flatten, unflatten
from raytrain.execution.checkpointer import (
    FIRST_STEP,
    STALL_BUDGET,
    WARM_UP_STEPS,
    WORK_AT_RISK_S,
    CheckpointSaver,
    _pack,
    _unpack,
    solve_interval,
)
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session


def session_of(precision: str = "fp32", **loop: Any) -> Session:
    """Evaluates only with `eval_every`."""
    data = {"train": token_rows(48), **({"eval": token_rows(12, seed=2)} if loop else {"eval_fraction": 0.0})}
    return make_session({**GPT, "dropout": 0.1}, data, precision=precision, loop={"max_steps": 14, **loop})


def saver_of(session: Session, folder: Path, *, every: int | str, **more: Any) -> tuple[CheckpointSaver, Rows]:
    reporter = Rows()
    return lab.saver_of(session, RunFolder(str(folder)), every=every, reporter=reporter, **more), reporter


def run_with(session: Session, saver: CheckpointSaver, reporter: Rows, **more: Any) -> Any:
    loop = session.loop(reporter=reporter, saver=saver, should_stop=lambda: False, clock=saver.clock)
    outcome = loop.run(session.state)
    saver.close()
    return outcome


def steps_in(folder: Path) -> list[int]:
    return [info.step for info in list_checkpoints(RunFolder(str(folder))) if info.complete]


def test_a_fixed_interval_saves_at_its_multiples_and_at_the_end(tmp_path: Path) -> None:
    session = session_of(eval_every=4)
    saver, reporter = saver_of(session, tmp_path, every=4)
    run_with(session, saver, reporter)
    assert steps_in(tmp_path) == [4, 8, 12, 14]
    saved = [event for event in reporter.events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == [4, 8, 12, 14] and all(event["stall_s"] >= 0 for event in saved)
    seconds = [event["seconds"] for event in saved]  # the account up to there, for the time table
    for earlier, later in pairwise(seconds):
        assert earlier["compute"] < later["compute"] and earlier["save"] <= later["save"]
    losses = dict(zip(reporter.of("eval", "step"), reporter.of("eval", "loss"), strict=True))
    for step in (4, 14):
        assert load(RunFolder(str(tmp_path)).checkpoint_dir(step)).manifest["eval_loss"] == losses[step]


@pytest.mark.parametrize("every", [5, "auto"])
def test_the_buffers_of_the_whole_state_are_made_before_the_first_save(every: int | str, tmp_path: Path) -> None:
    """Optimizers have no state before the first step, and the first copy of it takes far longer than later ones."""
    session = session_of()
    saver, reporter = saver_of(session, tmp_path, every=every)
    assert saver.writer is not None
    held: dict[int, int] = {}

    def note() -> bool:
        held[session.state.step] = saver.writer.staged_bytes
        return False

    session.loop(reporter=reporter, saver=saver, should_stop=note, clock=saver.clock).run(session.state)
    saver.close()
    state = sum(parameter.nbytes for parameter in session.trainable.module.parameters())
    assert held[1] == held[2] == 0 and 3 * state <= held[3] == held[4], "weights and two moments"


def test_a_checkpoint_of_another_step_than_the_evaluation_has_no_eval_loss(tmp_path: Path) -> None:
    session = session_of(eval_every=4)
    run_with(session, *saver_of(session, tmp_path, every=3))
    run = RunFolder(str(tmp_path))
    losses = {step: load(run.checkpoint_dir(step)).manifest["eval_loss"] for step in steps_in(tmp_path)}
    assert [losses[step] for step in (3, 6, 9)] == [None] * 3 and losses[12] is not None and losses[14] is not None


def test_a_checkpoint_holds_only_the_state(tmp_path: Path) -> None:
    session = session_of("fp16")
    saver, reporter = saver_of(session, tmp_path, every=5)
    run_with(session, saver, reporter)
    loaded = load(RunFolder(str(tmp_path)).checkpoint_dir(14))
    assert sorted(loaded.parts) == ["model", "optimizer", "rng", "scaler"] and list(loaded.parts["rng"]) == ["0"]
    assert loaded.state == {
        "loop": session.state.to_json(),
        "world_size": 1,
        "precision": "fp16",
        "seed": session.job.seed,
    }
    assert digest(loaded.parts["model"]) == digest(session.trainable.module.state_dict())
    middle = load(RunFolder(str(tmp_path)).checkpoint_dir(5))
    assert middle.state["loop"]["cursor"] == {"epoch": 1, "position": 32}
    assert middle.manifest["eval_loss"] is None, "an eval loss of another step is not this checkpoint's"


class Clocked:
    """A writer whose stalls are given; the time of a step is set through the saver's own clock."""

    last_write_s = None

    def __init__(self, stall: float) -> None:
        self.stall = stall

    def save(self, *_: Any, **__: Any) -> float:
        return self.stall

    def wait(self, *_: Any) -> None:
        return

    close = rehearse = wait


@pytest.mark.parametrize(
    ("stall", "step_s", "interval"),
    [
        (0.001, 0.01, 3000),  # cheap: only the work at risk counts
        (0.001, 0.002, 15_000),  # the same for steps so short that this is very many
        (3.0, 0.01, 9700),  # dear: at most 3 % of the time
        (0.0, 100.0, 1),
    ],
)
def test_the_interval_is_solved_from_the_stall_that_was_measured(
    stall: float, step_s: float, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    saver, reporter = saver_of(session, tmp_path, every="auto")
    saver.writer.close()  # type: ignore[union-attr]
    saver.writer = Clocked(stall)  # type: ignore[assignment]
    now = saver._begin
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for step in range(1, FIRST_STEP + 1):
        now += step_s
        if step <= WARM_UP_STEPS:
            now += 40 * step_s  # the first steps choose kernels
        for purpose in ("compile", "eval", "save") if step == 5 else ():  # a new shape; as the loop charges them
            saver.clock.add(purpose, 30 * step_s)
            now += 30 * step_s
        assert saver.due(step) is (step == FIRST_STEP or now - saver._begin >= 600.0)
    session.state.step = FIRST_STEP
    saver.save(session.state, final=False)
    (decision,) = [event for event in reporter.events if event["kind"] == "decision"]
    assert decision["what"] == "checkpoint_every" and decision["value"] == pytest.approx(interval, rel=0.01)
    chosen = decision["value"]
    assert stall <= STALL_BUDGET * 1.001 * (stall + chosen * step_s)
    assert chosen * step_s >= min(WORK_AT_RISK_S, 100.0) * 0.999
    assert not saver.due(FIRST_STEP + chosen - 1) or chosen == 1
    assert saver.due(FIRST_STEP + chosen)
    saver.save(session.state, final=False)  # nearly the same interval: no new event
    assert len([event for event in reporter.events if event["kind"] == "decision"]) == 1


def test_automatic_checkpoints_leave_at_most_ten_minutes_of_work_at_risk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    saver, reporter = saver_of(session, tmp_path, every="auto")
    saver.writer.close()  # type: ignore[union-attr]
    saver.writer = Clocked(30.0)  # type: ignore[assignment]
    saver._begin = 1000.0  # sums with the clock's own fractions round
    saver._steady = (0, saver._begin)
    now = saver._begin + 599.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert not saver.due(6)
    now += 1.0
    assert saver.due(6), "ten minutes have passed before the tenth step"
    session.state.step = 6
    saver.save(session.state, final=False)
    (decision,) = [event for event in reporter.events if event["kind"] == "decision"]
    assert decision["value"] == 6, "steps of 100 s; the stall alone would ask for 10"
    assert "above the budget of 3%" in decision["reason"] and "at most 6 steps" in decision["reason"]


def test_a_fixed_interval_decides_nothing(tmp_path: Path) -> None:
    session = session_of()
    saver, reporter = saver_of(session, tmp_path, every=7, asynchronous=False)
    run_with(session, saver, reporter)
    assert {event["kind"] for event in reporter.events} == {"checkpoint"} and steps_in(tmp_path) == [7, 14]


def test_a_newer_attempt_stops_the_write(tmp_path: Path) -> None:
    class Superseded(Exception):
        pass

    def fence() -> None:
        raise Superseded

    session = session_of()
    saver, reporter = saver_of(session, tmp_path, every=5, fence=fence, asynchronous=False)
    with pytest.raises(Superseded):
        run_with(session, saver, reporter)
    assert steps_in(tmp_path) == []


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(tmp_path: Path) -> None:
    """The writer is held back until training is three steps further."""
    session, later = session_of("fp16"), threading.Event()

    def state() -> str:
        return digest(session.parts(), session.generator_state())

    states: dict[int, str] = {}

    def voted() -> bool:
        states[session.state.step] = state()
        if session.state.step == 8:
            later.set()
        return session.state.step == 9

    saver, reporter = saver_of(session, tmp_path, every=5, fence=lambda: later.wait(30))
    session.loop(reporter=reporter, saver=saver, should_stop=voted).run(session.state)
    saver.close()
    loaded = load(RunFolder(str(tmp_path)).checkpoint_dir(5))
    rng = loaded.parts.pop("rng")["0"]
    assert digest(loaded.parts, rng) == states[5] != states[8]


def test_messages_between_workers_are_json_and_safetensors() -> None:
    python = {"gauss": None, "x": (1, 2.5)}
    state = {"torch": torch.arange(5, dtype=torch.uint8), "python": python, "n": torch.tensor(3.0)}
    flat = flatten(state)
    payload = _pack(flat.tensors, flat.skeleton)
    back = unflatten(*_unpack(payload))
    assert digest(back) == digest(state) and back["python"]["x"] == (1, 2.5)
    assert b"\x80\x04" not in payload and b"pickle" not in payload


# -- the best evaluation ------------------------------------------------------------------------


def scored(losses: dict[int, float], folder: Path, **more: Any) -> tuple[CheckpointSaver, Rows, Session]:
    """A run of 14 steps whose evaluations, every two steps, have these losses (9.0 where none is given)."""
    session = session_of(eval_every=2)
    saver, reporter = saver_of(session, folder, every=100, **{"keep": 1, **more})
    loop = session.loop(reporter=reporter, saver=saver, should_stop=lambda: False, clock=saver.clock)
    loop.evaluate = lambda step: {"loss": losses.get(step, 9.0)}
    loop.run(session.state)
    saver.close()
    return saver, reporter, session


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_best_evaluation_leaves_a_checkpoint_that_is_kept(asynchronous: bool, tmp_path: Path) -> None:
    _, _, session = scored({2: 3.0, 4: 2.0, 8: 2.5}, tmp_path, asynchronous=asynchronous)
    assert steps_in(tmp_path) == [4, 14] and session.state.best_step == 4
    loaded = load(RunFolder(str(tmp_path)).checkpoint_dir(4))
    assert loaded.manifest["eval_loss"] == 2.0 and loaded.state["loop"]["best_step"] == 4


def test_of_equal_eval_losses_the_first_is_the_best(tmp_path: Path) -> None:
    _, reporter, session = scored({4: 2.0, 8: 2.0, 14: 2.0}, tmp_path, keep="all")
    assert steps_in(tmp_path) == [2, 4, 14] and session.state.best_step == 4
    assert best_checkpoint(list_checkpoints(RunFolder(str(tmp_path)))).step == 4  # type: ignore[union-attr]
    assert [row["step"] for row in reporter.events if row["kind"] == "checkpoint"] == [2, 4, 14]


def test_an_infinite_eval_loss_is_never_the_best(tmp_path: Path) -> None:
    _, reporter, session = scored({2: float("inf"), 4: float("nan"), 6: 5.0}, tmp_path)
    assert steps_in(tmp_path) == [6, 14] and session.state.best_step == 6
    assert [row["step"] for row in reporter.events if row["kind"] == "checkpoint"] == [6, 14]


def test_writes_beyond_their_budget_wait_in_memory_and_only_the_newest_best_is_written(tmp_path: Path) -> None:
    """Every evaluation improves, and a write seems to take an hour."""
    session = session_of(eval_every=2)
    saver, reporter = saver_of(session, tmp_path, every=11, keep=9)
    writer = saver.writer
    assert writer is not None
    seen: dict[int, list[int]] = {}
    states: dict[int, str] = {}

    def evaluate(step: int) -> dict[str, Any]:
        seen[step], states[step] = steps_in(tmp_path), digest(session.parts())
        if step == 4:
            writer.wait()
            writer.last_write_s = 3600.0
        return {"loss": 20.0 - step if step <= 8 else 50.0}

    loop = session.loop(reporter=reporter, saver=saver, should_stop=lambda: False, clock=saver.clock)
    loop.evaluate = evaluate
    loop.run(session.state)
    saver.close()
    assert seen[10] == [2], "4, 6 and 8 wait"
    assert seen[12][:2] == [2, 8], "the best one is written before the checkpoint that is due"
    assert steps_in(tmp_path) == [2, 8, 11, 14]
    best = load(RunFolder(str(tmp_path)).checkpoint_dir(8))
    best.parts.pop("rng")
    assert digest(best.parts) == states[8], "the copy is of its own step"
    held = {row["step"] for row in reporter.events if row["kind"] == "checkpoint" and "delay_s" in row}
    assert held == {4, 6, 8}


def test_where_every_checkpoint_is_kept_every_best_one_is_written(tmp_path: Path) -> None:
    session = session_of(eval_every=2)
    saver, reporter = saver_of(session, tmp_path, every=100, keep="all")

    def evaluate(step: int) -> dict[str, Any]:
        assert saver.writer is not None
        saver.writer.wait()
        saver.writer.last_write_s = 3600.0
        return {"loss": 20.0 - step}

    loop = session.loop(reporter=reporter, saver=saver, should_stop=lambda: False, clock=saver.clock)
    loop.evaluate = evaluate
    loop.run(session.state)
    saver.close()
    assert steps_in(tmp_path) == [2, 4, 6, 8, 10, 12, 14]
    assert not any("delay_s" in row for row in reporter.events)


def test_a_best_state_in_memory_is_written_when_the_run_fails(tmp_path: Path) -> None:
    session = session_of(eval_every=2)
    saver, reporter = saver_of(session, tmp_path, every=100)
    saver._keep = 1

    def evaluate(step: int) -> dict[str, Any]:
        if step == 6:
            raise ValueError("the user's code")
        assert saver.writer is not None
        saver.writer.wait()
        saver.writer.last_write_s = 3600.0
        return {"loss": 10.0 - step}

    loop = session.loop(reporter=reporter, saver=saver, should_stop=lambda: False, clock=saver.clock)
    loop.evaluate = evaluate
    with pytest.raises(ValueError, match="the user's code"):
        loop.run(session.state)
    assert steps_in(tmp_path) == [2]
    saver.close()  # as the worker does
    assert steps_in(tmp_path) == [2, 4]


# -- how often ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stall", "step"), [(0.1, 0.01), (2.0, 0.5), (1e-4, 1.0), (0.97, 0.03), (0.0, 0.1)])
def test_the_interval_is_the_smallest_within_the_budget(stall: float, step: float) -> None:
    steps = solve_interval(stall_s=stall, step_time_s=step, maximum=10**9).value
    assert stall / (stall + steps * step) <= 0.03
    assert steps == 1 or stall / (stall + (steps - 1) * step) > 0.03


def test_the_interval_is_bounded_with_a_reason() -> None:
    assert solve_interval(stall_s=1, step_time_s=0.01, maximum=500).value == 500
    assert "at most 500 steps" in solve_interval(stall_s=1, step_time_s=0.01, maximum=500).reason
    assert solve_interval(stall_s=0, step_time_s=1, minimum=50).value == 50
    assert "at least 50 steps" in solve_interval(stall_s=0, step_time_s=1, minimum=50).reason
    assert solve_interval(stall_s=1, step_time_s=0, maximum=500).value == 500, "too short to measure"
