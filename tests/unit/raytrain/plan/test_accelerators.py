"""Accelerator types of a Ray cluster: what Ray must be asked for, from what a person wrote."""

from __future__ import annotations

from typing import Any

import plans
import pytest

from cluster.devices.inventory import Device, Inventory, Node, inventory_from_rows
from experts.hosts.reserve import request_of
from raytrain.errors import InputError
from raytrain.execution.trainer import accelerator_type
from raytrain.plan.machines import GPUS, PEAKS, is_named, peak_of
from raytrain.plan.plan import Plan

HEAD = Device("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), "GPU-1", 0)
HERE = Inventory((Node("head", 16, 1 << 38, (HEAD,)),), source="here", cpu_model="c", cpu_flags={})
CHIP = Device("cuda", "AMD gfx942", 192 << 30, None, "GPU-2", 0)
AMD_HERE = Inventory((Node("head", 16, 1 << 38, (CHIP,)),), source="here", cpu_model="c", cpu_flags={})


def row(host: str, kinds: str = "", gpus: int = 1) -> dict[str, Any]:
    """A node as `ray.nodes()` lists it."""
    own = {f"accelerator_type:{kind}": 1.0 for kind in kinds.split()}
    resources = {"CPU": 16.0, "memory": 64e9, "GPU": float(gpus), **own}
    return {"Alive": True, "NodeName": host, "NodeManagerHostname": host, "Resources": resources}


def ray_cluster(*rows: dict[str, Any], local: Inventory = HERE) -> Inventory:
    return inventory_from_rows(list(rows), local=local, source="Ray cluster")


def plan(inventory: Inventory, *, hosts: Any = None, **scale: Any) -> Plan:
    return plans.plan(inventory, scale=scale, experts_hosts=hosts, model_facts=None, data_facts=None)


MIXED = ray_cluster(row("head", "H100"), row("b", "T4", 2), row("c", "A100 A100-80G"), row("d", "A100"))


@pytest.mark.parametrize(
    ("text", "kind", "workers"),
    [
        ("h100", "H100", 1), ("H100", "H100", 1), ("NVIDIA H100 80GB HBM3", "H100", 1), ("t4", "T4", 2),
        ("a100", "A100", 2), ("a100-80g", "A100-80G", 1), ("A100-80G", "A100-80G", 1), ("cuda", None, 5),
    ],
)  # fmt: skip
def test_ray_is_asked_for_its_own_spelling(text: str, kind: str | None, workers: int) -> None:
    made = plan(MIXED, accelerator=text)
    assert accelerator_type(made, local=False) == kind
    assert made.workers.value_or(None) == workers
    asked = made.accelerator.reason
    assert ("as Ray names it" in asked) == (kind not in (None, text)), asked


@pytest.mark.parametrize(
    ("text", "kinds", "kind"),
    [
        ("rtx-pro-6000", "RTX-PRO-6000", "RTX-PRO-6000"), ("RTX PRO 6000", "RTX-PRO-6000", "RTX-PRO-6000"),
        ("mi300x", "AMD-Instinct-MI300X-OAM", "AMD-Instinct-MI300X-OAM"),
    ],
)  # fmt: skip
def test_names_of_several_words_are_matched_by_their_words(text: str, kinds: str, kind: str) -> None:
    there = ray_cluster(row("b", kinds), row("c", "T4"))
    assert accelerator_type(plan(there, accelerator=text), local=False) == kind


def test_ray_knows_the_product_where_the_kernel_driver_knows_the_chip() -> None:
    there = ray_cluster(row("head", "AMD-Instinct-MI300X-OAM"), row("b", "AMD-Instinct-MI300X-OAM"), local=AMD_HERE)
    for text in ("MI300X", "amd-instinct-mi300x-oam"):
        made = plan(there, accelerator=text)
        assert made.workers.value_or(None) == 2
        assert accelerator_type(made, local=False) == "AMD-Instinct-MI300X-OAM"


@pytest.mark.parametrize(
    ("text", "inventory", "words"),
    [
        ("H200", MIXED, ("H200", "H100", "T4", "A100")),
        ("A10", MIXED, ("A10", "A100")),
        ("rtx", ray_cluster(row("a", "RTX-PRO-6000"), row("b", "RTX-A6000")), ("RTX-A6000 or RTX-PRO-6000",)),
        ("h100", ray_cluster(row("head"), row("b", "T4")), ("a type that Ray knows", "accelerator_type:h100")),
        ("cuda:1", ray_cluster(row("b", "T4", 2)), ("Ray assigns the GPUs",)),
    ],
)  # fmt: skip
def test_what_no_node_has_is_refused_before_anything_waits(
    text: str, inventory: Inventory, words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match=r"scale\.accelerator") as caught:
        plan(inventory, accelerator=text)
    assert [word for word in words if word not in str(caught.value)] == []


def test_no_type_is_required_where_all_gpus_of_a_cluster_without_types_are_of_it() -> None:
    made = plan(ray_cluster(row("head"), row("b", gpus=0)), accelerator="h100")
    assert accelerator_type(made, local=False) is None and made.workers.value_or(None) == 1


@pytest.mark.parametrize(
    ("hosts", "scale", "of_hosts", "of_workers"),
    [
        ({"t4": 2}, {}, ["T4", "T4"], None),
        ({"t4": 1, "T4": 1}, {"accelerator": "a100"}, ["T4", "T4"], "A100"),
        ({"NVIDIA H100 80GB HBM3": 1}, {}, ["H100"], None),
        (1, {"accelerator": "t4"}, ["T4"], "T4"),
    ],
)
def test_expert_hosts_ask_for_rays_spelling_too(
    hosts: Any, scale: dict[str, Any], of_hosts: list[str], of_workers: str | None
) -> None:
    made = plan(MIXED, hosts=hosts, **scale)
    request = request_of(made, "runs/x")
    kinds = [[name for name in bundle if ":" in name] for bundle in request.hosts]
    assert kinds == [[f"accelerator_type:{kind}"] for kind in of_hosts]
    wanted = [] if of_workers is None else [f"accelerator_type:{of_workers}"]
    assert all([name for name in bundle if ":" in name] == wanted for bundle in request.workers)


def test_a_device_is_named_by_neighbouring_words_of_its_name() -> None:
    assert is_named(HEAD, "nvidia-h100") and is_named(HEAD, "h100 80gb") and not is_named(HEAD, "nvidia 80gb")
    assert not is_named(HEAD, "H10") and not is_named(HEAD, "")
    assert peak_of("h100", "bf16") == peak_of("NVIDIA H100 80GB HBM3", "bf16")


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12), ("NVIDIA H100 PCIe", 756e12, 2e12),
        ("NVIDIA H100 NVL", 835e12, 3.9e12), ("NVIDIA H200", 989e12, 4.8e12), ("NVIDIA H200 NVL", 835e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 1.55e12), ("NVIDIA A100 80GB PCIe", 312e12, 1.55e12),
        ("NVIDIA L40S", 362e12, 0.86e12), ("NVIDIA GeForce RTX 4090", 165e12, 1e12), ("NVIDIA B200", 2250e12, 7.7e12),
        ("AMD Instinct MI300X", 1307e12, 5.3e12), ("AMD-Instinct-MI300X-OAM", 1307e12, 5.3e12),
        ("Tesla T4", 8.1e12, 0.32e12), ("h100", 989e12, 3.35e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None), ("NVIDIA GH200 480GB", None, None), ("cpu", None, None),
    ],
)  # fmt: skip
def test_a_name_from_a_driver_or_from_ray_means_one_row(name: str, bf16: float | None, memory: float | None) -> None:
    found = peak_of(name, "bf16"), peak_of(name, "memory")
    assert found == (bf16 and pytest.approx(bf16), memory and pytest.approx(memory))


def test_exact_fp32_is_no_tf32_and_fp64_is_not_in_the_table() -> None:
    exact, rounded = peak_of("NVIDIA H100 80GB HBM3", "fp32"), peak_of("NVIDIA H100 80GB HBM3", "tf32")
    assert (exact, rounded) == (67e12, 494e12) and peak_of("NVIDIA H100 80GB HBM3", "fp64") is None
    assert peak_of("Tesla T4", "fp16") == 65e12
    assert all(len(row) == len(PEAKS) and sorted(row[:4]) == list(row[:4]) for row in GPUS.values())


def test_a_longer_name_of_a_kind_comes_before_a_shorter_one() -> None:
    assert all(peak_of(f"NVIDIA {kind} 80GB", "fp16") == 1e12 * row[3] for kind, row in GPUS.items())
