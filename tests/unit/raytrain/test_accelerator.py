"""A kind of accelerator that torch drives by a module needs no line of ours: `xpu`, with a stand-in for `torch.xpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain.accelerator import device_bytes, device_name, make_current, on_gpu, seconds_of, worker_device
from raytrain.errors import DevicePlacementError
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.memory.device import PeakMeter, limit_device_memory, memory_in_use, process_budget, room_on

MIB = 2**20


class Xpus:
    """Two devices of 1,000 MiB, of which each process has reserved 100; `calls` has what was asked of which device."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.generator = torch.arange(16, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_name(self, device: torch.device) -> str:
        return f"Arc {device.index}"

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=1000 * MIB)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 800 * MIB, 1000 * MIB

    def memory_reserved(self, device: torch.device) -> int:
        return 100 * MIB

    def max_memory_reserved(self, device: torch.device) -> int:
        return 300 * MIB

    def memory_allocated(self, device: torch.device) -> int:
        return 60 * MIB

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return 0.75

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generator.clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generator = state

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@pytest.fixture
def xpus(monkeypatch: pytest.MonkeyPatch) -> Xpus:
    found = Xpus()
    monkeypatch.setattr(torch, "xpu", found)
    return found


def test_workers_get_the_devices_of_another_kind(xpus: Xpus) -> None:
    devices = [worker_device("xpu", local_rank=rank) for rank in (0, 1)]
    assert devices == [torch.device("xpu", 0), torch.device("xpu", 1)] and all(map(on_gpu, devices))
    assert xpus.calls == [("set_device", device) for device in devices]
    assert device_name(devices[1]) == "Arc 1" and device_bytes(devices[1]) == 1000 * MIB
    xpus.device_count = lambda: 0
    with pytest.raises(DevicePlacementError, match="sees none"):
        worker_device("xpu", local_rank=0)


def test_clock_and_current_device_are_those_of_its_module_and_a_cpu_asks_nobody(xpus: Xpus) -> None:
    device = torch.device("xpu", 1)
    assert seconds_of(device) <= seconds_of(device)
    make_current(device)
    assert xpus.calls == [("synchronize", device)] * 2 + [("set_device", device)]
    for other in (torch.device("cpu"), torch.device("meta")):
        assert not on_gpu(other)
        make_current(other)
        seconds_of(other)
    assert len(xpus.calls) == 3 and device_name(torch.device("cpu")) == "cpu"


def test_memory_is_measured_and_limited_by_its_allocator(xpus: Xpus) -> None:
    device = torch.device("xpu", 0)
    meter = PeakMeter(device)
    assert xpus.calls == [("empty_cache",), ("reset_peak_memory_stats", device)]
    assert (meter.floor, meter.peak()) == (100 * MIB, 300 * MIB)
    assert memory_in_use(device) == {"memory_allocated_bytes": 60 * MIB, "memory_reserved_bytes": 100 * MIB}
    assert process_budget(device, fraction=0.5, limit=None, processes=2) == 250 * MIB, "half of (800 / 2 + 100)"
    assert limit_device_memory(device, fraction=0.8, limit=200 * MIB, processes=2) == 0.2
    assert xpus.calls[-1] == ("set_per_process_memory_fraction", 0.2, device)
    assert room_on(device) == (750 - 100 - 512) * MIB, "what the allocator may take, less what libraries take"


def test_its_generator_is_part_of_the_state_of_a_worker(xpus: Xpus) -> None:
    device = torch.device("xpu", 0)
    state = rng_state(device)
    xpus.generator = torch.zeros(16, dtype=torch.uint8)
    set_rng_state(state, device)
    assert torch.equal(xpus.generator, torch.arange(16, dtype=torch.uint8))
    assert "xpu" in state and "xpu" not in rng_state(torch.device("cpu"))
