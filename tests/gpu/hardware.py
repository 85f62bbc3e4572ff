"""Stand-ins for GPUs: NVML, AMD's kernel driver and torch's device properties as these GPUs show them.

For tests of everything that is decided from what a GPU says of itself. Nothing computes on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A type of GPU.

    Attributes:
        name: as NVML and torch give it.
        ray: as Ray names its type (`accelerator_type:...`).
        unified: it uses the machine's memory; NVML then knows none.
        rocm: it is AMD's; `capability` is then its gfx version.
    """

    name: str
    ray: str
    memory_gib: int
    capability: tuple[int, int]
    unified: bool = False
    rocm: bool = False


GPUS = {
    "T4": Gpu("Tesla T4", "T4", 15, (7, 5)),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", "A100", 80, (8, 0)),
    "H100": Gpu("NVIDIA H100 80GB HBM3", "H100", 80, (9, 0)),
    "B200": Gpu("NVIDIA B200", "B200", 180, (10, 0)),
    "RTX": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000", 96, (12, 0)),
    "GB10": Gpu("NVIDIA GB10", "GB10", 120, (12, 1), unified=True),
    "Orin": Gpu("Orin (nvgpu)", "Orin-(nvgpu)", 61, (8, 7), unified=True),
    "MI300X": Gpu("AMD Instinct MI300X", "AMD-Instinct-MI300X-OAM", 192, (9, 4), rocm=True),
}
MIG_SLICE = "MIG 1g.10gb"


def uuid(index: int) -> str:
    """The UUID of the stand-in with this index."""
    return f"GPU-{index:04x}0000-1111-2222-3333-444455556666"


def mig_uuid(index: int, place: int) -> str:
    """The UUID of a MIG device of that stand-in."""
    return f"MIG-{index:04x}{place:04x}-1111-2222-3333-444455556666"


class Nvml:
    """What `cluster.devices.gpus` calls of pynvml, for a machine with these GPUs.

    Args:
        gpus: keys of `GPUS`, in NVML's order.
        mig: {index: number of MIG devices} of the GPUs that MIG divides.
        errors: {(function, index): name of NVML's error} of calls that fail; index None for calls about no GPU.
        cuda: the newest CUDA of the driver, as NVML numbers it.
    """

    class NVMLError(Exception):
        """The base of all errors."""

    class NVMLError_NotSupported(NVMLError):
        """This GPU has nothing of the kind."""

    class NVMLError_GpuIsLost(NVMLError):
        """It has fallen off the bus."""

    class NVMLError_NotFound(NVMLError):
        """There is no such instance."""

    class NVMLError_Unknown(NVMLError):
        """Something else."""

    class NVMLError_LibraryNotFound(NVMLError):
        """There is no driver."""

    class NVMLError_LibRmVersionMismatch(NVMLError):
        """The driver was updated, and the machine not restarted."""

    def __init__(
        self,
        *gpus: str,
        mig: Mapping[int, int] | None = None,
        errors: Mapping[tuple[str, int | None], str] | None = None,
        cuda: int = 13000,
    ) -> None:
        self.gpus, self.mig = [GPUS[name] for name in gpus], dict(mig or {})
        self.errors, self.cuda, self.open = dict(errors or {}), cuda, 0

    def _may_fail(self, function: str, index: int | None = None) -> None:
        name = self.errors.get((function, index))
        if name is not None:
            raise getattr(self, f"NVMLError_{name}")(name)

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, int | None]:
        self._may_fail("nvmlDeviceGetHandleByIndex", index)
        return index, None

    def nvmlDeviceGetName(self, handle: tuple[int, int | None]) -> str:
        self._may_fail("nvmlDeviceGetName", handle[0])
        return self.gpus[handle[0]].name + ("" if handle[1] is None else f" {MIG_SLICE}")

    def nvmlDeviceGetUUID(self, handle: tuple[int, int | None]) -> str:
        self._may_fail("nvmlDeviceGetUUID", handle[0])
        return uuid(handle[0]) if handle[1] is None else mig_uuid(handle[0], handle[1])

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, int | None]) -> Any:
        self._may_fail("nvmlDeviceGetMemoryInfo", handle[0])
        gpu = self.gpus[handle[0]]
        if gpu.unified:
            raise self.NVMLError_NotSupported("Not Supported")
        total = gpu.memory_gib * GIB if handle[1] is None else 10 * GIB
        return SimpleNamespace(total=total, free=total - GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: tuple[int, int | None]) -> tuple[int, int]:
        self._may_fail("nvmlDeviceGetCudaComputeCapability", handle[0])
        return self.gpus[handle[0]].capability

    def nvmlDeviceGetMigMode(self, handle: tuple[int, int | None]) -> list[int]:
        if self.gpus[handle[0]].capability not in ((8, 0), (9, 0), (10, 0)):
            raise self.NVMLError_NotSupported("Not Supported")
        return [int(handle[0] in self.mig)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple[int, int | None]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple[int, int | None], place: int) -> tuple[int, int]:
        if place >= self.mig.get(handle[0], 0):
            raise self.NVMLError_NotFound("Not Found")
        return handle[0], place


def amd_driver(root: Path, gpus: Iterable[str]) -> None:
    """Write what AMD's kernel driver shows of these GPUs below `root`, after a CPU."""
    for number, name in enumerate([None, *gpus]):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        (folder / "mem_banks/0").mkdir(parents=True)
        gpu = None if name is None else GPUS[name]
        version = 0 if gpu is None else gpu.capability[0] * 10000 + gpu.capability[1] * 100 + 2
        facts = {"simd_count": 0 if gpu is None else 1216, "gfx_target_version": version, "unique_id": number}
        (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in facts.items()))
        size = 0 if gpu is None else gpu.memory_gib * GIB
        (folder / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")


def properties(name: str) -> Any:
    """What `torch.cuda.get_device_properties` returns for it."""
    gpu = GPUS[name]
    return SimpleNamespace(
        name=gpu.name, total_memory=gpu.memory_gib * GIB, major=gpu.capability[0], minor=gpu.capability[1],
        is_integrated=int(gpu.unified), uuid=uuid(0), gcnArchName="gfx942" if gpu.rocm else "",
    )  # fmt: skip
