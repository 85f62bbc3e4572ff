"""What differs between kinds of accelerators: the module of torch that drives one, names, sizes and waiting for it.

Everything else asks `on_gpu`, and calls what torch names alike in `torch.cuda` (also ROCm), `torch.xpu` and the modules
of its plugins through `gpu_module`. A kind that lacks one of these functions gets it here.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cluster.devices.limits import memory_bytes
from raytrain.errors import DevicePlacementError


def on_gpu(device: torch.device) -> bool:
    """Whether the device has a memory and a queue of work of its own."""
    return device.type not in ("cpu", "meta")


def gpu_module(device: torch.device) -> Any:
    """The module of torch that drives such a GPU: `torch.cuda`, `torch.xpu`."""
    return getattr(torch, device.type)


def worker_device(kind: str, *, local_rank: int) -> torch.device:
    """The device of this worker; a GPU always has an explicit index, so `cuda` and `cuda:0` never mix.

    Args:
        kind: "cpu", or torch's name for a kind of GPU ("cuda", also for ROCm), as planned.
        local_rank: rank among the workers of this node; Ray Train makes all worker GPUs of a node visible to each.

    Raises:
        DevicePlacementError: the plan selects a GPU and torch sees none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    gpus = gpu_module(torch.device(kind))
    count = gpus.device_count() if gpus.is_available() else 0
    if count == 0:
        raise DevicePlacementError(
            f"the plan gives this worker a GPU, but torch {torch.__version__} (built for {platform().name}) sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); "
            "install a torch build for this machine's driver or set scale.mode=cpu"
        )
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if count <= local_rank and count < len(visible):
        raise DevicePlacementError(
            f"scale.workers: got {local_rank + 1} or more workers on {socket.gethostname()}, where CUDA shows a "
            f"process {count} of the devices {','.join(visible)} (of GPUs that MIG divides it shows one), expected at "
            f"most {count} on this node; use fewer workers, or switch MIG off there"
        )
    device = torch.device(kind, local_rank if local_rank < count else 0)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Make it the GPU of this thread, which begins with number 0; kernels of a model's own may use the current one."""
    if on_gpu(device):
        gpu_module(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if on_gpu(device):
        gpu_module(device).synchronize(device)


def seconds_of(device: torch.device) -> float:
    """Read a monotonic clock after the device has finished its queued work."""
    synchronize(device)
    return time.perf_counter()


def empty_cache(device: torch.device) -> None:
    """Release what the allocator of a GPU has cached."""
    if on_gpu(device):
        gpu_module(device).empty_cache()


def device_name(device: torch.device) -> str:
    """ "cpu", or the name of the GPU."""
    return gpu_module(device).get_device_name(device) if on_gpu(device) else "cpu"


def device_bytes(device: torch.device) -> int:
    """Total memory of a GPU; on a CPU the machine memory available to this process."""
    return int(gpu_module(device).get_device_properties(device).total_memory) if on_gpu(device) else memory_bytes()[0]


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a GPU. On one that shares the machine's memory (Jetson, GB10), CUDA counts only unused
    pages as free, although the kernel would give it those of its page cache too: there, the machine's figure counts.

    Raises:
        RuntimeError: CUDA fails.
    """
    free, total = gpu_module(device).mem_get_info(device)
    if getattr(gpu_module(device).get_device_properties(device), "is_integrated", False):
        _, available = memory_bytes()
        free = max(free, min(available or 0, total))
    return free, total


@dataclass(frozen=True)
class Platform:
    name: str  # "cuda", "rocm" or "cpu"
    version: str  # of CUDA or HIP
    collectives: str  # the library that torch calls `nccl`
    convolutions: str  # the library that torch calls `cudnn`

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def platform(version: Any = torch.version) -> Platform:
    """Distinguish ROCm from CUDA: torch calls both `cuda`, and only `torch.version` shows which one it is."""
    if getattr(version, "hip", None):
        return Platform("rocm", str(version.hip), collectives="RCCL", convolutions="MIOpen")
    if getattr(version, "cuda", None):
        return Platform("cuda", str(version.cuda), collectives="NCCL", convolutions="cuDNN")
    return Platform("cpu", "", collectives="gloo", convolutions="oneDNN")
