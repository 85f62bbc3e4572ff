"""NCCL communicators as they are made and ended, on played process groups: in time, with our settings, one by one."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experts import transport as module
from experts.transport import (
    CONSTRUCTION,
    ERROR_HANDLING,
    Aborted,
    Channel,
    JointGroup,
    abort_groups,
    abort_nccl,
    exchange_pairs,
    gloo,
    nccl,
)
from raytrain.train.parallel.reduction import GPU_BUCKET_BYTES

CPU = torch.device("cpu")


class Played:
    """Stands in for `ProcessGroupNCCL`; `stuck` names the call that never returns."""

    made: list[Played]
    stuck: str
    happened: list[str]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.environ = options, dict(os.environ)
        self._size, self.devices, self.sent, self.open = size, list[torch.device](), list[int](), 0
        self.sums = list[tuple[torch.dtype, int]]()
        self.made.append(self)

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        assert not self.open, "this thread has an open group: the call would never begin"
        self.devices.append(tensors[0].device)
        self.sums.append((tensors[0].dtype, tensors[0].numel()))
        tensors[0].mul_(self._size)
        return SimpleNamespace(wait=lambda: self._meet("first call"))

    def broadcast(self, tensors: list[torch.Tensor], _options: Any) -> Any:
        return SimpleNamespace(wait=lambda: self._meet("broadcast"))

    def _start_coalescing(self) -> None:
        self.open += 1

    def recv(self, tensors: list[torch.Tensor], rank: int, _tag: int) -> None:
        if self.stuck == "failing receive":
            raise torch.OutOfMemoryError("CUDA out of memory")
        tensors[0].fill_(1)

    def send(self, _tensors: list[torch.Tensor], rank: int, _tag: int) -> None:
        self.sent.append(rank)

    def _end_coalescing(self) -> Any:
        self.open -= 1
        return SimpleNamespace(wait=lambda: self._meet("pairs"))

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
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    return Played


def opened(**more: Any) -> Any:
    given = {"device": CPU, "interface": None, "timeout_s": 9.0, "limit_s": 0.2, **more}
    size = given.pop("size", 1)
    return nccl(dist.HashStore(), "a", 0, size, **given)  # pyright: ignore[reportPrivateImportUsage]


def test_a_communicator_is_connected_and_used_in_the_meeting(played: type[Played]) -> None:
    group = opened(limit_s=20.0)
    assert played.happened == ["first call"]
    assert group.options.config.blocking == 0, "an abort could not end a call that waits for a peer"
    assert group.options._timeout.total_seconds() == 9.0


def test_the_pairs_that_exchange_rows_connect_in_the_meeting(played: type[Played]) -> None:
    """Two members connect with their first message, which would wait for a dead member without a limit later."""
    group = opened(limit_s=20.0, size=4, partners=[2, 3])
    assert group.sent == [2, 3] and played.happened == ["first call", "pairs"]


def test_a_group_for_collectives_runs_them_in_the_meeting(played: type[Played]) -> None:
    """The largest sum has more bytes than a bucket of gradients, whose first sum would otherwise connect them."""
    group = opened(limit_s=20.0, size=2, collectives=True)
    sizes = [size for dtype, size in group.sums if dtype == torch.float32]
    assert sizes == [1, 2**12, 2**18, 2**23] and 4 * sizes[-1] > GPU_BUCKET_BYTES
    assert {dtype for dtype, _ in group.sums} == {torch.float32, torch.float64}
    assert played.happened[-1] == "broadcast" and set(group.devices) == {CPU}


@pytest.mark.parametrize(
    ("rank", "holders", "partners"), [(0, [2, 3], [2, 3]), (2, [2, 3], [3, 0, 1]), (1, [0, 1, 2, 3], [2, 3, 0])]
)
def test_a_worker_exchanges_with_holders_only(
    monkeypatch: pytest.MonkeyPatch, rank: int, holders: list[int], partners: list[int]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("experts.transport.gloo", lambda *_given, **_more: None)
    monkeypatch.setattr("experts.transport.uses_nccl", lambda _device: True)
    monkeypatch.setattr("experts.transport.nccl", lambda *_given, **more: given.append(more["partners"]))
    JointGroup(None, name="a", rank=rank, size=4, workers=2, holders=holders, device=CPU)
    assert given == [partners, partners]


def test_a_gpu_without_an_index_is_the_current_one_of_the_thread_that_asks(
    played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator connects in a new thread, whose current device is the first."""
    chosen: list[int] = []
    asked: list[torch.device] = []
    ones, zeros, me = torch.ones, torch.zeros, threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.get_ident() == me else 0)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)

    def on_cpu(made: Any) -> Any:
        return lambda *size, device: asked.append(device) or made(*size)

    monkeypatch.setattr(torch, "ones", on_cpu(ones))
    monkeypatch.setattr(torch, "zeros", on_cpu(zeros))
    opened(limit_s=20.0, device=torch.device("cuda"))
    assert chosen == [3] and set(asked) == {torch.device("cuda", 3)}
    monkeypatch.setattr("experts.transport.gloo", lambda *_given, **_more: None)
    group = JointGroup(
        dist.HashStore(), name="b", rank=0, size=1, workers=1, holders=[0], device=torch.device("cuda")  # pyright: ignore
    )  # fmt: skip
    assert group.device == torch.device("cuda", 3), "everything else of this member is on that one too"


