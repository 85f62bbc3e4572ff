"""Detects machines and accelerators; no other module does. Torch-free; Ray is imported only where it is queried."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.devices.amd import amd_devices
from cluster.devices.limits import ROOT, cpu_description, memory_bytes, usable_cores
from cluster.devices.nvidia import Device as Device
from cluster.devices.nvidia import cuda_of_driver, visible_devices
from cluster.devices.torch_build import TorchBuild, installed_torch
from cluster.wording import counted

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
    """The machines that a job may use.

    Attributes:
        source: where the information is from.
        notes: remarks for users.
        unusable: accelerators that exist and cannot be used although nothing asked for that, each with the reason.
    """

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
        record = asdict(self)
        record["unusable"] = list(self.unusable)
        for node in record["nodes"]:
            node["more_accelerators"] = list(node["more_accelerators"])
            node["devices"] = [dict(row, capability=_listed(row["capability"])) for row in node["devices"]]
        return dict(record, nodes=list(record["nodes"]), notes=list(self.notes), summary=self.describe())


def inventory_from_json(record: Mapping[str, Any]) -> Inventory:
    """The inventory that `Inventory.to_json` wrote."""
    nodes = tuple(
        Node(
            **{
                **row,
                "devices": tuple(_device(device) for device in row["devices"]),
                "more_accelerators": tuple(row["more_accelerators"]),
            }
        )
        for row in record["nodes"]
    )
    return Inventory(
        nodes, record["source"], record["cpu_model"], record["cpu_flags"], tuple(record["notes"]),
        tuple(record["unusable"]),
    )  # fmt: skip


def _device(row: Mapping[str, Any]) -> Device:
    capability = row["capability"]
    return Device(**{**row, "capability": None if capability is None else (capability[0], capability[1])})


def _listed(capability: tuple[int, int] | None) -> list[int] | None:
    return list(capability) if capability is not None else None


def local_inventory(
    *, environ: Mapping[str, str] | None = None, root: Path = ROOT, nvml: Any = None, torch: TorchBuild | None = None
) -> Inventory:
    """The resources of this machine that this process may use.

    `CUDA_VISIBLE_DEVICES` (on ROCm also `HIP_VISIBLE_DEVICES`) is applied as CUDA does, so that index n is ``cuda:n``
    in torch. Without an NVIDIA library or driver, and without AMD's driver, there is no device, and a note says what is
    missing. GPUs that the installed torch cannot use are no devices either.

    Args:
        environ: the environment to read, by default that of this process.
        root: the directory to use as ``/``.
        nvml: the pynvml module or a substitute; by default it is imported if installed.
        torch: what torch is built for; by default the installed one.
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

    Raises:
        RuntimeError: Ray is not initialised in this process.
    """
    import ray

    if not ray.is_initialized():
        raise RuntimeError("inventory_from_ray needs an initialised Ray (ray.init) in this process")
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
            devices = _remote_devices(resources, row.get("Labels", {}), count=slots)
        kinds = _accelerators(resources)
        nodes.append(
            Node(
                host=host,
                cpus=int(resources.get("CPU", 0)),
                memory_bytes=int(resources.get("memory", 0)),
                devices=devices,
                labels={str(key): str(value) for key, value in row.get("Labels", {}).items()},
                gpu_slots=slots,
                accelerator=kinds[0] if kinds else "",
                more_accelerators=kinds[1:],
            )
        )
    return Inventory(tuple(nodes), source, local.cpu_model, local.cpu_flags, tuple(notes), tuple(unusable))


def _accelerators(resources: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(key.partition(":")[2] for key in resources if key.startswith("accelerator_type:"))


def _remote_devices(resources: Mapping[str, float], labels: Mapping[str, str], *, count: int) -> tuple[Device, ...]:
    """GPUs of another node, as far as Ray describes them."""
    name = next(iter(_accelerators(resources)), "") or labels.get("ray.io/accelerator-type", "GPU")
    capability = CAPABILITIES.get(name) or CAPABILITIES.get(name.partition("-")[0])
    return tuple(
        Device(kind="cuda", name=name, memory_bytes=0, capability=capability, uuid=None, index=index)
        for index in range(count)
    )
