"""Memory of this process on its device: peaks, budget, limit, glibc's allocator, and passes that run out of it.

`run_or_shortage` is how every pass is run: all workers drop a step together, without a trace, if one of them has no
memory for it. `raytrain.train.memory.retry` repeats the step in smaller micro-batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from cluster.devices.limits import memory_bytes
from cluster.telemetry.processes import is_own_limit, limit_memory, process_memory, process_sizes, reset_peak
from raytrain.accelerator import device_bytes, device_memory, empty_cache, gpu_module, on_gpu, synchronize
from raytrain.config.decode import JsonRecord
from raytrain.errors import CollectiveFailed, OutOfMemory, message_of

if TYPE_CHECKING:
    from raytrain.train.parallel.collectives import Workers


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30
#: The largest value that glibc accepts for the heaps of threads other than the main one; Ray trains in such a thread.
MAPPED_BYTES = 2**25
#: Larger blocks return to the kernel when they are freed, so that the resident set equals the memory in use.
EXACT_BYTES = 2**16
#: The threshold set last in this process: glibc cannot be queried.
_last_set: dict[str, int] = {}


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory instead of returning it to the kernel after every step, where a small
    GPT on a CPU took 500 page faults, 3 % of its time. Returns whether it was set: settings in the environment
    (`MALLOC_*`, `GLIBC_TUNABLES`) take precedence, and other C libraries are left unchanged."""
    return _set_thresholds(trim=KEPT_BYTES, mapped=MAPPED_BYTES)


def give_back_freed_memory() -> bool:
    """Make glibc return freed memory to the kernel at once, for runs whose step needs most of the memory. Returns
    whether it was set; the environment takes precedence here too."""
    exact = _set_thresholds(trim=EXACT_BYTES, mapped=EXACT_BYTES)
    give_back_free_pages()
    return exact


def give_back_free_pages() -> None:
    """Return all unused heap pages to the kernel, once. Needed whatever the thresholds are: a smaller step reuses the
    chunks of a larger one, and their pages then stay."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def freed_at_once() -> Iterator[bool]:
    """Context in which freed memory returns to the kernel at once, so that the peak of the resident set measures memory
    in use; then it is the earlier setting, or that of `keep_freed_memory`. It slows the process: do not time inside.
    Yields whether it is in effect; the environment takes precedence here too."""
    already = _last_set.get("trim") == EXACT_BYTES
    exact = give_back_freed_memory()
    try:
        yield exact
    finally:
        if exact and not already:
            keep_freed_memory()


def _set_thresholds(*, trim: int, mapped: int) -> bool:
    given = [one.partition("=")[0] for one in os.environ.get("GLIBC_TUNABLES", "").split(":")]
    # the caches of threads are off in the processes of raytrain's own clusters (`cluster.environment.UNCACHED`)
    tuned = any(name.startswith("glibc.malloc.") and name != "glibc.malloc.tcache_count" for name in given)
    mallopt = _glibc("mallopt")
    if tuned or mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    _last_set["trim"] = trim
    return bool(mallopt(_M_TRIM_THRESHOLD, trim)) and bool(mallopt(_M_MMAP_THRESHOLD, mapped))


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library by name; None if it does not exist."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


def release_cached(device: torch.device) -> None:
    """Release what the device's allocator, or on a CPU the C library, has cached."""
    if on_gpu(device):
        empty_cache(device)
    else:
        give_back_free_pages()


# ---------------------------------------------------------------- device


#: On a CPU torch raises a plain RuntimeError when memory runs out. It counts as out of memory if at least this fraction
#: of the limit was in use: the failed allocation is unknown, but hardly larger than all memory already in use.
PRESSED = 0.5

#: What torch's allocator of a CPU says, and C++ where the memory of a container is refused.
CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^std::bad_alloc")

#: `cudaErrorMemoryAllocation` and `hipErrorOutOfMemory`: what a `torch.AcceleratorError` carries as its `error_code`.
ALLOCATION_FAILED = 2

#: Libraries that allocate on the GPU themselves report a failed allocation with the same few statuses as other internal
#: failures, and torch raises a plain RuntimeError (for NCCL a `DistBackendError`) with the status in its text. Statuses
#: that an allocation cannot cause, such as an unsupported shape, a wrong argument or a lost peer, are not listed.
LIBRARY_FAILED = re.compile(
    r"(?:CU|HIP)(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)"
    r"|miopenStatus(?:AllocFailed|NotInitialized|InternalError|UnknownError)"
    r"|unable to find an engine to execute this computation"  # cuDNN: no engine whose workspace fits
    r"|unhandled (?:cuda|hip) error"  # NCCL and RCCL
    r"|Triton Error \[(?:CUDA|HIP)\]: out of memory"
)

