"""What this machine has: CPUs, memory, accelerators, what the installed torch is built for and can compile.

The only detection in the product; the plan, the checks and environment.json use it. Importing torch would take seconds,
so its build is read from its files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from cluster.devices.gpus import Device, amd_devices, cuda_of_driver, driver_version, visible_devices
from cluster.devices.limits import ROOT, cpu_description, machine_memory, memory_bytes, text_of, usable_cores
from cluster.wording import counted

# ---------------------------------------------------------------- torch build


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch, and the versions of CUDA and HIP that it is for (None: for none). Without a `version` it
    is unknown, and nothing is then known to be a problem."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None

    def problem(self, needs: Literal["cuda", "hip"], *, driver: tuple[int, int] | None = None) -> str | None:
        """Why this build cannot use GPUs of CUDA or ROCm; None if it can, as far as is known.

        Args:
            driver: the newest CUDA that the driver supports. An older minor version works, an older major one does not.
        """
        if not self.version:
            return None
        built, install = self.cuda if needs == "cuda" else self.hip, "install a torch build for it"
        if built is None:
            other = "ROCm" if self.hip else "CUDA" if self.cuda else "CPUs"
            return f"torch {self.version} is built for {other} only; {install}"
        if driver is not None and driver[0] < int(built.partition(".")[0]):
            shown = f"the driver supports {driver[0]}.{driver[1]}"
            return f"torch {self.version} needs CUDA {built}, {shown}; update the driver or {install}"
        return None


def installed_torch(file: Path | None = None) -> TorchBuild:
    """The build of the installed torch, by its `version.py`; `TorchBuild()` if it is not installed or does not say."""
    if file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return TorchBuild()
        file = Path(spec.origin).with_name("version.py")
    found = re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text_of(file), flags=re.MULTILINE)
    values = {name: None if value == "None" else value.strip("'\"") for name, value in found}
    if not {"__version__", "cuda", "hip"} <= set(values):
        return TorchBuild()
    return TorchBuild(values["__version__"] or "", values["cuda"], values["hip"])


# ---------------------------------------------------------------- toolchain

#: The first torch with `torch.compile`.
FIRST_TORCH = "2.0"


def missing_for_compile(
    device: str, *, torch_version: str | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """Why this machine cannot compile for `device` ("cpu" or "cuda"); None if it can.

    On a CPU, torch's inductor generates C++ and calls the compiler in `CXX`, else g++. On a GPU it generates Triton
    kernels, whose launcher is compiled from C (`CC`, else gcc or clang).

    Args:
        torch_version, environ: default to those of this process.
    """
    version = torch_version or importlib.metadata.version("torch")
    if Version(version) < Version(FIRST_TORCH):
        return f"torch {version} has no torch.compile, it came with {FIRST_TORCH}"
    settings = os.environ if environ is None else environ
    if device == "cpu":
        name = settings.get("CXX") or "g++"
        if shutil.which(name, path=settings.get("PATH")) is None:
            return f"no C++ compiler: {name} is not on the PATH (CXX names another)"
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, which compiles for a GPU"
    names = [settings["CC"]] if settings.get("CC") else ["gcc", "clang", "cc"]
    if not any(shutil.which(name, path=settings.get("PATH")) for name in names):
        return f"no C compiler for Triton's launcher: {', '.join(names)} not on the PATH (CC names another)"
    return None


# ---------------------------------------------------------------- inventory

# fmt: off
CAPABILITIES: dict[str, tuple[int, int]] = {
    "K80": (3, 7), "P100": (6, 0), "P4": (6, 1), "V100": (7, 0), "T4": (7, 5), "A10G": (8, 6), "A10": (8, 6),
    "A40": (8, 6), "A100": (8, 0), "L4": (8, 9), "L40": (8, 9), "L40S": (8, 9), "H100": (9, 0),
    "H200": (9, 0), "H20": (9, 0), "GH200": (9, 0), "B200": (10, 0), "GB200": (10, 0), "B300": (10, 3),
    "GB300": (10, 3), "RTX-PRO-6000": (12, 0), "GB10": (12, 1),
}
# fmt: on
"""Compute capability by Ray's accelerator type, the only information that Ray has about a GPU of another node."""


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        cpus: the usable cores.
        gpu_slots: the number of GPUs that Ray counts, whether they exist or not.
        accelerator: Ray's name for the kind of its devices, which tasks can require; "" if Ray has none.
        more_accelerators: further such names, which whoever starts a node can give it (A100-80G besides A100).
    """

    host: str
    cpus: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    free_bytes: int | None = None
    gpu_slots: int | None = None
    accelerator: str = ""
    more_accelerators: tuple[str, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        """All names of the kind of its devices that Ray tasks can require."""
        return (self.accelerator, *self.more_accelerators) if self.accelerator else ()


@dataclass(frozen=True)
class Inventory:
    """The machines that a job may use, and the `source` of that information. `notes` are remarks for users; `unusable`
    are accelerators that exist and cannot be used although nothing asked for that, each with the reason."""

    nodes: tuple[Node, ...]
    source: str
    cpu_model: str
    cpu_flags: Mapping[str, bool]
    notes: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    def devices(self, *, kind: str = "cuda") -> list[Device]:
        """All accelerators of one kind, node by node."""
        return [device for node in self.nodes for device in node.devices if device.kind == kind]

    def describe(self) -> str:
        """A summary for messages: ``2 nodes, 16 cores, cuda:0 NVIDIA T4 on a, no GPU on b``."""
        parts = []
        for node in self.nodes:
            names = [f"{device.kind}:{device.index} {device.name}" for device in node.devices] or ["no GPU"]
            where = f" on {node.host}" if len(self.nodes) > 1 else ""
            parts.append(", ".join(names) + where)
        machines = f"{len(self.nodes)} nodes, " if len(self.nodes) > 1 else ""
        return f"{machines}{counted(self.cpus, 'CPU core')}, " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping for plan.json and environment.json."""
        return json.loads(json.dumps({**asdict(self), "summary": self.describe()}))  # tuples become lists


