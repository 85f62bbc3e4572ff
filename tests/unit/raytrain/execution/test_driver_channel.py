"""The line between driver and rank 0, as a plain asyncio object."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.telemetry.processes import WORK
from raytrain.execution.driver_channel import RESTARTING, SETTING_UP, DriverChannel, open_channel, signs_of_life


def test_a_stop_request_ends_every_wait_and_persists() -> None:
    async def story() -> None:
        channel = DriverChannel()
        waits = [asyncio.create_task(channel.wait_for_stop()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
        await channel.report_progress({"phase": "training"})  # a long poll blocks nobody
        assert (await channel.progress())["phase"] == "training"
        await channel.request_stop()
        await asyncio.wait_for(asyncio.gather(*waits, channel.wait_for_stop()), 60)

    asyncio.run(story())


def test_progress_overrides_earlier_values() -> None:
    async def story() -> None:
        channel = DriverChannel()
        assert await channel.progress() == {"work": 0}
        await channel.report_progress({"phase": "training", "step": 0})
        await channel.report_progress({"row": {"step": 3}})
        await channel.report_progress({"row": {"step": 4}, "work": 0})
        assert await channel.progress() == {"phase": "training", "step": 0, "row": {"step": 4}, "work": 0}

    asyncio.run(story())


def test_messages_of_rank_zero_arrive_once_and_in_order_even_if_calls_overtake_each_other() -> None:
    async def story() -> None:
        channel = DriverChannel()
        assert await channel.printed_lines() == ""
        for number, line in ((0, "one\n"), (2, "three\n")):
            await channel.print_lines("a", number, line)
        assert await channel.printed_lines() == "one\n" and await channel.printed_lines() == ""
        await channel.print_lines("a", 1, "two\n")
        assert await channel.printed_lines() == "two\nthree\n" and await channel.printed_lines() == ""
        await channel.print_lines("b", 1, "a new attempt's second\n")
        assert await channel.printed_lines() == ""
        await channel.print_lines("b", 0, "a new attempt's first\n")
        assert await channel.printed_lines() == "a new attempt's first\na new attempt's second\n"

    asyncio.run(story())


def test_the_last_lines_of_an_attempt_arrive_even_if_another_has_started_or_one_was_lost() -> None:
    async def story() -> None:
        channel = DriverChannel()
        for number, line in ((0, "one\n"), (1, "two\n"), (3, "four\n")):  # it died, and its third call with it
            await channel.print_lines("a", number, line)
        await channel.print_lines("b", 0, "again\n")
        await channel.print_lines("b", 2, "the last\n")
        assert await channel.printed_lines() == "one\ntwo\nfour\nagain\n"
        await channel.print_lines("a", 2, "three, late\n")
        assert await channel.printed_lines() == "three, late\n", "late, but not lost"
        assert await channel.printed_lines(last=True) == "the last\n" and await channel.printed_lines(last=True) == ""

    asyncio.run(story())


def test_the_drivers_actors_live_on_the_drivers_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that reserves nothing may be placed on any node, and would die with it."""
    given: dict[str, Any] = {}

    def remote(_actor: Any) -> Any:
        def options(**more: Any) -> Any:
            given.update(more)
            return SimpleNamespace(remote=lambda: "the channel")

        return SimpleNamespace(options=options)

    node = "ab" * 28
    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: node))
    assert open_channel() == "the channel"
    pinned = given["scheduling_strategy"]
    assert (pinned.node_id, pinned.soft, given["num_cpus"]) == (node, False, 0)


def test_signs_of_life_last_until_a_worker_returns_or_the_workers_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, told, twice = DriverChannel(), list[str](), threading.Event()

    def remote(name: str) -> Any:
        def call(*given: Any) -> None:
            asyncio.run(getattr(channel, name)(*given))
            told.append(name)
            if told.count("sign_of_life") == 2:
                twice.set()

        return SimpleNamespace(remote=call)

    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
    monkeypatch.setattr("raytrain.execution.driver_channel.SIGN_EVERY_S", 0.001)
    actor = SimpleNamespace(sign_of_life=remote("sign_of_life"), leave=remote("leave"))
    WORK.add()
    with signs_of_life(actor, 3):
        assert twice.wait(60), "again and again"
        ((rank, (last, where)),) = asyncio.run(channel.last_signs()).items()
        assert (rank, where) == (3, f"on 10.0.0.1 (pid {os.getpid()})") and last > 0
        assert asyncio.run(channel.progress())["work"] == WORK.done > 0
    assert asyncio.run(channel.last_signs()) == {} and told[-1] == "leave"
    asyncio.run(channel.sign_of_life(0, "here"))
    asyncio.run(channel.report_progress({"phase": "training"}))
    assert len(asyncio.run(channel.last_signs())) == 1
    asyncio.run(channel.report_group(RESTARTING))
    assert asyncio.run(channel.last_signs()) == {}


def test_late_messages_of_a_failed_group_are_dropped_until_the_next_one_starts() -> None:
    """A survivor noticed the death after the controller: the driver must go on to say that the workers restart."""

    async def tell() -> None:
        channel = DriverChannel()
        await channel.report_group(SETTING_UP, nodes={0: "a"})
        shown = {"activity": "in step 3", "step": 2, "max_steps": 9, "row": {"loss": 1.0}}
        await channel.report_progress({"phase": "training", **shown})
        await channel.report_group(RESTARTING)
        await channel.report_progress({"phase": "recovering", "activity": "in step 4"})
        await channel.sign_of_life(0, "on a", 7)
        # neither the loss nor the length of the lost attempt, only the step that its rows of telemetry end with
        assert await channel.progress() == {"phase": RESTARTING, "step": 2, "nodes": {0: "a"}, "work": 0}
        assert await channel.last_signs() == {}, "it would be reported as silent"
        await channel.report_group(SETTING_UP, nodes={0: "b"})
        await channel.report_progress({"phase": "training"})
        await channel.sign_of_life(0, "on b", 3)
        await channel.sign_of_life(1, "on b", 4)
        assert await channel.progress() == {"phase": "training", "step": 2, "nodes": {0: "b"}, "work": 7}
        await channel.report_group(RESTARTING)
        assert (await channel.progress())["work"] == 0, "other processes follow"
        await channel.report_group(SETTING_UP, nodes={0: "b"})
        await channel.sign_of_life(0, "on b")
        assert [where for _, where in (await channel.last_signs()).values()] == ["on b"]

    asyncio.run(tell())


def test_workers_wait_for_what_the_driver_keeps_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: f"reference to {value}")

    async def story() -> None:
        channel = DriverChannel()
        job, data = (asyncio.create_task(channel.kept(name)) for name in ("job", "data"))
        await asyncio.sleep(0)
        await channel.keep("job", "J")
        await asyncio.sleep(0)
        assert await job == ["reference to J"] and not data.done()
        await channel.keep("data", "D")
        assert await data == ["reference to D"] and await channel.kept("job") == ["reference to J"]

    asyncio.run(story())


def test_what_ray_could_not_store_is_an_error_of_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: Any) -> None:
        raise MemoryError(f"no room for {value}")

    monkeypatch.setattr("ray.put", full)

    async def story() -> None:
        channel = DriverChannel()
        early = asyncio.create_task(channel.kept("job"))
        await asyncio.sleep(0)
        await channel.keep("job", "J")
        for wait in (early, channel.kept("job")):
            with pytest.raises(RuntimeError, match="could not store the job of this run: MemoryError: no room for J"):
                await wait

    asyncio.run(story())
