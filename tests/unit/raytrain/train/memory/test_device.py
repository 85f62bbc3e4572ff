from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.telemetry.process import process_memory
from raytrain.errors import OutOfMemory, RunError
from raytrain.train.memory.device import (
    is_out_of_memory,
    limit_device_memory,
    process_budget,
    processes_sharing,
)
from raytrain.train.parallel.collectives import Workers

CPU = torch.device("cpu")
MIB = 1 << 20


def test_errors_are_judged_by_type() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("anything"), device=CPU)
    assert is_out_of_memory(MemoryError(), device=CPU)
    assert is_out_of_memory(OutOfMemory("ours"), device=CPU)
    assert not is_out_of_memory(RunError("out of memory"), device=CPU)
    assert not is_out_of_memory(ValueError("out of memory"), device=CPU)


def test_a_plain_error_is_judged_by_numbers_and_never_by_its_message() -> None:
    used = process_memory().peak
    for text in ("out of memory", "mat1 and mat2 shapes cannot be multiplied"):
        assert is_out_of_memory(RuntimeError(text), device=CPU, budget=used)
        assert not is_out_of_memory(RuntimeError(text), device=CPU, budget=100 * used)
    assert not is_out_of_memory(RuntimeError("out of memory"), device=torch.device("cuda"), budget=used)


METER = """
import json, torch
from raytrain.train.memory.device import PeakMeter, exact_memory

MIB = 2**20
cpu = torch.device("cpu")
torch.ones(64 * MIB)  # 256 MiB, freed: a kept heap would hide what follows
with exact_memory(cpu):
    meter = PeakMeter(cpu)
    held = torch.ones(8 * MIB)  # 32 MiB
    with_it = meter.now() - meter.floor
    torch.ones(4 * MIB)
    peak = meter.peak() - meter.floor
    del held
    print(json.dumps([with_it / MIB, peak / MIB, (meter.now() - meter.floor) / MIB]))
"""


def test_a_meter_reads_floor_and_peak_regardless_of_freed_memory() -> None:
    """In a process of its own, as sizes are measured: in one that is old, what is freed last may stay in the heap."""
    root = Path(__file__).parents[5]
    done = subprocess.run([sys.executable, "-c", METER], capture_output=True, text=True, check=True, cwd=root)
    with_it, peak, afterwards = json.loads(done.stdout)
    assert with_it == pytest.approx(32, rel=0.1) and peak == pytest.approx(48, rel=0.1) and afterwards < 4


def test_a_budget_is_a_fraction_of_free_memory_and_at_most_the_limit() -> None:
    whole = process_budget(CPU, fraction=1.0, limit=None, processes=1)
    half = process_budget(CPU, fraction=0.5, limit=None, processes=1)
    assert whole is not None and half is not None
    assert half == pytest.approx(whole / 2, rel=0.2)  # other processes come and go
    assert process_budget(CPU, fraction=1.0, limit=MIB, processes=1) == MIB
    shared = process_budget(CPU, fraction=1.0, limit=None, processes=4)
    assert shared is not None and shared < whole
    assert limit_device_memory(CPU, fraction=0.9, limit=MIB) is None


class Told(Workers):
    """What three workers say of their places, the first of them this one."""

    def __init__(self, other: bytes) -> None:
        super().__init__()
        self._other = other

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload, self._other or payload, b'"another machine GPU-1"']


@pytest.mark.parametrize(("other", "sharing"), [(b"", 2), (b'"this machine GPU-2"', 1)])
def test_workers_with_one_gpu_between_them_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, other: bytes, sharing: int
) -> None:
    gpu, set_to = torch.device("cuda", 0), []
    about = SimpleNamespace(uuid="GPU-1", total_memory=1000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (800 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: set_to.append(share))
    assert processes_sharing(gpu, Told(other)) == sharing
    assert process_budget(gpu, fraction=0.5, limit=None, processes=sharing) == (400 // sharing + 50) * MIB
    assert limit_device_memory(gpu, fraction=0.8, limit=None, processes=sharing) == 0.8 / sharing
    assert limit_device_memory(gpu, fraction=0.8, limit=200 * MIB, processes=sharing) == 0.2
    assert set_to == [0.8 / sharing, 0.2]
    assert processes_sharing(CPU, Told(other)) == 1, "nobody says how many are on this node"


CHILD = """
import json, sys, torch
from raytrain.train.memory.device import address_space_limit, is_out_of_memory
cpu, found = torch.device("cpu"), {}
small = torch.ones(1024)
mapped = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
address_space_limit(mapped + int(sys.argv[1]))
kept = []
try:
    for number in range(1000):
        kept.append(torch.ones(4 * 2**20))
except Exception as error:
    found = {"type": type(error).__name__, "oom": is_out_of_memory(error, device=cpu), "mib": 16 * len(kept)}
kept.clear()
try:
    bytearray(2**40)
except MemoryError as error:
    found["python"] = is_out_of_memory(error, device=cpu)
found["goes_on"] = float(small.sum())
print(json.dumps(found))
"""


@pytest.mark.covers("MEM-09")
def test_more_than_an_address_space_limit_in_a_child_is_caught_as_out_of_memory() -> None:
    """The limit is that of a child; the value of `memory_fraction` on every worker: tests/numerics."""
    root = Path(__file__).parents[5]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(600 * MIB)], capture_output=True, text=True, check=True, cwd=root
    )
    found = json.loads(done.stdout)
    assert found["type"] == "RuntimeError" and found["oom"] is True and found["python"] is True
    assert 400 <= found["mib"] <= 600
    assert found["goes_on"] == 1024
