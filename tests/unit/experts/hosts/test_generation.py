"""Members that cannot connect: the wait is bounded, and the error names them."""

from __future__ import annotations

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.hosts import generation
from experts.hosts.generation import GenerationSpec, GenerationWatch, connect, open_group
from experts.placement.policy import first_placement
from experts.transport import abort_groups, gloo
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

    watch = GenerationWatch(lambda: "over")
    while watch.reason() is None:
        pass
    watch.abort_at_end([], ended.append)
    assert ended == ["over"]


@pytest.mark.parametrize(
    ("other", "hip", "environ", "through_host", "refused"),
    [
        (("boot-a", "0000:17:00"), None, "", False, True),
        (("boot-a", "0000:17:00"), None, "", True, False),
        (("boot-a", "0000:31:00"), None, "", False, False),
        (("boot-b", "0000:17:00"), None, "", False, False),
        (("boot-a", "0000:17:00"), None, "1", False, False),
        (("boot-a", "0000:17:00"), "6.4", "", False, False),
    ],
)
def test_members_on_parts_of_one_gpu_are_refused_by_name(
    address: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: tuple[str, str], hip: str | None,
    environ: str, through_host: bool, refused: bool,
) -> None:  # fmt: skip
    """As Ray gives two MIG devices of one GPU to a worker and to a host: each sees its own as cuda:0."""
    (tmp_path / "boot_id").write_text("boot-a\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(generation, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(generation, "JointGroup", lambda *_given, **more: (more["device"], more["through_host"]))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", environ or "0")
    two = replace(spec(address), workers=1, hosts=1, device="cuda", through_host=through_host)
    store = connect(address, who="expert host 0", limit=5.0)
    store.set("generation-1/place/1", json.dumps({"node": "b", "machine": other[0], "gpu": other[1]}))
    if refused:
        with pytest.raises(RunError, match=r"worker 0 and expert host 0 use the same GPU 0000:17:00 of b.*MIG"):
            open_group(two, rank=0)
    else:
        assert open_group(two, rank=0) == (torch.device("cuda", 0), through_host)


@pytest.mark.parametrize("through_host", [True, False])
def test_workers_that_share_a_gpu_sum_gradients_over_gloo(monkeypatch: pytest.MonkeyPatch, through_host: bool) -> None:
    """gloo copies tensors of a GPU to the host by itself; NCCL would refuse two ranks on one."""
    for name in ("connect", "gloo", "nccl"):
        monkeypatch.setattr(generation, name, lambda *_given, name=name, **_more: name)
    two = replace(spec(("127.0.0.1", 1)), device="cuda", through_host=through_host)
    found = generation._workers_groups(two, rank=0, device=torch.device("cuda", 0), lost=lambda: None)
    assert found == (("gloo" if through_host else "nccl"), "gloo")


def test_a_member_joins_over_the_interface_of_its_rays_address(address: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo takes the variable where no interface is configured."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    monkeypatch.setattr(generation.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(generation.ray.util, "get_node_ip_address", lambda: "127.0.0.9")
    alone = replace(spec(address), workers=1, hosts=0, interface=None)
    open_group(alone, rank=0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    with pytest.raises(RunError, match="cannot connect with all others over the default interface"):
        open_group(replace(alone, number=2), rank=0)


@pytest.mark.parametrize("gone", [1, 2])
def test_an_abort_ends_a_wait_for_a_living_member_after_another_has_gone(address: Any, gone: int) -> None:
    """Whichever of the others has gone: the connection to it is closed already."""

    def opened(rank: int) -> Any:
        store = connect(address, who="a member", limit=30.0)
        return gloo(store, "trio", rank, 3, interface="lo", timeout_s=120.0)

    with ThreadPoolExecutor(3) as pool:
        zero, *others = pool.map(opened, range(3))
        abort_groups([others[gone - 1]])
        with pytest.raises(RuntimeError):
            zero.recv([torch.empty(1)], gone, 0).wait(timedelta(seconds=60))
        waiting = zero.recv([torch.empty(1)], 3 - gone, 0)
        ended = pool.submit(waiting.wait, timedelta(seconds=60))
        abort_groups([zero])
        with pytest.raises(RuntimeError, match="pair closure"):
            ended.result(timeout=30)