def test_a_failed_message_leaves_no_group_open(played: type[Played]) -> None:
    """NCCL counts open groups for each thread: every later call of the thread would wait for the end of this one."""
    group = opened(limit_s=20.0)
    played.stuck = "failing receive"
    rows = torch.zeros(2).split(1)
    with pytest.raises(torch.OutOfMemoryError):
        exchange_pairs(group, rows, rows, others=[1])
    assert not group.open
    group.allreduce([torch.ones(1)])


def test_memory_that_runs_out_in_an_exchange_is_no_loss_of_a_member(
    played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others must not wait for the rows: this member leaves."""
    monkeypatch.setattr("experts.transport.uses_nccl", lambda _device: True)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    group = JointGroup(store, name="a", rank=0, size=1, workers=1, holders=[0], device=CPU, interface="lo")
    group._others = [1]
    played.stuck, played.happened = "failing receive", []
    with pytest.raises(torch.OutOfMemoryError):
        group.exchange(torch.zeros(0, 1), [0, 0], [0, 2], channel=Channel.TO_HOLDERS)
    assert played.happened == ["abort", "abort"]
    with pytest.raises(Aborted, match="ran out of memory while it exchanged rows: CUDA out of memory"):
        group.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("device", "channel", "send", "into", "says"),
    [
        ("cpu", Channel.TO_HOLDERS, "meta", None, "'to holders' of this group carries tensors on cpu, got meta"),
        ("cpu", Channel.TO_HOLDERS, "cpu", "meta", "'to holders' of this group carries tensors on cpu, got meta"),
        ("cuda", Channel.TO_WORKERS, "cpu", None, "'to workers' of this group carries tensors on cuda, got cpu"),
        ("cuda", Channel.CONTROL, "meta", None, "'control' of this group carries tensors on cpu, got meta"),
    ],
)
def test_a_channel_refuses_tensors_of_another_device(
    monkeypatch: pytest.MonkeyPatch, device: str, channel: Channel, send: str, into: str | None, says: str
) -> None:
    """One member on the CPU and one on a GPU would wait for each other in two groups."""
    monkeypatch.setattr("experts.transport.gloo", lambda *_given, **_more: None)
    monkeypatch.setattr("experts.transport.nccl", lambda *_given, **_more: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = JointGroup(None, name="a", rank=0, size=2, workers=1, holders=[1], device=torch.device(device))
    received = None if into is None else torch.empty(0, 3, device=into)
    with pytest.raises(ValueError, match=says):
        group.exchange(torch.empty(0, 3, device=send), [0, 0], [0, 0], channel=channel, into=received)


@pytest.mark.parametrize("set_before", [None, "1"])
def test_no_watchdog_ends_the_process(
    played: type[Played], monkeypatch: pytest.MonkeyPatch, set_before: str | None
) -> None:
    """Ray sets 1 for the default group, which keeps it. Monitor and dump would end the process, or a later group."""
    names = [
        ERROR_HANDLING, "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    ]  # fmt: skip
    assert sorted(CONSTRUCTION) == sorted(names)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if set_before is not None:
            monkeypatch.setenv(name, set_before)
    environ = opened(limit_s=20.0).environ
    assert [environ.get(name) for name in names] == ["0"] * len(names)
    assert [os.environ.get(name) for name in names] == [set_before] * len(names)


def test_a_wait_for_a_connection_does_not_hold_up_an_abort_for_long(
    played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads this at the first use of a non-blocking communicator, after the constructor: it stays."""
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
    assert opened(limit_s=20.0).environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7", "the user's choice"
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    assert opened(limit_s=20.0).environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"


def test_nccl_uses_the_named_interface_and_no_other_that_begins_like_it(played: type[Played]) -> None:
    assert opened(limit_s=20.0, interface="eth1").environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_without_a_name_the_users_choice_stays(played: type[Played]) -> None:
    assert opened(limit_s=20.0).environ["NCCL_SOCKET_IFNAME"] == "before"


@pytest.mark.parametrize("stuck", ["first call", "pairs", "broadcast"])
def test_a_member_that_died_before_the_first_call_is_noticed_in_the_meeting(played: type[Played], stuck: str) -> None:
    played.stuck = stuck
    with pytest.raises(RuntimeError, match=r"communicator a was not connected: still waiting after 0\.2 s"):
        opened(size=2, partners=[1], collectives=True)
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
    monkeypatch.setattr("experts.transport._abort_gloo", lambda _group: played.happened.append("gloo's abort"))
    played.happened.clear()
    played.stuck = "abort"
    abort_groups([*groups[:2], control, groups[2]])
    assert played.happened == ["gloo's abort", "abort", "abort", "abort"]


def test_an_abort_that_fails_is_one_that_ended(played: type[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_group: Played) -> None:
        raise RuntimeError("ProcessGroup abort timed out")

    monkeypatch.setattr(played, "abort", fail)
    abort_nccl([opened(limit_s=20.0)])
