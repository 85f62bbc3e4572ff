"""`--inventory nodes.yaml`: a hand-written list of machines to plan for.

- host: a                 # each list entry is a machine
  cpus: 32
  memory_gib: 128
  gpus:
    - {name: A100, memory_gib: 80, capability: 8.0, count: 4}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cluster.config import Count, Positive, Section, Text
from cluster.devices.inventory import Device, Inventory, Node
from cluster.devices.limits import BF16_FLAGS
from raytrain.config.decode import decode
from raytrain.config.messages import describe
from raytrain.config.yaml12 import load_value
from raytrain.errors import InputError
from raytrain.runs.storage import typed_path

GIB = 1 << 30


class GpuEntry(Section):
    """GPUs of one type in a machine."""

    name: Text = Field(description="such as A100 or NVIDIA H100 80GB HBM3")
    memory_gib: Positive = Field(description="memory of one GPU")
    capability: Annotated[float, Field(ge=1, lt=100)] | None = Field(
        None, description="CUDA compute capability, such as 8.0; null: unknown"
    )
    count: Count = Field(1, description="number of such GPUs")


class NodeEntry(Section):
    """One machine."""

    host: Text = Field(description="name of the machine, unique in the file")
    cpus: Count = Field(description="usable CPU cores")
    memory_gib: Positive = Field(description="main memory")
    gpus: list[Any] = Field([], description="a list of {name, memory_gib, capability, count}")
    cpu_flags: list[Text] = Field([], description=f"some of {', '.join(BF16_FLAGS)}")


def inventory_from_file(path: str | Path) -> Inventory:
    """The machines that a nodes file lists.

    Raises:
        InputError: the file is missing or no YAML list of machines, or a key or value is wrong; the error names it.
    """
    origin = str(path)
    try:
        text = Path(typed_path(origin, key="--inventory")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "which does not exist" if isinstance(error, FileNotFoundError) else str(error)
        raise InputError("--inventory", got=f"{origin}, {why}", expected="a YAML list of machines") from error
    rows = load_value(text, origin=origin)
    if not isinstance(rows, list) or not rows:
        raise InputError(
            origin,
            got=describe(rows),
            expected="a list of machines such as `- {host: a, cpus: 8, memory_gib: 32}`",
        )
    entries = [decode(NodeEntry, row, prefix=f"nodes[{place}]") for place, row in enumerate(rows)]
    nodes = tuple(_node(entry, place=place) for place, entry in enumerate(entries))
    hosts = [node.host for node in nodes]
    for place, host in enumerate(hosts):
        if host in hosts[:place]:
            raise InputError(f"nodes[{place}].host", got=f"{host} twice", expected="a different name for each machine")
    return Inventory(
        nodes=nodes,
        source=f"the file {origin}",
        cpu_model=f"the CPU of {origin}",
        cpu_flags={flag: all(flag in entry.cpu_flags for entry in entries) for flag in BF16_FLAGS},
    )


def _node(entry: NodeEntry, *, place: int) -> Node:
    for flag in entry.cpu_flags:
        if flag not in BF16_FLAGS:
            raise InputError(f"nodes[{place}].cpu_flags", got=flag, expected=f"one of {', '.join(BF16_FLAGS)}")
    devices: list[Device] = []
    for number, row in enumerate(entry.gpus):
        gpu = decode(GpuEntry, row, prefix=f"nodes[{place}].gpus[{number}]")
        for _ in range(gpu.count):
            devices.append(
                Device(
                    kind="cuda",
                    name=gpu.name,
                    memory_bytes=int(gpu.memory_gib * GIB),
                    capability=None if gpu.capability is None else _capability(gpu.capability),
                    uuid=None,
                    index=len(devices),
                )
            )
    return Node(entry.host, entry.cpus, int(entry.memory_gib * GIB), tuple(devices))


def _capability(number: float) -> tuple[int, int]:
    """Convert 8.6 to (8, 6)."""
    return int(number), round(number * 10) % 10