#: Little memory is free on a GPU below this many bytes, or below this fraction of it: what the libraries allocate at a
#: time (handles, workspaces, kernels; NCCL a few hundred MiB for a communicator) is not more.
LITTLE_FREE_BYTES = 512 * 2**20
LITTLE_FREE_FRACTION = 0.02


class PeakMeter:
    """Measures floor and peak of memory; create one per measurement, inside `exact_memory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release_cached(device)
        self.floor = self.now()
        """Bytes in use when the meter was created, without freed memory that the allocator still cached."""
        if on_gpu(device):
            gpu_module(device).reset_peak_memory_stats(device)
        else:
            reset_peak()

    def now(self) -> int:
        if on_gpu(self.device):
            return int(gpu_module(self.device).memory_reserved(self.device))
        return process_memory().rss

    def peak(self) -> int:
        """Peak bytes since the meter was created (since the process started if the kernel cannot reset the peak)."""
        if on_gpu(self.device):
            return int(gpu_module(self.device).max_memory_reserved(self.device))
        return process_memory().peak


@contextlib.contextmanager
def exact_memory(device: torch.device) -> Iterator[None]:
    """Context in which cached free memory does not hide new allocations."""
    if on_gpu(device):
        synchronize(device)
        empty_cache(device)
        yield
        empty_cache(device)
        return
    with freed_at_once():
        yield


def process_budget(device: torch.device, *, fraction: float, limit: int | None, processes: int) -> int | None:
    """Bytes that this process may use, as counted by `PeakMeter`; None if unknown.

    Args:
        fraction: `cluster.memory_fraction`, of the memory that is free now or held by this process.
        limit: `cluster.memory_limit`, per process.
        processes: number of processes of this kind that share the device, or on a CPU the node's memory.
    """
    if on_gpu(device):
        free, _ = device_memory(device)
        room = fraction * (free / processes + gpu_module(device).memory_reserved(device))
    else:
        _, free = memory_bytes()
        room = fraction * (free / processes + process_memory().rss) if free else 0.0
    known = [int(value) for value in (room, limit) if value]
    return min(known, default=None)


def limit_device_memory(
    device: torch.device, *, fraction: float, limit: int | None, processes: int = 1
) -> float | None:
    """Limit the device's allocator to this process's share of `fraction`, and to `limit` bytes. Returns the fraction of
    the device that was set. None on a CPU, where only `limit` is enforced, on this process: a measured peak above the
    rest of the budget counts as out of memory."""
    if not on_gpu(device):
        limit_memory(limit)
        return None
    share = fraction / processes
    share = share if limit is None else min(share, limit / device_bytes(device))
    gpu_module(device).set_per_process_memory_fraction(share, device)
    return share


def room_on(device: torch.device) -> int | None:
    """Bytes that this process can allocate in addition to what it uses, less what libraries may allocate at a time;
    None on a CPU. Releases the allocator's cache, whose blocks may be too small."""
    if not on_gpu(device):
        return None
    empty_cache(device)
    (free, total), gpu = device_memory(device), gpu_module(device)
    share = gpu.get_per_process_memory_fraction(device) * total - gpu.memory_reserved(device)
    return max(0, int(min(free, share)) - _little(total))


def is_out_of_memory(error: BaseException, *, device: torch.device | None, budget: int | None = None) -> bool:
    """Whether an error means that memory ran out. The only function that decides this.

    torch's device allocators and Python have exception types for it, and torch's error of the CUDA runtime has a code.
    All other errors are judged by memory use, never by their message alone:

    - On a CPU, torch's allocator raises a plain RuntimeError with its own name and the bytes that it was refused
      (`CPU_ALLOCATOR`), which counts always. Others count if the process was close to a limit at which allocations fail
      (RLIMIT_AS, RLIMIT_DATA), or to `budget` resident bytes. (At that of a cgroup, the process is killed.)
    - On a GPU, an error of a library that allocates by itself (`LIBRARY_FAILED`) counts if little memory is free.

    A `CollectiveFailed` is judged by its cause. If the device is unknown (None), only type and code decide.
    """
    if isinstance(error, CollectiveFailed) and error.__cause__ is not None:
        return is_out_of_memory(error.__cause__, device=device, budget=budget)
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == ALLOCATION_FAILED
    if not isinstance(error, RuntimeError):
        return False
    if CPU_ALLOCATOR.search(message_of(error)):
        return True
    if device is None:
        return False
    if on_gpu(device):
        if LIBRARY_FAILED.search(message_of(error)) is None:
            return False
        try:
            free, total = device_memory(device)
        except RuntimeError:  # the error has broken the CUDA context: it was no failed allocation
            return False
        return free < _little(total)
    return type(error) is RuntimeError and any(used >= PRESSED * allowed for used, allowed in _use_and_limits(budget))


