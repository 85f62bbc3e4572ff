"""Which expert host samples its node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raytrain.execution import driver_channel
from raytrain.execution.driver_channel import SETTING_UP, DriverChannel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(driver_channel.time, "monotonic", lambda: now[0])
    return now


def test_one_host_samples_a_node_without_workers_until_it_is_silent(clock: list[float]) -> None:
    channel = DriverChannel()

    def asked(node: str, host: str) -> dict[str, Any] | None:
        return asyncio.run(channel.samples_node(node, host, 5.0))

    assert asked("b", "one") is None, "where the workers are is not known yet"
    asyncio.run(channel.report_group(SETTING_UP, nodes={0: "a", 1: "a"}))
    assert asked("a", "one") is None, "a worker does"
    assert asked("b", "one") == {"step": 0} and asked("b", "two") is None and asked("c", "two") == {"step": 0}
    clock[0] += 5.0
    asyncio.run(channel.report_progress({"step": 7}))
    assert asked("b", "two") is None and asked("b", "one") == {"step": 7}
    clock[0] += 12.5
    assert asked("b", "two") == {"step": 7} and asked("b", "one") is None, "the first has been silent"
    asyncio.run(channel.report_group(SETTING_UP, nodes={0: "a", 1: "b"}))
    assert asked("b", "two") is None, "a worker came"
