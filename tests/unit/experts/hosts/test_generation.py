"""Members that cannot connect: the wait is bounded, and the error names them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from experts.hosts import generation
from experts.hosts.generation import GenerationSpec, GenerationWatch, connect, open_group
from experts.placement.starting import first_placement
from raytrain.errors import RunError, StateLost


@pytest.fixture
def address() -> Any:
    """A store, on loopback."""
    store, address = generation.open_store("127.0.0.1")
    yield address
    del store


def spec(address: tuple[str, int]) -> GenerationSpec:
    return GenerationSpec(1, 2, 2, address, "lo", "cpu", first_placement([4], hosts=2))


def test_an_unreachable_store_is_reported_with_its_address_and_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RunError, match=rf"expert host 1 cannot reach.*127\.0\.0\.1:{port} within 1 s.*cluster\.interf"):
        connect(("127.0.0.1", port), who="expert host 1", limit=1.0)


def test_members_that_do_not_join_are_named(address: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "RENDEZVOUS_S", 0.3)
    with pytest.raises(RunError, match=r"worker 1, expert host 0, expert host 1 did not join.*cluster\.interface"):
        open_group(spec(address), rank=0)


def test_a_member_that_waits_for_the_others_learns_of_the_end(address: Any) -> None:
    over = threading.Event()
    watch = GenerationWatch(lambda: "expert host 1 died" if over.wait(30) else "")
    threading.Timer(0.2, over.set).start()
    with pytest.raises(StateLost, match="expert host 1 died"):
        open_group(spec(address), rank=0, lost=watch.reason)


def test_a_group_opened_after_the_end_is_aborted_at_once() -> None:
    ended: list[str] = []

    class Group:
        groups: list[Any] = []  # noqa: RUF012

        def mark(self, reason: str) -> None:
            ended.append(reason)

    watch = GenerationWatch(lambda: "over")
    while watch.reason() is None:
        pass
    watch.abort_at_end(Group())
    assert ended == ["over"]
