"""NCCL communicators as they are made and ended, on played process groups: in time, with our settings, one by one."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experts.transport import nccl as module
from experts.transport.nccl import ERROR_HANDLING, abort_nccl, nccl
from experts.transport.process_group import abort_groups, gloo

CPU = torch.device("cpu")


class Played:
    """Stands in for `ProcessGroupNCCL`; `stuck` names the call that never returns."""

    made: list[Played]
    stuck: str
    happened: list[str]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.error_handling = options, os.environ.get(ERROR_HANDLING)
        self.interface = os.environ.get("NCCL_SOCKET_IFNAME")
        self.made.append(self)

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def size(self) -> int:
        return 1

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._meet("connect")

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(wait=lambda: self._meet("first call"))

    def abort(self) -> None:
        self._meet("abort")

    def _meet(self, point: str) -> None:
        self.happened.append(point)
        if self.stuck == point:
            threading.Event().wait()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[Played]:
    Played.made, Played.stuck, Played.happened = [], "", []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Played, raising=False)
    monkeypatch.setattr(module, "ABORT_S", 0.2)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    return Played


def opened(**more: Any) -> Any:
    given = {"device": CPU, "interface": None, "timeout_s": 9.0, "limit_s": 0.2, **more}
    return nccl(dist.HashStore(), "a", 0, 1, **given)  # pyright: ignore[reportPrivateImportUsage]


def test_a_communicator_is_connected_and_used_in_the_meeting(played: type[Played]) -> None:
    group = opened(limit_s=20.0)
    assert played.happened == ["connect", "first call"]
    assert group.options.config.blocking == 0, "an abort could not end a call that waits for a peer"
    assert group.options._timeout.total_seconds() == 9.0


@pytest.mark.parametrize("set_by_ray", [None, "1"])
def test_no_watchdog_ends_the_process(
    played: type[Played], monkeypatch: pytest.MonkeyPatch, set_by_ray: str | None
) -> None:
    """Ray sets 1 for the default group, which keeps it."""
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if set_by_ray is not None:
        monkeypatch.setenv(ERROR_HANDLING, set_by_ray)
    assert opened(limit_s=20.0).error_handling == "0"
    assert os.environ.get(ERROR_HANDLING) == set_by_ray


def test_nccl_uses_the_named_interface_and_no_other_that_begins_like_it(played: type[Played]) -> None:
    assert opened(limit_s=20.0, interface="eth1").interface == "=eth1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_without_a_name_the_users_choice_stays(played: type[Played]) -> None:
    assert opened(limit_s=20.0).interface == "before"


@pytest.mark.parametrize("stuck", ["connect", "first call"])
def test_a_member_that_died_before_the_first_call_is_noticed_in_the_meeting(played: type[Played], stuck: str) -> None:
    played.stuck = stuck
    with pytest.raises(RuntimeError, match=r"communicator a was not connected: still waiting after 0\.2 s"):
        opened()
    assert played.happened[-1] == "abort"


def test_the_end_of_the_generation_ends_the_wait(played: type[Played]) -> None:
    played.stuck = "first call"
    with pytest.raises(RuntimeError, match="the generation is over"):
        opened(limit_s=60.0, lost=lambda: "a host died" if "first call" in played.happened else None)


def test_an_abort_that_hangs_holds_up_no_other_and_gloo_comes_first(
    played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [opened(limit_s=20.0) for _ in range(3)]
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    control = gloo(store, "control", 0, 1, interface="lo", timeout_s=5.0)
    monkeypatch.setattr(
        "experts.transport.process_group._abort_gloo", lambda _group: played.happened.append("gloo's abort")
    )
    played.happened.clear()
    played.stuck = "abort"
    abort_groups([*groups[:2], control, groups[2]])
    assert played.happened == ["gloo's abort", "abort", "abort", "abort"]


def test_an_abort_that_fails_is_one_that_ended(played: type[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_group: Played) -> None:
        raise RuntimeError("ProcessGroup abort timed out")

    monkeypatch.setattr(played, "abort", fail)
    abort_nccl([opened(limit_s=20.0)])
