"""Members that do not meet: bounded, and named."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from experts.hosts import generation
from experts.hosts.generation import GenerationWatch, connect, open_group
from raytrain.errors import RunError, StateLost


@pytest.fixture
def address() -> Any:
    """A store, on loopback."""
    store, address = generation.open_store("127.0.0.1")
    yield address
    del store


def told(address: tuple[str, int]) -> dict[str, Any]:
    return {
        "generation": 1, "workers": 2, "hosts": 2, "address": address, "interface": "lo", "device": "cpu",
    }  # fmt: skip


def test_a_store_that_nobody_serves_is_named_with_its_address_and_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RunError, match=rf"expert host 1 cannot reach.*127\.0\.0\.1:{port} within 1 s.*cluster\.interf"):
        connect(("127.0.0.1", port), who="expert host 1", limit=1.0)


def test_whoever_does_not_come_is_named(address: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "RENDEZVOUS_S", 0.3)
    with pytest.raises(RunError, match=r"worker 1, expert host 0, expert host 1 did not come.*cluster\.interface"):
        open_group(told(address), rank=0)


def test_who_waits_for_the_others_hears_of_the_end(address: Any) -> None:
    over = threading.Event()
    lost = GenerationWatch(lambda: "expert host 1 died" if over.wait(30) else "")
    threading.Timer(0.2, over.set).start()
    with pytest.raises(StateLost, match="expert host 1 died"):
        open_group(told(address), rank=0, lost=lost.reason)


def test_a_group_that_comes_after_the_end_is_ended_at_once() -> None:
    ended: list[str] = []

    class Group:
        def abort(self, reason: str) -> None:
            ended.append(reason)

    lost = GenerationWatch(lambda: "over")
    while lost.reason() is None:
        pass
    lost.ends(Group())
    assert ended == ["over"]