def inventory_from_json(record: Mapping[str, Any]) -> Inventory:
    nodes = []
    for row in record["nodes"]:
        devices = (Device(**{**one, "capability": one["capability"] and tuple(one["capability"])})
                   for one in row["devices"])  # fmt: skip
        more = tuple(row["more_accelerators"])
        nodes.append(Node(**{**row, "devices": tuple(devices), "more_accelerators": more}))
    notes, unusable = tuple(record["notes"]), tuple(record["unusable"])
    return Inventory(tuple(nodes), record["source"], record["cpu_model"], record["cpu_flags"], notes, unusable)


def local_inventory(
    *, environ: Mapping[str, str] | None = None, root: Path = ROOT, nvml: Any = None, torch: TorchBuild | None = None
) -> Inventory:
    """The resources of this machine that this process may use.

    `CUDA_VISIBLE_DEVICES` (on ROCm also `HIP_VISIBLE_DEVICES`) is applied as CUDA does, so that index n is ``cuda:n``
    in torch. Without an NVIDIA library or driver, and without AMD's driver, there is no device, and a note says what is
    missing. GPUs that the installed torch cannot use are no devices either.

    Args:
        environ, root, nvml, torch: substitutes for the environment, ``/``, pynvml and the build of the installed torch.
    """
    settings = os.environ if environ is None else environ
    found = visible_devices(settings, nvml=nvml)
    devices, notes, unusable, needs = found.devices, [*found.notes], [*found.unusable], "cuda"
    if not devices:
        amd = amd_devices(settings, root=root)
        devices, notes, unusable, needs = amd.devices, [*notes, *amd.notes], [*unusable, *amd.unusable], "hip"
    if devices:
        driver = cuda_of_driver(nvml=nvml) if needs == "cuda" else None
        problem = (torch or installed_torch()).problem(needs, driver=driver)
        if problem:
            unusable.append(f"{', '.join(sorted({device.name for device in devices}))}: {problem}")
            notes.append(f"no GPU can be used: {problem}")
            devices = []
    cores, why = usable_cores(root=root)
    total, free = memory_bytes(root=root)
    devices = [replace(one, memory_bytes=total, free_bytes=free) if one.unified else one for one in devices]
    model, flags = cpu_description(root=root)
    node = Node(host=socket.gethostname(), cpus=cores, memory_bytes=total, devices=tuple(devices), free_bytes=free)
    return Inventory(
        (node,), source="this machine", cpu_model=model, cpu_flags=flags, notes=(why, *notes), unusable=tuple(unusable)
    )


def inventory_from_ray(*, local: Inventory | None = None) -> Inventory:
    """The live nodes of the Ray cluster that this process is connected to.

    Ray provides counts and types of GPUs. For this machine, memory and capability are those in `local`; for other
    machines the capability follows from the name of the type, and the memory is 0 (unknown). GPU slots that Ray counts
    on this machine while its driver shows no device are left out, and a note says so.
    """
    import ray

    local = local or local_inventory()
    address = ray.get_runtime_context().gcs_address
    return inventory_from_rows(ray.nodes(), local=local, source=f"Ray cluster at {address}")


