"""The loop: how long it runs, what it logs and when, why it ends."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab import GPT, MLP, DeviceReads, Rows, class_rows, digest, make_session, token_rows, train

from raytrain.errors import RunError
from raytrain.train.loop import RECENT_STEPS, LogInterval
from raytrain.train.session import Session
from raytrain.train.state import Fetching, LoopState

DATA = {"train": class_rows(64), "eval_fraction": 0.0}


def mlp(loop: dict[str, Any], **sections: Any) -> Session:
    return make_session(MLP, DATA, loop={"global_batch_size": 16, **loop}, **sections)


@pytest.mark.covers("LOOP-08", "CLI-05")
@pytest.mark.parametrize("micro", [16, 4])
@pytest.mark.parametrize(
    ("limits", "steps"),
    [({"max_steps": 7}, 7), ({"epochs": 2, "max_steps": None}, 8), ({"epochs": 2, "max_steps": 5}, 5),
     ({"epochs": 1, "max_steps": 50}, 4)],
)  # fmt: skip
def test_exactly_max_steps_optimizer_steps_are_run(limits: dict[str, Any], steps: int, micro: int) -> None:
    session = mlp({**limits, "micro_batch_size": micro})
    counted: list[int] = []
    session.optimizers[0].register_step_post_hook(lambda *_: counted.append(1))
    forwards: list[int] = []
    session.trainable.module.register_forward_hook(lambda *_: forwards.append(1))
    rows, outcome = train(session)
    assert len(counted) == steps == session.state.step and len(forwards) == steps * 16 // micro
    assert outcome.kind == "done" and rows.of("train", "step") == list(range(1, steps + 1))
    assert rows.of("train", "epoch") == [step // 4 for step in range(steps)]
    taken = {int(state["step"]) for state in session.optimizers[0].state.values()}
    assert taken == {steps}


@pytest.mark.covers("LOOP-12")
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_runs_give_the_same_losses_bit_for_bit(deterministic: bool) -> None:
    def run(seed: int) -> tuple[list[float], str]:
        session = make_session(
            {**GPT, "dropout": 0.2},
            {"train": token_rows(60), "eval": token_rows(16, seed=3)},
            loop={"max_steps": 10, "eval_every": 4, "micro_batch_size": 8, "deterministic": deterministic},
            seed=seed,
        )
        rows, _ = train(session)
        return rows.losses + rows.of("eval", "loss"), digest(session.trainable.module.state_dict())

    try:
        first = run(5)
        np.random.random(3), torch.rand(2)  # whatever was drawn before is of no matter
        assert run(5) == first and len(first[0]) == 13
        assert run(6) != first
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.covers("MON-01", "CLI-04", "BP-07")
@pytest.mark.parametrize(
    ("log_every", "logged"), [(100, [1, 100, 200, 250]), (0, [1, 250]), ("epoch", [1, *range(4, 251, 4), 250])]
)
def test_rows_come_at_the_interval_and_at_the_end_and_cost_a_read_each(log_every: Any, logged: list[int]) -> None:
    session = mlp({"max_steps": 250, "log_every": log_every})
    with DeviceReads() as reads:
        rows, _ = train(session)
    assert rows.of("train", "step") == logged
    assert len(rows.of("train", "peak_memory_bytes")) == len(logged) and min(rows.of("train", "peak_memory_bytes")) > 0
    assert sum("read_row" in spot for spot in reads.spots) == len(logged)
    running = [spot for spot in reads.spots if "__init__" not in spot]  # memory of the host is mapped at the start
    assert len(running) == len(logged) + 1, running  # and the skipped steps, once, for the last save


@pytest.mark.covers("MON-16")
def test_a_row_holds_the_throughput(monkeypatch: pytest.MonkeyPatch, tiny_text: Path) -> None:
    """The clock is ours here: each look at it is a hundredth of a second, so that every figure is known."""

    class Ticks:
        count = 0

        def __call__(self) -> float:
            self.count += 1
            return self.count / 100

    monkeypatch.setattr("raytrain.train.loop.time.perf_counter", clock := Ticks())
    model = {name: value for name, value in GPT.items() if name != "vocab_size"}
    data = {"source": "text", "path": str(tiny_text), "eval_fraction": 0.0}
    session = make_session(model, data, loop={"max_steps": 12, "log_every": 6})
    loop = session.loop(reporter=(rows := Rows()), should_stop=lambda: False)
    marks: list[float] = []
    spans: list[float] = []
    inner, log = loop._one_step, loop._log

    def timed(state: LoopState) -> Any:
        out = inner(state)
        marks.append(loop._interval.recent_s[-1])
        return out

    def logged(state: LoopState, output: Any) -> int:
        spans.append((clock.count + 1) / 100 - loop._interval.since)  # its first look at the clock ends the interval
        return log(state, output)

    loop._one_step, loop._log = timed, logged  # type: ignore[method-assign]
    loop.run(session.state)
    for row, first, end, span in zip(rows.rows, (0, 1, 6), (1, 6, 12), spans, strict=True):
        times = sorted(marks[first:end])
        assert row["step"] == end and row["step_time_s"] == pytest.approx(sum(times) / len(times))
        assert row["step_ms_p50"] == pytest.approx(1e3 * times[len(times) // 2])
        assert row["step_ms_p95"] == pytest.approx(1e3 * times[-1])
        assert row["samples_per_s"] == pytest.approx(16 * len(times) / span) and span >= sum(times)
        assert row["tokens_per_s"] == pytest.approx(12 * row["samples_per_s"])
        assert 0 < row["data_time_s"] < row["step_time_s"]


def test_throughput_is_of_training_without_evaluation_and_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only steps (1 s), evaluations (100 s) and saves (1000 s) advance."""

    class Hours:
        now = 0.0

        def __call__(self) -> float:
            return self.now

        def adding(self, seconds: float, inner: Any) -> Any:
            def timed(*arguments: Any, **named: Any) -> Any:
                self.now += seconds
                return inner(*arguments, **named)

            return timed

    hours = Hours()
    monkeypatch.setattr("raytrain.train.loop.time.perf_counter", hours)
    data = {"train": class_rows(64), "eval": class_rows(8, seed=1)}
    session = make_session(MLP, data, loop={"max_steps": 12, "log_every": 4, "eval_every": 3})
    saver = Keeps(every=2)
    loop = session.loop(reporter=(rows := Rows()), should_stop=lambda: False, saver=saver)
    loop.step.run = hours.adding(1.0, loop.step.run)  # type: ignore[method-assign]
    loop.evaluate = hours.adding(100.0, lambda step: {"loss": float(step)})
    saver.save = hours.adding(1000.0, saver.save)  # type: ignore[method-assign]
    loop.run(session.state)
    assert rows.of("train", "step") == [1, 4, 8, 12]
    assert rows.of("train", "samples_per_s") == pytest.approx([16.0] * 4)
    assert len(saver.saved) == 7 and saver.saved[1][0] == 3, "3 is the best evaluation"
    assert loop.clock.seconds["eval"] == 400.0 and loop.clock.seconds["save"] == 7000.0


