"""The kinds of devices that a search is made for: each has a line of search, whose trials Ray keeps on its devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.devices.inventory import Inventory, Node
from jobs.job.spec import JobSpec
from raytrain.errors import InputError
from raytrain.plan.rules.devices import DevicePool, choose_devices
from raytrain.plan.rules.workers import allowed_bytes, spread

SLIVER = 0.001
"""Of an accelerator type a trial takes next to nothing: it only says where it runs."""


@dataclass(frozen=True)
class Kind:
    """Devices that are alike.

    Attributes:
        name: as Ray calls the type; "" where all are alike, or Ray cannot tell them apart.
        devices: measurements that may run beside each other: one on each GPU, on CPUs one on each node.
        workers: of the run on this kind, which may be fewer.
        cores: what a measurement on CPUs takes of its node, so that nothing else is timed there.
        budget_bytes: of one process; None where nobody knows.
        device, device_bytes: its name and memory, for the cache.
    """

    name: str
    devices: int
    workers: int
    cores: int
    budget_bytes: int | None
    device: str
    device_bytes: int

    def resources(self, *, on_gpu: bool, local: bool) -> dict[str, float]:
        """What Ray reserves for one trial."""
        own: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1 if local else self.cores}
        return own | ({f"accelerator_type:{self.name}": SLIVER} if self.name else {})


def find_kinds(spec: JobSpec, inventory: Inventory, *, workers: int, on_gpu: bool) -> tuple[Kind, ...]:
    """The kinds of the devices that the workers of this job get, by name; one without a name where there is one alone,
    or where Ray cannot keep a trial on a kind of nodes.

    Raises:
        InputError: GPUs of one machine are unlike: Ray gives a trial any of them.
    """
    machines = choose_devices(spec.scale, inventory, [])
    nodes = [node for node, _ in machines.pool] if on_gpu else [node for node in inventory.nodes if node.cpus > 0]
    names = sorted({node.accelerator for node in nodes})
    if len(names) < 2 or "" in names:
        return (_kind("", spec, inventory, nodes, workers=workers, on_gpu=on_gpu),)
    counts = spread(workers, machines, inventory)
    found = []
    for name in names:
        own = [node for node in nodes if node.accelerator == name]
        part = replace(inventory, nodes=tuple(own))
        there = sum(counts.get(host, 0) for host in {node.host for node in own})
        if there:  # a kind that the run does without must not decide for it
            found.append(_kind(name, spec, part, own, workers=there, on_gpu=on_gpu))
    return tuple(found)


def _refuse_unlike(machines: DevicePool) -> None:
    for node, devices in machines.pool:
        names = sorted({device.name for device in devices})
        if len(names) > 1:
            raise InputError(
                "scale.accelerator", seen=f"{' and '.join(names)} in {node.host}", expected="GPUs of one kind there",
                remedy="Ray cannot tell those of one machine apart: name the kind to search on",
            )  # fmt: skip


def _kind(name: str, spec: JobSpec, inventory: Inventory, nodes: Sequence[Node], *, workers: int, on_gpu: bool) -> Kind:
    machines = choose_devices(spec.scale, inventory, [])
    _refuse_unlike(machines)
    memory = min(((gpu.name, gpu.memory_bytes) for gpu in machines.gpus), key=lambda one: one[1], default=("", 0))
    device, size = memory if on_gpu else (" ".join(filter(None, (inventory.cpu_model, name))), 0)
    return Kind(
        name=name,
        devices=max(1, len(machines.gpus) if on_gpu else len(nodes)),
        workers=workers,
        cores=min((node.cpus for node in nodes), default=1),
        budget_bytes=allowed_bytes(spec.cluster, machines, inventory, workers=workers),
        device=device,
        device_bytes=size,
    )


def of_kind(rows: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Of lines of trials.jsonl those measured on this kind of device."""
    return [dict(row) for row in rows if row.get("kind", "") == kind]