def inventory_from_rows(rows: list[Mapping[str, Any]], *, local: Inventory, source: str) -> Inventory:
    """An Inventory of the live nodes in the result of `ray.nodes()`; see `inventory_from_ray`."""
    here = local.nodes[0]
    notes, unusable = list(local.notes), list(local.unusable)
    nodes = []
    for row in (row for row in rows if row.get("Alive")):
        resources = row.get("Resources", {})
        slots = int(resources.get("GPU", 0))
        is_here = row.get("NodeManagerHostname") == here.host
        host = str(row.get("NodeName") or row.get("NodeManagerHostname") or row.get("NodeManagerAddress"))
        if any(host == node.host for node in nodes):  # Ray places by node, also where one machine has several
            host = f"{host} ({row.get('NodeID', '')[:8]})"
        if is_here and slots and not here.devices:
            notes.append(f"Ray lists {slots} GPU slots on {host}, but its driver shows no device")
            unusable.append(notes[-1])
            devices: tuple[Device, ...] = ()
        elif is_here:
            devices = here.devices[:slots]
        else:
            kind = next(iter(_accelerators(resources)), "") or row.get("Labels", {}).get(
                "ray.io/accelerator-type", "GPU"
            )
            capability = CAPABILITIES.get(kind) or CAPABILITIES.get(kind.partition("-")[0])
            devices = tuple(Device("cuda", kind, 0, capability, None, index) for index in range(slots))
        kinds = _accelerators(resources)
        labels = {str(key): str(value) for key, value in row.get("Labels", {}).items()}
        nodes.append(
            Node(
                host, int(resources.get("CPU", 0)), int(resources.get("memory", 0)), devices, labels, gpu_slots=slots,
                accelerator=kinds[0] if kinds else "", more_accelerators=kinds[1:],
            )
        )  # fmt: skip
    return Inventory(tuple(nodes), source, local.cpu_model, local.cpu_flags, tuple(notes), tuple(unusable))


def _accelerators(resources: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(key.partition(":")[2] for key in resources if key.startswith("accelerator_type:"))


# ---------------------------------------------------------------- facts

BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (7, 0)
"""NVIDIA's compute capabilities from which tensor cores compute in these formats."""


def device_facts(inventory: Inventory, *, torch: TorchBuild | None = None, nvml: Any = None) -> list[dict[str, Any]]:
    """A row for each device of this machine that a process may use: its GPUs, else the CPU.

    Each row has the keys kind (cuda, rocm or cpu), index, name, uuid, memory_total_bytes, memory_free_bytes,
    capability, features, driver and runtime; what does not apply is None or empty. `features` are the number
    formats with fast matrix products.
    """
    build = torch or installed_torch()
    node = inventory.nodes[0]
    if node.devices:
        driver = driver_version(nvml=nvml)
        return [_gpu(device, driver if device.kind == "cuda" else None, build) for device in node.devices]
    return [
        {
            "kind": "cpu", "index": 0, "name": inventory.cpu_model, "uuid": None,
            "memory_total_bytes": node.memory_bytes, "memory_free_bytes": node.free_bytes, "capability": None,
            "features": [name for name, present in inventory.cpu_flags.items() if present], "driver": None,
            "runtime": f"torch {build.version}" if build.version else None,
        }
    ]  # fmt: skip


def _gpu(device: Device, driver: str | None, build: TorchBuild) -> dict[str, Any]:
    is_amd = device.kind != "cuda" or (build.hip is not None and build.cuda is None)
    runtime = f"ROCm {build.hip}" if is_amd else f"CUDA {build.cuda}"
    return {
        "kind": "rocm" if is_amd else "cuda", "index": device.index, "name": device.name, "uuid": device.uuid,
        "memory_total_bytes": device.memory_bytes, "memory_free_bytes": device.free_bytes,
        "capability": None if device.capability is None else list(device.capability),
        "features": fast_formats(device.capability), "driver": driver,
        "runtime": runtime if build.hip or build.cuda else None,
    }  # fmt: skip


def fast_formats(capability: tuple[int, int] | None) -> list[str]:
    """The number formats that tensor cores of this compute capability multiply fast; empty where it is unknown."""
    if capability is None:
        return []
    if capability >= BF16_CAPABILITY:
        return ["bf16", "fp16", "tf32"]
    return ["fp16"] if capability >= FP16_CAPABILITY else []


def machine_limits(inventory: Inventory, *, root: Path = ROOT) -> Mapping[str, Any]:
    """What a process on this machine may use: {cores, cores_reason, memory_total_bytes, memory_free_bytes,
    machine_memory_bytes, shared_memory_total_bytes, shared_memory_free_bytes}; None where it is unknown."""
    cores, why = usable_cores(root=root)
    node, shared = inventory.nodes[0], root / "dev/shm"
    usage = shutil.disk_usage(shared) if shared.is_dir() else None
    return {
        "cores": cores, "cores_reason": why, "memory_total_bytes": node.memory_bytes,
        "memory_free_bytes": node.free_bytes, "machine_memory_bytes": machine_memory(root=root),
        "shared_memory_total_bytes": usage and usage.total, "shared_memory_free_bytes": usage and usage.free,
    }  # fmt: skip