def on_a_curve(losses: list[float], *, patience: int | None, min_delta: float = 0.0, steps: int = 100) -> Any:
    """(reporter, outcome, session) of a run whose evaluations, one each 5 steps, give these losses."""
    session = make_session(
        MLP,
        {"train": class_rows(64), "eval": class_rows(8, seed=1)},
        loop={"max_steps": steps, "eval_every": 5, "log_every": 0, "patience": patience, "min_delta": min_delta},
    )
    curve = iter(losses)
    loop = session.loop(reporter=(rows := Rows()), should_stop=lambda: False)
    loop.evaluate = lambda step: {"loss": next(curve)}
    return rows, loop.run(session.state), session


@pytest.mark.covers("LOOP-16")
@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "stops_at"),
    [
        ([3.0, 2.0, 1.0, 1.1, 1.2, 1.3, 0.1], 3, 0.0, 30),
        ([3.0, 2.0, 2.5, 1.0, 1.0, 1.0, 0.1], 2, 0.0, 30),
        ([3.0, 2.95, 2.90, 1.0], 2, 0.2, 15),
        ([float("nan"), float("nan"), 1.0], 2, 0.0, 10),
        ([3.0, 2.9, 2.8, 2.7, 2.6, 2.6, 2.6, 1.0], 2, 0.15, 35),
    ],
)
def test_it_stops_early_where_the_eval_loss_no_longer_falls(
    losses: list[float], patience: int, min_delta: float, stops_at: int
) -> None:
    rows, outcome, session = on_a_curve(losses, patience=patience, min_delta=min_delta)
    assert (outcome.kind, session.state.step) == ("plateau", stops_at)
    assert str(patience) in outcome.reason and len(rows.of("eval", "loss")) == stops_at // 5


def test_without_patience_training_continues_to_the_end() -> None:
    _, outcome, session = on_a_curve([1.0] * 20, patience=None)
    assert (outcome.kind, session.state.step) == ("done", 100)
    assert session.state.best_eval_loss == 1.0 and session.state.best_step == 5


class Keeps:
    """A saver that notes what it is asked."""

    def __init__(self, *, every: int) -> None:
        self.every, self.saved = every, []

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, state: LoopState, *, final: bool, only_best: bool = False) -> None:
        self.saved.append((state.step, final, state.to_json()))


