"""Warnings about memory: when they come, when they do not, and what they say."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cluster.telemetry.processes import RunProcesses
from cluster.telemetry.warnings import HIGH, LEAST_STEPS, WARM_UP_STEPS, MemoryWatch, TrendTest, growth

MIB = 1 << 20


def verdicts(level: Callable[[int], float], *, samples: int) -> list[int]:
    """The samples at which the test says that memory grows, one sample a second."""
    test = TrendTest()
    return [place for place in range(samples) if test.add(float(place), level(place)) is not None]


@pytest.mark.covers("MEM-08")
def test_a_steady_growth_is_found_and_noise_warm_up_and_steps_are_not() -> None:
    draw = random.Random(3)
    noise = [draw.gauss(0, 20 * MIB) for _ in range(5000)]
    found = verdicts(lambda place: 800 * MIB + 8 * MIB * place + noise[place], samples=100)
    assert found and found[0] <= 60
    assert verdicts(lambda place: 500 * MIB + 100 * MIB * place, samples=20) == [15], "a clear one after 16 samples"
    for seed in range(40):
        draw = random.Random(seed)
        assert not verdicts(lambda _, draw=draw: 800 * MIB + draw.gauss(0, 20 * MIB), samples=2000)
    for constant in (3, 10, 25, 60):
        rise = lambda place, constant=constant: 1000 * MIB * (1 - math.exp(-place / constant))  # noqa: E731
        assert constant > 20 or 15 not in verdicts(rise, samples=20), "few samples need a steadier growth"
        late = [place for place in verdicts(rise, samples=2000) if place > 2.3 * constant]
        assert not late, f"a warm-up with a time constant of {constant} samples is no leak"
    assert not verdicts(lambda place: (500 + 300 * (place > 40)) * MIB + noise[place] / 10, samples=500)
    assert not verdicts(lambda place: (500 + 100 * (place % 9 < 2)) * MIB, samples=500), "asynchronous saves"
    assert not verdicts(lambda place: 500 * MIB + 1000 * place, samples=500), "too little to matter"


def test_growth_is_measured_without_outliers() -> None:
    points = [(float(n), 500.0 * MIB + 4 * MIB * n + (900 * MIB if n == 30 else 0)) for n in range(60)]
    found = growth(points)
    assert found is not None and found.bytes_per_s == pytest.approx(4 * MIB, rel=0.02)
    assert found.seconds == 39.0 and growth(points[:13]) is None


SCRIPT = """
import sys
kept, size = [], int(sys.argv[1])
for line in sys.stdin:
    work = bytearray(b"x") * (30 << 20)
    kept.append(bytearray(b"x") * size)
    del work
    print(len(kept), flush=True)
