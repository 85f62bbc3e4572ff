"""The actor of an expert host in this process: what its process keeps to, and how it leaves a generation."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.config import LayerShape
from experts.exchange import host_server as exchange
from experts.exchange.host_server import ExpertSetup, HostServer
from experts.hosts import host as module
from experts.hosts.host import ExpertHost, HostPlace, ProcessLimits
from experts.member import checkpoint
from experts.placement.policy import first_placement
from experts.transport import bytes_tensor
from raytrain.config.sections import OptimConfig
from raytrain.errors import StateLost
from raytrain.train.device import process_settings


@pytest.fixture
def deterministic() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_a_host_keeps_to_the_limits_of_the_run_from_its_start(
    monkeypatch: pytest.MonkeyPatch, deterministic: None
) -> None:
    """cuBLAS reads its workspace at the first product, which measures the host's speed before any set-up."""
    fractions: list[tuple[float, int]] = []
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)  # torch's own check of the device runs
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda share, index: fractions.append((share, index)), raising=False
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    limits = ProcessLimits(memory_fraction=0.8, memory_limit=300, deterministic=True)
    host = ExpertHost(threads=torch.get_num_threads(), device="cuda", directory=None, limits=limits)
    assert fractions == [(0.3, 0)] and host._memory_share == 0.3
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    place = HostPlace(host, {"memory_bytes": 1000, "memory_share": 0.3})
    assert place.spec(0, 1.0).memory_bytes == 300, "the placement counts on no more than the host may use"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_host_whose_thread_waits_for_the_device_after_an_abort_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """So that it is replaced; on a CPU nothing can wait like that, and it may be reading a checkpoint."""
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(ProcessLimits, "apply", lambda *_given: 1.0)
    host = ExpertHost(threads=torch.get_num_threads(), device=device, directory=None)
    waits = threading.Event()
    host._thread = threading.Thread(target=waits.wait, daemon=True)
    host._thread.start()
    if device == "cpu":
        threading.Timer(0.3, waits.set).start()
    host.abort(0, "a host died")
    assert exits == ([1] if device == "cuda" else [])
    waits.set()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_host_that_reads_a_large_checkpoint_leaves_at_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The others wait for it in the next generation, no longer than a minute; and no thread of it waits for a GPU."""
    monkeypatch.setattr(module, "LEAVE_S", 20.0)
    monkeypatch.setattr(os, "_exit", lambda _code: pytest.fail("nothing is wrong with this host"))
    monkeypatch.setattr(ProcessLimits, "apply", lambda *_given: 1.0)
    shapes, placement = [LayerShape(4, (8, 8), "gelu")], first_placement([2], hosts=1)
    reads, goes_on = threading.Event(), threading.Event()

    def read(_folder: str, _name: str) -> Any:
        reads.set()
        goes_on.wait()

    monkeypatch.setattr(checkpoint, "read_tensors_of", read)
    monkeypatch.setattr(checkpoint, "read_manifest", lambda _folder: {"experts": {"one": [[0, 0], [0, 1]]}})
    setup = ExpertSetup(shapes, OptimConfig(), torch.float32, "/nowhere", "step_1", process_settings())
    payload = bytes_tensor(setup.encode())
    group: Any = SimpleNamespace(size=2, holders=[1], abort=lambda _reason: None)
    monkeypatch.setattr(exchange, "from_first", lambda *_given, **_more: payload)
    server = HostServer(group, host=0, generation=1, placement=placement, device=torch.device("cpu"))
    ended: list[str] = []

    def serve() -> None:
        try:
            server._set_up(SimpleNamespace(width=len(payload)), [])  # type: ignore[arg-type]
        except StateLost as error:
            ended.append(str(error))

    host = ExpertHost(threads=torch.get_num_threads(), device=device, directory=None)
    host._group, host._server, host._thread = group, server, threading.Thread(target=serve, daemon=True)
    host._thread.start()
    assert reads.wait(20)
    host.abort(0, "another host died")
    assert ended == ["the generation ended while its experts were read from a checkpoint"]
    goes_on.set()


def test_an_abort_ends_its_own_generation_only_also_before_that_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from another thread: late, when the next generation runs, or early, while the group is being formed."""
    aborted, formed, forming = list[tuple[int, str]](), threading.Event(), threading.Event()

    class Server:
        def __init__(self, group: Any, **_given: Any) -> None:
            self.files, self.over = None, group.over

        def serve(self) -> None:
            assert self.over.wait(20)
            raise StateLost("over")

        def stop(self) -> None: ...

    def group_of(spec: Any, **_given: Any) -> Any:
        forming.set()
        assert formed.wait(20)
        over = threading.Event()

        def abort(reason: str) -> None:
            aborted.append((spec.number, reason))
            over.set()

        return SimpleNamespace(abort=abort, over=over, device=torch.device("cpu"))

    monkeypatch.setattr(module, "open_group", group_of)
    monkeypatch.setattr(module, "HostServer", Server)
    directory = SimpleNamespace(failed=SimpleNamespace(remote=lambda *_: None))
    host = ExpertHost(threads=torch.get_num_threads(), device="cpu", directory=directory)
    specs: list[Any] = [SimpleNamespace(number=number, workers=1, placement=None) for number in (1, 2)]
    host.join(specs[0], 0)
    assert forming.wait(20)
    leaving = threading.Thread(target=host.abort, args=(1, "early"), daemon=True)
    leaving.start()
    while not host._over:
        threading.Event().wait(0.01)
    formed.set()
    leaving.join(20)
    assert aborted == [(1, "early")] and not leaving.is_alive()
    host.join(specs[1], 0)
    while host._server is None:
        threading.Event().wait(0.01)
    host.abort(1, "late")
    assert len(aborted) == 1
    host.abort(2, "now")
    assert aborted[1:] == [(2, "now")]
