"""A host's data plane in this process, on a played group: what it waits for, and memory that runs out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.exchange import host_server as module
from experts.exchange.host_server import SENDS, HostServer
from experts.placement.values import LayerPlacement, Placement
from experts.transport import Op
from raytrain.train.memory.device import Shortage

GPU = torch.device("cuda", 0)


class PlayedGroup:
    """One worker and one host; every exchange is an entry in `happened`, and so is the wait for it."""

    size, holders = 2, (1,)

    def __init__(self, happened: list[str]) -> None:
        self.happened, self.begun = happened, 0

    def exchange(self, *_given: Any, into: Any = None, **_more: Any) -> Any:
        self.begun += 1
        number = self.begun
        self.happened.append(f"begin {number}")
        return SimpleNamespace(wait=lambda: (self.happened.append(f"wait {number}"), into)[1])


def server(happened: list[str], device: torch.device) -> Any:
    placement = Placement(1, 1, (LayerPlacement(((0,), (0,)), ((1.0,), (1.0,))),))
    made: Any = HostServer(PlayedGroup(happened), host=0, generation=1, placement=placement, device=device)  # pyright: ignore
    made._active_workers = SimpleNamespace(dropped=False)
    return made


@pytest.mark.parametrize("device", [torch.device("cpu"), GPU])
def test_on_a_gpu_sends_stay_under_way_until_the_vote(device: torch.device) -> None:
    """`wait` makes the stream of the next products wait; gloo's sends are waited for at once."""
    happened: list[str] = []
    host = server(happened, device)
    ops = [Op.FORWARD, Op.FORWARD, Op.BACKWARD, Op.BACKWARD, Op.VOTE, Op.END]
    host._active_workers.receive = lambda *_given, **_more: (SimpleNamespace(op=ops.pop(0)), [])
    host._operations = dict.fromkeys(
        (Op.FORWARD, Op.BACKWARD), lambda _header, _counts: host._send(torch.zeros(0, 1), [[]])
    ) | {Op.VOTE: lambda _header, _counts: happened.append("vote")}
    host.serve()
    assert SENDS == 2
    if device == GPU:
        assert happened == [
            "begin 1", "begin 2", "begin 3", "wait 1", "begin 4", "wait 2", "wait 3", "wait 4", "vote"
        ]  # fmt: skip
    else:
        assert happened[:4] == ["begin 1", "wait 1", "begin 2", "wait 2"] and happened[-2:] == ["wait 4", "vote"]


def test_memory_released_for_rows_is_given_back_before_the_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    host = server(happened, GPU)
    host._commit = SimpleNamespace(shard=SimpleNamespace(ran_out=lambda _shortage: happened.append("release")))
    empty = torch.empty
    monkeypatch.setattr(module, "run_or_shortage", lambda *_given, **_more: Shortage("expert host 0", "out"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty cache"))
    monkeypatch.setattr(torch, "empty", lambda size, **_more: (happened.append("allocate"), empty(size))[1])
    host._receive(SimpleNamespace(width=1, dtype=0), [[2]])
    assert happened == ["release", "empty cache", "allocate", "begin 1", "wait 1"]