def test_a_stop_saves_at_the_end_of_the_step_and_can_be_gone_on_from() -> None:
    whole, _ = train(mlp({"max_steps": 9}))
    session, saver = mlp({"max_steps": 9}), Keeps(every=3)
    rows, outcome = train(session, saver=saver, should_stop=lambda: session.state.step == 5)
    assert outcome.kind == "interrupted"
    assert [(step, final) for step, final, _ in saver.saved] == [(3, False), (5, True)]
    state = LoopState.from_json(saver.saved[-1][2])
    assert state == session.state
    more, outcome = train(session, saver=saver)
    assert outcome.kind == "done" and rows.losses + more.losses == whole.losses
    assert [step for step, _, _ in saver.saved] == [3, 5, 6, 9] and saver.saved[-1][1]


def test_a_stop_at_the_last_step_is_an_end() -> None:
    session = mlp({"max_steps": 4})
    assert train(session, should_stop=lambda: session.state.step == 4)[1].kind == "done"


def break_steps(session: Session, bad: Collection[int], *, aux: bool = False) -> None:
    """Make the loss of these steps NaN, or their auxiliary loss alone infinite."""
    inner = session.trainable.loss

    def loss(module: Any, batch: Any) -> Any:
        out = inner(module, batch)
        if session.state.step + 1 not in bad:
            return out
        if aux:  # without a gradient
            return type(out)(loss=out.loss, aux=torch.full_like(out.loss.detach(), math.inf))
        return type(out)(loss=out.loss * math.nan)

    session.trainable.loss = loss


@pytest.mark.parametrize("log_every", [0, 50])
@pytest.mark.parametrize("bad", [range(14, 61), {14, 15, 16}], ids=["from 14 on", "exactly three"])
def test_failed_steps_are_noticed_two_steps_later_without_rows(log_every: int, bad: Collection[int]) -> None:
    session = mlp({"max_steps": 60, "log_every": log_every})
    break_steps(session, bad)
    rows, outcome = train(session)
    failed = 5 if 18 in bad else 3
    assert (outcome.kind, outcome.bad_steps, session.state.step) == ("rollback", failed, 18)
    more = " (the limit is 3; 2 more ran before it was noticed) (the loss was nan)" if 18 in bad else ""
    assert outcome.reason == f"{failed} steps in a row were not finite" + more
    assert rows.of("train", "step") == [1, 18], "the row that shows it"


@pytest.mark.parametrize("log_every", [0, 50])
def test_two_failed_steps_in_a_row_are_no_reason_to_roll_back_without_rows_either(log_every: int) -> None:
    session = mlp({"max_steps": 60, "log_every": log_every})
    break_steps(session, {step for step in range(2, 61) if step % 3})
    rows, outcome = train(session)
    assert outcome.kind == "done" and rows.of("train", "skipped_steps")[-1] == 39


def test_failed_steps_around_a_row_are_one_run() -> None:
    session = mlp({"max_steps": 60, "log_every": 20})
    break_steps(session, {19, 20, 21})
    _, outcome = train(session)
    assert (outcome.kind, outcome.bad_steps, session.state.step) == ("rollback", 3, 23)


def test_an_infinite_auxiliary_loss_alone_fails_the_step_and_is_named() -> None:
    session = mlp({"max_steps": 12, "log_every": 4})
    break_steps(session, {6, 7, 8}, aux=True)
    rows, outcome = train(session)
    assert (outcome.kind, session.state.step, outcome.bad_steps) == ("rollback", 8, 3)
    assert rows.events[-1] == {"kind": "nonfinite", "step": 8, "what": "the auxiliary loss was inf"}
    assert math.isfinite(rows.losses[-1])


def test_a_skip_that_only_lowers_the_loss_scale_is_no_failure() -> None:
    session = make_session(MLP, DATA, precision="fp16", loop={"global_batch_size": 16, "max_steps": 12, "log_every": 0})
    break_steps(session, {4, 5, 6, 7})
    rows, outcome = train(session)
    assert outcome.kind == "done" and rows.of("train", "skipped_steps")[-1] == 4


def test_the_times_of_a_row_are_those_of_all_its_steps() -> None:
    interval, fetching = LogInterval(), Fetching()
    fetching.seconds, fetching.cpu_s = 0.25, 0.125
    for step in range(2 * RECENT_STEPS):
        interval.add(1.0 if step < RECENT_STEPS else 3.0, fetching, waited_s=0.5, samples=2, tokens=4)
    assert (interval.steps, interval.step_s) == (2 * RECENT_STEPS, 4.0 * RECENT_STEPS)
    assert list(interval.recent_s) == [3.0] * RECENT_STEPS
    assert (interval.data_s, interval.data_cpu_s) == (0.5 * RECENT_STEPS, 0.25 * RECENT_STEPS)
    assert (interval.samples, interval.tokens) == (4 * RECENT_STEPS, 8 * RECENT_STEPS)


