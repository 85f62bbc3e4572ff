"""The kinds of devices of a search. Each kind is searched separately, and Ray runs its trials on its devices."""

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
"""Fraction of Ray's `accelerator_type:*` resource that a trial reserves: it selects the node, and limits nothing."""


@dataclass(frozen=True)
class Kind:
    """Devices of one type.

    Attributes:
        name: Ray's accelerator type; "" if there is one kind only, or if Ray cannot tell the kinds apart.
        devices: concurrent measurements: one on each GPU, or on each node without GPUs.
        workers: the run's workers on this kind, possibly fewer than its devices.
        cores: CPU cores that a measurement on CPUs reserves: those of its node, so that no other one runs there.
        budget_bytes: memory budget of one process; None if unknown.
        device, device_bytes: name and memory of the device, for the cache key.
        required: Ray's accelerator type where `scale.accelerator` names one of several in the cluster; else "".
    """

    name: str
    devices: int
    workers: int
    cores: int
    budget_bytes: int | None
    device: str
    device_bytes: int
    required: str = ""

    def resources(self, *, on_gpu: bool, local: bool) -> dict[str, float]:
        """What Ray reserves for one trial."""
        own: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1 if local else self.cores}
        kind = self.name or self.required
        return own | ({f"accelerator_type:{kind}": SLIVER} if kind else {})


def find_kinds(spec: JobSpec, inventory: Inventory, *, workers: int, on_gpu: bool) -> tuple[Kind, ...]:
    """The kinds of devices that the workers of this job use, sorted by name. A single kind has no name, and so have
    kinds that Ray cannot tell apart.

    Raises:
        InputError: a machine has GPUs of different types, of which Ray would assign any to a trial.
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
        if there:  # a kind that the run does not use must not decide
            found.append(_kind(name, spec, part, own, workers=there, on_gpu=on_gpu))
    return tuple(found)


def _refuse_unlike(machines: DevicePool) -> None:
    for node, devices in machines.pool:
        names = sorted({device.name for device in devices})
        if len(names) > 1:
            raise InputError(
                "scale.accelerator", got=f"{' and '.join(names)} on the machine {node.host}",
                expected="GPUs of one type per machine",
                remedy="Ray cannot tell GPUs of one machine apart; set scale.accelerator to the type to search on",
            )  # fmt: skip


def _kind(name: str, spec: JobSpec, inventory: Inventory, nodes: Sequence[Node], *, workers: int, on_gpu: bool) -> Kind:
    machines = choose_devices(spec.scale, inventory, [])
    _refuse_unlike(machines)
    memory = min(((gpu.name, gpu.memory_bytes) for gpu in machines.gpus), key=lambda one: one[1], default=("", 0))
    asked = machines.accelerator.value
    device, size = memory if on_gpu else (" ".join(filter(None, (inventory.cpu_model, name))), 0)
    return Kind(
        name=name,
        devices=max(1, len(machines.gpus) if on_gpu else len(nodes)),
        workers=workers,
        cores=min((node.cpus for node in nodes), default=1),
        budget_bytes=allowed_bytes(spec.cluster, machines, inventory, workers=workers),
        device=device,
        device_bytes=size,
        required=asked if on_gpu and any(asked in node.accelerators for node in nodes) else "",
    )


def of_kind(rows: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The rows of trials.jsonl that were measured on this kind of device."""
    return [dict(row) for row in rows if row.get("kind", "") == kind]
