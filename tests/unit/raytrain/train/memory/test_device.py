from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.telemetry.processes import process_memory
from raytrain.accelerator import device_memory
from raytrain.errors import CollectiveFailed, OutOfMemory, RunError
from raytrain.execution.worker import fault_of
from raytrain.train.memory.device import (
    Shortage,
    is_out_of_memory,
    limit_device_memory,
    process_budget,
    processes_sharing,
    room_on,
    run_or_shortage,
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


GPU = torch.device("cuda", 0)
GIB = 1 << 30
BLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
LIBRARIES = {
    "cublas": RuntimeError(BLAS),
    "cublas_alloc": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "hipblas": RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cudnn_engine": RuntimeError("GET was unable to find an engine to execute this computation"),
    "miopen": RuntimeError("miopenStatusUnknownError"),
    "nccl": torch.distributed.DistBackendError("NCCL error in: ... unhandled cuda error\nCuda failure 2"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}
OTHERS = {
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    "allocator's words": RuntimeError("out of memory"),
    "cublas argument": RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
    "cudnn shape": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."),
    "a lost peer": torch.distributed.DistBackendError("NCCL error in: ... ncclRemoteError: a peer has closed"),
    "shared memory": ValueError("Triton Error [CUDA]: out of memory"),
}


def gpu_with(monkeypatch: pytest.MonkeyPatch, free: int, *, total: int = 80 * GIB, integrated: bool = False) -> None:
    """Make CUDA report this free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(is_integrated=int(integrated))
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_librarys_error_counts_where_little_memory_is_free_and_only_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gpu_with(monkeypatch, 100 * MIB)
    assert is_out_of_memory(LIBRARIES[name], device=GPU)
    assert isinstance(run_or_shortage(partial(raising, LIBRARIES[name]), device=GPU, who="rank 0"), Shortage)
    gpu_with(monkeypatch, 10 * GIB)
    assert not is_out_of_memory(LIBRARIES[name], device=GPU)
    assert not is_out_of_memory(LIBRARIES[name], device=None)


@pytest.mark.parametrize("name", OTHERS)
def test_another_error_does_not_count_however_little_memory_is_free(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpu_with(monkeypatch, 0)
    assert not is_out_of_memory(OTHERS[name], device=GPU)


def raising(error: BaseException) -> None:
    raise error


def accelerator_error(code: int) -> torch.AcceleratorError:
    """As torch raises it: the code of the CUDA runtime is an attribute."""
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # pyright: ignore[reportAttributeAccessIssue]
    return error


def test_an_error_of_the_cuda_runtime_is_judged_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_device: torch.device) -> None:
        raise accelerator_error(700)

    for device in (None, GPU):
        assert is_out_of_memory(accelerator_error(2), device=device)
        assert not is_out_of_memory(accelerator_error(700), device=device)
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"), device=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)  # as after an illegal memory access
    assert not is_out_of_memory(RuntimeError(BLAS), device=GPU)


def test_a_failed_collective_is_judged_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_with(monkeypatch, 100 * MIB)
    for cause, expected in ((LIBRARIES["nccl"], True), (OTHERS["a lost peer"], False)):
        failed = CollectiveFailed("a collective over 2 workers failed")
        failed.__cause__ = cause
        assert is_out_of_memory(failed, device=GPU) is expected
        fault = fault_of(failed, attempt=1, rank=0, step=3, precision="bf16", from_step=0, device=GPU)
        assert fault.out_of_memory is expected


def test_a_gpu_that_shares_the_machines_memory_has_what_the_kernel_can_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the pages of the page cache as used there."""
    monkeypatch.setattr("raytrain.accelerator.memory_bytes", lambda: (120 * GIB, 90 * GIB))
    gpu_with(monkeypatch, 100 * MIB, total=119 * GIB, integrated=True)
    assert device_memory(GPU) == (90 * GIB, 119 * GIB)
    assert not is_out_of_memory(RuntimeError(BLAS), device=GPU)
    gpu_with(monkeypatch, 100 * MIB, total=119 * GIB)
    assert device_memory(GPU) == (100 * MIB, 119 * GIB)


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
    assert limit_device_memory(CPU, fraction=0.9, limit=None) is None


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
    about = SimpleNamespace(uuid="GPU-1", total_memory=1000 * MIB, is_integrated=0)
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
import json, resource, sys, torch
from raytrain.train.memory.device import is_out_of_memory
cpu, found = torch.device("cpu"), {}
small = torch.ones(1024)
mapped = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = mapped + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
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


@pytest.mark.parametrize(
    ("free", "share", "reserved", "room"),
    [
        (30 * GIB, 1.0, 50 * GIB, 28.4),  # the GPU's own memory decides: 1.6 GiB of 80 are left to libraries
        (30 * GIB, 0.75, 50 * GIB, 8.4),  # this process may have 60 GiB
        (GIB, 1.0, 50 * GIB, 0),
        (30 * GIB, 0.5, 50 * GIB, 0),
    ],
)
def test_room_is_what_the_gpu_and_this_process_have_left_once_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch, free: int, share: float, reserved: int, room: float
) -> None:
    cached = [7 * GIB]
    gpu_with(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free - sum(cached), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved + sum(cached))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: share)
    assert room_on(GPU) == pytest.approx(room * GIB, abs=1)
    assert room_on(CPU) is None