def test_steps_without_a_row_leave_nothing_behind_that_grows() -> None:
    session = mlp({"max_steps": RECENT_STEPS + 20, "log_every": 0})
    loop, sizes = session.loop(reporter=Rows(), should_stop=lambda: False), []
    inner = loop._requests

    def sized(step: int) -> list[int]:
        sizes.append(len(pickle.dumps([loop._interval, loop.clock, session.state])))
        return inner(step)

    loop._requests = sized
    loop.run(session.state)
    assert max(sizes[-20:-1]) - min(sizes[-20:-1]) <= 2, "a number may take a byte more"
    assert loop._interval.steps == 0 and sizes[RECENT_STEPS] > sizes[10], "the size can see it"


@pytest.mark.parametrize("log_every", [1, 4])
def test_three_bad_steps_in_a_row_ask_for_a_roll_back_and_two_do_not(log_every: int) -> None:
    def run(bad: set[int]) -> Any:
        session = mlp({"max_steps": 12, "log_every": log_every})
        break_steps(session, bad)
        return *train(session), session

    rows, outcome, session = run({2, 3, 6, 7, 11})
    assert outcome.kind == "done" and rows.of("train", "skipped_steps")[-1] == 5 == session.state.skipped_steps
    rows, outcome, session = run({6, 7, 8})
    assert (outcome.kind, session.state.step, outcome.bad_steps) == ("rollback", 8, 3)
    assert "3 steps in a row" in outcome.reason and "the loss was nan" in outcome.reason
    assert rows.events[-1] == {"kind": "nonfinite", "step": 8, "what": "the loss was nan"}


def test_skipped_steps_are_counted_over_all_attempts() -> None:
    session = mlp({"max_steps": 6})
    session.state.skipped_steps = 4  # as a checkpoint says
    inner = session.trainable.loss
    session.trainable.loss = lambda module, batch: type(out := inner(module, batch))(
        loss=out.loss * (math.inf if session.state.step == 2 else 1.0)
    )
    saver = Keeps(every=2)
    rows, _ = train(session, saver=saver)
    assert rows.of("train", "skipped_steps") == [4, 4, 5, 5, 5, 5]
    assert [state["skipped_steps"] for _, _, state in saver.saved] == [4, 5, 5]


def test_a_window_without_a_single_label_is_an_error_that_names_the_step_and_the_key() -> None:
    rows = token_rows(48, empty=range(48))
    session = make_session(GPT, {"train": rows, "eval_fraction": 0.0}, loop={"max_steps": 2})
    with pytest.raises(RunError, match=r"step 1: the 16 rows .* -100.*data\.source"):
        train(session)


def test_the_last_step_is_evaluated_only_once() -> None:
    session = make_session(
        MLP, {"train": class_rows(64), "eval": class_rows(8, seed=1)}, loop={"max_steps": 10, "eval_every": 5}
    )
    rows, _ = train(session)
    assert rows.of("eval", "step") == [5, 10]
    assert session.state.last_eval == {"step": 10, "loss": rows.of("eval", "loss")[-1]}
    again = session.loop(reporter=(more := Rows()), should_stop=lambda: False)
    assert again.run(session.state).kind == "done" and more.rows == []


def test_the_state_survives_json() -> None:
    session = mlp({"max_steps": 3})
    train(session)
    assert LoopState.from_json(json.loads(json.dumps(session.state.to_json()))) == session.state


def test_the_loop_says_what_it_does_besides_steps() -> None:
    """A line about a long evaluation or save reads it from another thread."""
    session = make_session(
        MLP, {"train": class_rows(64), "eval": class_rows(16)}, loop={"max_steps": 4, "eval_every": 2}
    )
    seen: list[tuple[str, str]] = []

    class Saves:
        def due(self, step: int) -> bool:
            return step == 2

        def save(self, state: LoopState, *, final: bool, only_best: bool = False) -> None:
            seen.append(("save", loop.activity))

    loop = session.loop(reporter=Rows(), should_stop=lambda: False, saver=Saves())
    evaluate, forward = loop.evaluate, session.step.forward
    assert evaluate is not None

    def evaluated(step: int) -> dict[str, Any]:
        seen.append(("eval", loop.activity))
        return evaluate(step)

    def stepped(batch: Any, **more: Any) -> Any:
        if session.trainable.module.training:
            seen.append(("step", loop.activity))
        return forward(batch, **more)

    loop.evaluate, session.step.forward = evaluated, stepped
    loop.run(session.state)
    assert set(seen) == {("step", ""), ("eval", "evaluating"), ("save", "saving a checkpoint")}
    assert loop.activity == ""