def _little(total: int) -> int:
    """With fewer bytes free on a GPU, a library's next allocation would probably fail."""
    return int(max(LITTLE_FREE_BYTES, LITTLE_FREE_FRACTION * total))


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Columns of a logged row, in bytes: what this process's tensors take, and what its allocator holds. On a CPU,
    which keeps no account, the process's pages without mapped files, and its whole resident set."""
    if on_gpu(device):
        used, held = gpu_module(device).memory_allocated(device), gpu_module(device).memory_reserved(device)
    else:
        memory = process_memory()
        used, held = memory.anonymous, memory.rss
    return {"memory_allocated_bytes": int(used), "memory_reserved_bytes": int(held)}


def _use_and_limits(budget: int | None) -> Iterator[tuple[int, int]]:
    """Yield (peak use so far, limit) for each limit that applies to this process."""
    sizes = process_sizes()
    for kind, name in ((resource.RLIMIT_AS, "VmPeak"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft > 0 and not (name == "VmData" and is_own_limit(soft)):
            yield sizes.get(name, 0), soft
    if budget:
        yield process_memory().peak, budget


def processes_sharing(device: torch.device, workers: Workers) -> int:
    """Number of workers that share this worker's memory, including itself: those on the same GPU, or on a CPU those of
    the node (`LOCAL_WORLD_SIZE`, set by the launcher). Collective on GPUs."""
    if not on_gpu(device):
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = f"{socket.gethostname()} {gpu_module(device).get_device_properties(device).uuid}"
    return workers.all_gather_object(own).count(own)


# ---------------------------------------------------------------- oom


Made = TypeVar("Made")


@dataclass(frozen=True)
class Shortage(JsonRecord):
    who: str  # "rank 1", or "expert host 0"
    error: str  # type and first line of the exception
    allocated_bytes: int | None = None  # bytes allocated by the process when the error was caught; None if unknown
    free_bytes: int | None = None  # bytes free on the device for any process; None if unknown

    def __str__(self) -> str:
        known = {"held": self.allocated_bytes, "free": self.free_bytes}
        parts = [f"{name} {value:,} bytes" for name, value in known.items() if value is not None]
        return f"{self.who}: {self.error}" + (f" ({', '.join(parts)})" if parts else "")


class StepDropped(OutOfMemory):
    """All processes have dropped their current passes because some of them ran out of memory: all workers raise it
    together, and nothing of the passes remains but generators and buffers (`raytrain.train.memory.retry`)."""

    def __init__(self, shortages: list[Shortage]) -> None:
        self.shortages = shortages
        super().__init__("; ".join(map(str, shortages)))

    def __reduce__(self) -> tuple[object, ...]:
        return StepDropped, (self.shortages,)


def run_or_shortage(work: Callable[[], Made], *, device: torch.device, who: str) -> Made | Shortage:
    """Return the result of `work`, or a `Shortage` if it ran out of memory; its memory is then freed."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, device=device):
            raise
        shortage = shortage_of(error, device=device, who=who)
        let_go(error, device)
    return shortage


def shortage_of(error: BaseException, *, device: torch.device, who: str) -> Shortage:
    """Describe an out-of-memory error where it is caught."""
    lines = message_of(error).splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if not on_gpu(device):
        return Shortage(who, message)
    free, _ = device_memory(device)
    return Shortage(who, message, gpu_module(device).memory_allocated(device), free)


def let_go(error: BaseException | None, device: torch.device) -> None:
    """Clear the frames in the tracebacks of an error and its causes, and a GPU allocator's cache. The frames hold the
    activations, often in a reference cycle; a garbage collection of the process would take some tenths of a second."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    empty_cache(device)


def step_dropped(workers: Workers, result: object) -> StepDropped:
    """The error that all workers raise together if the `result` of any of them is a `Shortage`. Collective."""
    own = result.to_json() if isinstance(result, Shortage) else None
    return StepDropped([Shortage(**record) for record in workers.all_gather_object(own) if record is not None])