"""


@pytest.mark.covers("MEM-08")
@pytest.mark.parametrize(("size", "leaks"), [(2 * MIB, True), (64, False)])
def test_a_real_process_that_keeps_memory_in_each_step_is_named_once_within_100_steps(size: int, leaks: bool) -> None:
    watch, found = MemoryWatch(), []
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    processes = RunProcesses(pid=child.pid)
    for step in range(1, 101):
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{step}\n"
        rows = [vars(one) for one in processes.sample() if one.pid == child.pid]
        found += [(step, one) for one in watch.look(row(step, processes=rows))]
    child.communicate()
    assert bool(found) == leaks
    if leaks:
        step, warning = found[0]
        assert WARM_UP_STEPS + LEAST_STEPS <= step <= 100 and warning.what == "memory_growth"
        assert warning.figures["bytes_per_step"] == pytest.approx(size, rel=0.15)
        assert f"(pid {child.pid}) on n grows" in warning.text and ".item()" in warning.text
        assert {one.key for _, one in found} == {f"growth n {child.pid}"}


def row(step: int, *, processes: list[dict[str, Any]] | None = None, used: float = 0.2, **more: Any) -> dict[str, Any]:
    """A row of a node with one device of 100 GiB, one second after the row of the step before."""
    total = 100 << 30
    figures = {"memory_total": total, "memory_used": int(used * total), "memory_run": 1, "memory_other": 2, **more}
    return {
        "node": "n", "time": float(step), "step": step, "attempt": 1, "processes": processes or [],
        "devices": [{"device": "cpu", "kind": "cpu", **figures}],
    }  # fmt: skip


def test_the_forecast_of_full_memory_is_of_all_processes_that_grow() -> None:
    """Two workers of a node fill its 80 GiB that are free twice as fast as one."""

    def forecast(*rates: int) -> list[str]:
        watch, found = MemoryWatch(), []
        for step in range(1, 101):
            own = [
                {"pid": pid, "name": "worker", "rss": 1, "anonymous": 1000 * MIB + rate * MIB * step}
                for pid, rate in enumerate(rates, 5)
            ]
            found += watch.look(row(step, processes=own))
        return list({one.key: one.text for one in reversed(found)}.values())  # the first of each cause

    (alone,) = forecast(8)
    assert "; at this rate memory is full in 3 h: look for" in alone
    one, other = forecast(8, 8)
    for text in (one, other):
        assert "; at this rate, with that of 1 other process, memory is full in 85 min: look for" in text
    (only,) = forecast(0, 8, 0)
    assert "worker (pid 6) on n" in only and "at this rate memory is full in 3 h" in only


def test_a_nearly_full_device_and_a_process_near_its_limit_are_named_with_their_figures() -> None:
    watch = MemoryWatch(limit=1000 * MIB)
    calm = {"pid": 5, "name": "worker", "rss": int(HIGH * 1000 * MIB), "anonymous": 10}
    assert watch.look(row(1, processes=[calm], used=HIGH)) == []
    full, near = watch.look(row(2, processes=[{**calm, "rss": 950 * MIB}], used=0.951, memory_run=40 << 30))
    assert full.text.startswith("cpu of n uses 95% of its 100 GiB of memory, 40 GiB of it by this run")
    assert "loop.micro_batch_size" in full.text and full.key == "high n cpu" and full.what == "high_memory"
    assert "worker (pid 5) on n uses 950 MiB, 95% of cluster.memory_limit (1000 MiB)" in near.text
    assert watch.look(row(3, used=0.96))[0].key == full.key, "the same cause has the same key"


GPUS = ("cuda:0", "cuda:1", "cuda:2")


def gpu_row(step: int, attempt: int, *runs: int) -> dict[str, Any]:
    """A row of a node with GPUs of 80 GiB, of which the run uses so many MiB each."""
    devices = [
        {"device": name, "kind": "cuda", "memory_total": 80 << 30, "memory_used": used * MIB,
         "memory_run": used * MIB, "memory_other": 0}
        for name, used in zip(GPUS, runs, strict=True)
    ]  # fmt: skip
    return {"node": "n", "time": float(step), "step": step, "attempt": attempt, "processes": [], "devices": devices}


@pytest.mark.parametrize("which", range(3))
def test_of_several_gpus_the_one_is_named_whose_memory_grows_until_it_is_full(which: int) -> None:
    watch, found = MemoryWatch(), []
    for step in range(1, 201):
        found += watch.look(gpu_row(step, 1, *(4000 + 380 * step * (gpu == which) for gpu in range(3))))
    assert {one.key for one in found} == {f"growth n {GPUS[which]}", f"high n {GPUS[which]}"}
    assert f"the memory of {GPUS[which]} on n grows by" in found[0].text, "before it is full"


def test_attempts_that_need_more_memory_each_are_no_growth() -> None:
    """An elastic run with fewer workers, or a run with a smaller number of shards; within each nothing grows."""
    watch, found = MemoryWatch(), []
    for attempt in range(30):
        for step in range(WARM_UP_STEPS + LEAST_STEPS + 3):
            found += watch.look(gpu_row(50 * attempt + step, attempt, 4000, 4000, 4000 + 500 * attempt))
    assert found == []
