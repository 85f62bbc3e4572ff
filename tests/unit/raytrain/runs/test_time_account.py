"""Where the time of a run went: every second has one purpose."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.runs.records import PURPOSES, account
from raytrain.train.state import Clock


def start(at: float, *, seen: float | None = None) -> dict[str, Any]:
    return {"kind": "driver_start", "time": at + 0.5, "process_start": at, "last_sign_of_life": seen}


def attempt(number: int, at: float) -> dict[str, Any]:
    return {"kind": "attempt", "attempt": number, "time": at}


def checkpoint(at: float, **seconds: float) -> dict[str, Any]:
    return {"kind": "checkpoint", "time": at, "seconds": seconds}


def done(at: float, **seconds: float) -> list[dict[str, Any]]:
    return [{"kind": "attempt_end", "time": at}, {"kind": "account", "time": at, "seconds": seconds}]


def fault(of: int, at: float) -> dict[str, Any]:
    return {"kind": "fault", "failed_attempt": of, "failed_at": at, "time": at + 3}


def end(at: float) -> dict[str, Any]:
    return {"kind": "driver_end", "time": at}


def check(events: list[dict[str, Any]], *, wall: float, now: float = 1e6, **seconds: float) -> None:
    made = account(events, now=now)
    assert made["wall_s"] == pytest.approx(wall)
    assert list(made["time"]) == list(PURPOSES) and sum(made["time"].values()) == pytest.approx(wall)
    assert {name: value for name, value in made["time"].items() if value} == pytest.approx(seconds)


def test_a_run_that_went_well() -> None:
    events = [start(100), attempt(1, 107), checkpoint(115, compute=6, save=1), *done(120, compute=9, eval=2, save=1.5)]
    check([*events, end(122)], wall=22, startup=7, compute=9, eval=2, save=1.5, other=2.5)


def test_writing_the_weights_is_a_purpose_of_its_own() -> None:
    events = [start(100), attempt(1, 107), *done(120, compute=9), {"kind": "exported", "time": 124, "seconds": 3.5}]
    check([*events, end(126)], wall=26, startup=7, compute=9, export=3.5, other=6.5)


def test_a_restart_within_a_command_loses_unsaved_steps() -> None:
    events = [
        start(0),
        attempt(1, 5),
        checkpoint(10, compute=4),
        attempt(2, 20),
        fault(1, 13),
        *done(30, compute=8),
        end(31),
    ]
    # saved until 10, failed at 13, going again at 20
    check(events, wall=31, startup=5, compute=12, lost=3, restart=7, other=4)


def prepared(at: float, seconds: float) -> dict[str, Any]:
    return {"kind": "preparation", "phase": "finished", "time": at, "seconds": seconds}


def test_attempts_that_fail_before_their_first_step_are_restarts() -> None:
    failing = [start(0), prepared(4, 1.0), fault(1, 5), prepared(9, 1.0), fault(2, 10), fault(3, 15)]
    check([*failing, end(20)], wall=20, startup=4, data=1, restart=13, other=2)
    went_on = [*failing, attempt(4, 21), *done(30, compute=8)]
    check([*went_on, end(31)], wall=31, startup=4, data=1, restart=16, compute=8, other=2)


def test_attempts_that_fail_before_their_first_step_after_one_that_trained_are_restarts() -> None:
    events = [start(0), attempt(1, 5), checkpoint(10, compute=5), fault(1, 12), fault(2, 20)]
    check([*events, end(25)], wall=25, startup=5, compute=5, lost=2, restart=11, other=2)


def test_the_time_in_which_a_worker_was_stuck_is_no_lost_work() -> None:
    stuck = {"kind": "hang_ended", "time": 39.0, "seconds": 25.0}
    events = [start(0), attempt(1, 5), checkpoint(12, compute=5), stuck, fault(1, 40), attempt(2, 45)]
    check([*events, *done(55, compute=9), end(55)], wall=55, startup=5, compute=14, lost=2, restart=31, other=3)


def test_a_restart_without_a_record_of_the_time_of_failure() -> None:
    events = [start(0), attempt(1, 5), checkpoint(10, compute=4), attempt(2, 20), *done(30, compute=8), end(30)]
    check(events, wall=30, startup=5, compute=12, restart=10, other=3)


def test_a_command_that_was_killed_ends_with_its_last_sign_of_life() -> None:
    killed = [start(0), attempt(1, 5), checkpoint(10, compute=4)]
    resumed = [start(1000, seen=16.0), attempt(2, 1006), *done(1020, compute=11), end(1021)]
    # 16 s of the first, 21 s of the second; what lies between is nobody's
    check([*killed, *resumed], wall=37, startup=11, compute=15, lost=6, other=5)
    check([start(0), attempt(1, 5), start(1000), end(1003)], wall=8, startup=8)


def test_a_command_that_still_runs_ends_now() -> None:
    check([start(0), attempt(1, 5), checkpoint(10, compute=4)], now=18, wall=18, startup=5, compute=4, lost=8, other=1)
    check([start(0)], now=4, wall=4, startup=4)


def test_clocks_that_overlap_take_from_the_largest() -> None:
    check([start(0), attempt(1, 5), *done(10, compute=9), end(10)], wall=10, startup=5, compute=5)


def test_nothing_happened() -> None:
    check([], wall=0)
    check([{"kind": "attempt", "time": 3.0, "attempt": 1}], wall=0)


def test_the_cost_of_a_rewind_within_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost is what came after the checkpoint that is in force again, the wait for whoever was gone included."""
    now = 100.0
    monkeypatch.setattr("raytrain.train.state.time.perf_counter", lambda: now)
    clock = Clock(4)
    for step in (5, 10):
        now += 20
        clock.add("compute", 15)
        clock.keep(step)
    now, compute = now + 7, 2
    clock.add("compute", compute)
    now += 3
    clock.rewind(5, restart_s=3)
    assert {name: value for name, value in clock.seconds.items() if value} == {"compute": 15, "restart": 3, "lost": 27}
    now += 1
    clock.rewind(2, restart_s=1)  # the checkpoint it began with is not there any more
    assert {name: value for name, value in clock.seconds.items() if value} == {"restart": 1, "lost": 50}
    with_all = {**clock.seconds, "compute": 1.0, "restart": 2.0, "lost": 4.0}
    check([start(0), attempt(1, 5), *done(30, **with_all), end(31)],
          wall=31, startup=5, compute=1, restart=2, lost=4, other=19)  # fmt: skip
