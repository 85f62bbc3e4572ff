"""Devices as CUDA would show them, and clusters as Ray lists them; no driver and no Ray is asked."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.devices.gpus import driver_version, select_visible, visible_devices
from cluster.devices.inventory import Device, Inventory, Node, TorchBuild, inventory_from_rows, local_inventory

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


class FakeNvml:
    """What `cluster.devices.gpus` calls of pynvml, over a list of devices; `error` is raised by nvmlInit."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 4, *, error: str | None = None) -> None:
        self.count, self.error, self.open = count, error, 0

    def nvmlInit(self) -> None:
        if self.error:
            raise self.NVMLError(self.error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=(handle + 1) * 1000, free=(handle + 1) * 900)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (8, handle)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return f"NVIDIA X{handle}".encode()

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"


def test_every_device_is_found_with_its_facts() -> None:
    nvml = FakeNvml(2)
    found = visible_devices({}, nvml=nvml)
    assert found.devices == [
        Device("cuda", "NVIDIA X0", 1000, (8, 0), "GPU-aa11", 0, free_bytes=900),
        Device("cuda", "NVIDIA X1", 2000, (8, 1), "GPU-aa22", 1, free_bytes=1800),
    ]
    assert found.notes == []
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("3,1", [3, 1]), ("0", [0]), (" 2 , 0 ", [2, 0]), ("GPU-bb33", [2]), ("GPU-b,GPU-cc", [2, 3]),
        ("", []), ("-1", []), ("1,-1,2", [1]), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_visible_devices_follow_cudas_rules(text: str, chosen: list[int]) -> None:
    assert select_visible(text, UUIDS) == (chosen, "")


@pytest.mark.parametrize(
    ("text", "chosen", "problem"),
    [
        ("0,9,1", [0], "no device '9'"),
        ("GPU-aa", [], "no device 'GPU-aa'"),
        ("1,1", [], "listed twice"),
        ("MIG-1234", [], "no device 'MIG-1234'"),
    ],
)
def test_an_invalid_variable_is_reported(text: str, chosen: list[int], problem: str) -> None:
    seen, said = select_visible(text, UUIDS)
    assert seen == chosen
    assert problem in said


def test_hidden_devices_are_renumbered_as_torch_counts_them() -> None:
    found = visible_devices({"CUDA_VISIBLE_DEVICES": "3,1"}, nvml=FakeNvml())
    assert [(d.index, d.uuid) for d in found.devices] == [(0, "GPU-cc44"), (1, "GPU-aa22")]
    assert found.notes == ["CUDA_VISIBLE_DEVICES='3,1' shows 2 of 4 GPUs"]


@pytest.mark.parametrize("text", ["", "-1"])
def test_an_empty_variable_hides_all_devices_with_a_note(text: str) -> None:
    inventory = local_inventory(environ={"CUDA_VISIBLE_DEVICES": text}, nvml=FakeNvml())
    assert inventory.devices() == []
    assert any("shows 0 of 4 GPUs" in note for note in inventory.notes)


def test_a_missing_driver_means_no_device_with_its_reason() -> None:
    nvml = FakeNvml(error="NVML Shared Library Not Found")
    inventory = local_inventory(environ={}, nvml=nvml)
    assert inventory.devices() == []
    assert "no NVIDIA GPU: NVML Shared Library Not Found" in inventory.notes
    assert driver_version(nvml=nvml) is None


def test_the_local_inventory_describes_this_machine() -> None:
    inventory = local_inventory(environ={}, nvml=FakeNvml(1), torch=TorchBuild())
    (node,) = inventory.nodes
    assert node.cpus >= 1
    assert node.memory_bytes >= (node.free_bytes or 0) > 0
    assert inventory.describe().endswith("cuda:0 NVIDIA X0")
    assert json.loads(json.dumps(inventory.to_json())) == inventory.to_json()


def ray_row(host: str, *, gpus: int, kind: str | None = None, alive: bool = True, **extra: Any) -> dict[str, Any]:
    resources: dict[str, float] = {"CPU": 8.0, "memory": 64e9}
    if gpus:
        resources["GPU"] = float(gpus)
    if kind:
        resources[f"accelerator_type:{kind}"] = 1.0
    return {"Alive": alive, "NodeName": host, "NodeManagerHostname": host, "Resources": resources, **extra}


def test_dead_nodes_are_excluded() -> None:
    rows = [ray_row("head", gpus=0), ray_row("gone", gpus=4, kind="H100", alive=False)]
    assert [node.host for node in inventory_from_rows(rows, local=HERE, source="Ray").nodes] == ["head"]


HERE = Inventory((Node("head", 4, 1000),), source="this machine", cpu_model="c", cpu_flags={})


def test_ray_nodes_give_types_and_capabilities() -> None:
    rows = [ray_row("head", gpus=0), ray_row("b", gpus=2, kind="A100-80G", Labels={"zone": "x"})]
    inventory = inventory_from_rows(rows, local=HERE, source="Ray")
    assert [node.host for node in inventory.nodes] == ["head", "b"]
    assert inventory.cpus == 16
    assert [(d.name, d.capability, d.index) for d in inventory.devices()] == [
        ("A100-80G", (8, 0), 0), ("A100-80G", (8, 0), 1),
    ]  # fmt: skip
    assert inventory.nodes[1].labels == {"zone": "x"}


def test_slots_without_a_device_are_reported_and_not_planned() -> None:
    inventory = inventory_from_rows([ray_row("head", gpus=4)], local=HERE, source="Ray")
    assert inventory.nodes[0].gpu_slots == 4
    assert inventory.devices() == []
    assert "Ray lists 4 GPU slots on head, but its driver shows no device" in inventory.notes


def test_the_memory_of_this_machines_gpus_is_the_drivers() -> None:
    devices = visible_devices({}, nvml=FakeNvml(2)).devices
    here = Inventory((Node("head", 4, 1000, tuple(devices)),), source="", cpu_model="c", cpu_flags={})
    inventory = inventory_from_rows([ray_row("head", gpus=1)], local=here, source="Ray")
    assert [d.memory_bytes for d in inventory.devices()] == [1000]


def test_two_nodes_of_ray_on_one_machine_are_two_nodes() -> None:
    """Ray places a worker on one of them: the cores of both are not there for it."""
    rows = [ray_row("here", gpus=0, NodeID="aaaaaaaabb"), ray_row("here", gpus=0, NodeID="ccccccccdd")]
    found = inventory_from_rows(rows, local=local_inventory(), source="Ray")
    assert [(node.host, node.cpus) for node in found.nodes] == [("here", 8), ("here (cccccccc)", 8)]
