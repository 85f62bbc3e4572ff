"""Ray itself is lost: the driver takes the next attempt, within the rules of a lost worker."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jobs.driver import attempts as module
from jobs.driver.attempts import RunAttempts, next_attempt
from jobs.driver.run_folder import OpenRun
from raytrain.config.sections import RetryConfig
from raytrain.errors import ClusterLost, ResourcesTaken, RunError, WorkersChange
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.recovery import take_attempt_number
from raytrain.plan.choice import Resolved
from raytrain.runs.faults import Fault, read_faults, write_fault
from raytrain.runs.folder import RunFolder, this_process

LOST = ClusterLost("Ray's process raylet died")


@dataclass
class Command:
    """A run folder and the driver that owns it."""

    run: RunFolder
    opened: OpenRun = field(init=False)

    def __post_init__(self) -> None:
        attempt = self.run.next_attempt(this_process())
        self.opened = OpenRun(self.run, plan=None, attempt=attempt, claimed=attempt)  # type: ignore[arg-type]

    def loses(self, error: ClusterLost | ResourcesTaken = LOST, *, limit: int = 3) -> int:
        """The number of the next attempt."""
        retry = RetryConfig(restarts_without_progress=limit)
        self.opened = next_attempt(self.opened, error, retry=retry, fallback=True)
        return self.opened.claimed

    def starts(self, step: int) -> int:
        """Rank 0 of the next attempt starts at a step; returns its number."""
        number = take_attempt_number(self.job(), self.run, faults=read_faults(self.run, since=self.opened.attempt))
        self.run.append_event({"kind": "attempt", "attempt": number, "from_step": step})
        return number

    def job(self) -> Any:
        opened = self.opened
        return SimpleNamespace(first_attempt=opened.attempt, claimed_attempt=opened.claimed, owner=this_process())

    def saves(self, step: int) -> None:
        self.run.write_bytes(f"checkpoints/step_{step:08d}/COMPLETE", b"")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(RunFolder.create(str(tmp_path), "a"))


def test_the_workers_of_a_new_connection_take_the_number_that_the_driver_took(command: Command) -> None:
    assert command.starts(0) == 1
    assert command.loses() == 2
    assert command.starts(0) == 2, "no number is left out"
    (fault,) = read_faults(command.run, since=1)
    assert (fault.error, fault.rank, fault.attempt, fault.message) == ("ClusterLost", None, 1, str(LOST))
    write_fault(command.run, Fault(2, 1, 5, "WorkerDied", "lost", "", "", False, False, 0, 0.0))
    assert command.starts(0) == 3, "and after a restart by Ray the next one"


def test_losses_without_progress_end_the_run(command: Command) -> None:
    for number in (1, 2):
        assert command.starts(0) == number
        assert command.loses(limit=3) == number + 1
    assert command.starts(0) == 3
    with pytest.raises(
        RunError, match=r"3 attempts ended without progress.*; the last fault was ClusterLost: Ray's process"
    ):
        command.loses(limit=3)


def test_losses_with_progress_do_not(command: Command) -> None:
    for number in range(1, 7):
        assert command.starts(10 * (number - 1)) == number
        command.saves(10 * number)
        assert command.loses(limit=1) == number + 1


def test_a_ray_that_dies_before_the_workers_start_is_counted_too(command: Command) -> None:
    assert [command.loses(limit=3), command.loses(limit=3)] == [2, 3]
    with pytest.raises(RunError, match="3 attempts ended without progress"):
        command.loses(limit=3)


def test_waiting_for_room_is_no_failure(command: Command) -> None:
    assert [command.loses(ResourcesTaken("no room"), limit=0) for _ in range(5)] == [2, 3, 4, 5, 6]
    assert read_faults(command.run, since=1) == []


def test_a_run_that_another_command_took_over_is_left_alone(command: Command) -> None:
    command.run.next_attempt({**this_process(), "pid": 1})
    with pytest.raises(RunError, match="another command has taken over"):
        command.loses()
    assert read_faults(command.run, since=1) == [] and command.run.current_attempt() == 2


def test_an_elastic_run_goes_on_with_the_number_of_the_change_and_keeps_it_when_ray_is_lost(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grown, then a Ray that dies, then shrunk: each connection has the plan of the change before it."""
    ends = [WorkersChange(5, "room"), LOST, WorkersChange(3, "less"), AttemptResult("done", "9 steps", steps=9)]
    ran: list[tuple[int, Any]] = []

    def fit_watched(_spec: Any, opened: OpenRun, *_: Any, **__: Any) -> AttemptResult:
        ran.append((opened.claimed, opened.plan))
        end = ends[len(ran) - 1]
        if isinstance(end, Exception):
            raise end
        return end

    def change_workers(opened: OpenRun, _inventory: Any, workers: Resolved) -> OpenRun:
        return replace(opened, plan=f"{workers.value} workers ({workers.reason})")  # type: ignore[arg-type]

    spec: Any = SimpleNamespace(
        retry=RetryConfig(), precision=SimpleNamespace(fallback=True), cluster=SimpleNamespace(address="10.0.0.1:6379")
    )
    planner: Any = SimpleNamespace(
        spec=spec, open=lambda *_, **__: command.opened, change_workers=change_workers, phases=None,
        checked=SimpleNamespace(handed=None), console=Console(quiet=True), verbose=False,
    )  # fmt: skip
    monkeypatch.setattr(module, "connected", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(local=False)))
    monkeypatch.setattr(module, "cluster_size", lambda _: (1, 0, 1))
    for name in ("inventory_from_ray", "dashboard_url"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr("jobs.driver.watch.fit_watched", fit_watched)
    signals: Any = SimpleNamespace(install=lambda: None, training=True)
    attempts = RunAttempts(planner, signals)
    attempts.run()
    assert attempts.result.steps == 9 and not signals.training
    assert ran == [(1, None), (2, "5 workers (room)"), (3, "5 workers (room)"), (4, "3 workers (less)")]
    assert [fault.error for fault in read_faults(command.run, since=1)] == ["ClusterLost"], "a change is no fault"
