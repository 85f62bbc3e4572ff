"""`experts.hosts: auto`: where the experts are, by memory and by kinds of devices."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.devices.inventory import Device, Inventory, Node
from raytrain.config.sections import ScaleConfig
from raytrain.plan.choice import Resolved
from raytrain.plan.expert_hosts import choose_auto_hosts, slowest_kind
from raytrain.plan.facts import ExpertFacts, ModelFacts
from raytrain.plan.machines import choose_devices

GIB = 1 << 30
EXPERTS = ExpertFacts(((1_000_000,) * 4,) * 2, 64, 256, 1280)
MIXTURE = ModelFacts(9_000_000, 36_000_000, 1000, 1e9, "a test", EXPERTS)
A100, T4 = ("NVIDIA A100-SXM4-80GB", 80), ("Tesla T4", 15)


def box(*gpus: tuple[str, int]) -> Inventory:
    """One node of four cores without GPUs, or one node for each GPU."""
    nodes = [
        Node(f"n{at}", 4, 64 * GIB, (Device("cuda", name, size * GIB, (8, 0), f"GPU-{at}", 0),))
        for at, (name, size) in enumerate(gpus)
    ]
    return Inventory(tuple(nodes) or (Node("a", 4, 16 * GIB),), "a test", "Test CPU", {})


def chosen(
    *fitting: Any, facts: ModelFacts | None = MIXTURE, inventory: Inventory | None = None, workers: int = 1,
    **scale: Any,
) -> Resolved:  # fmt: skip
    """The choice where only the values `fitting` of `experts.hosts` fit the memory."""
    section = ScaleConfig(**scale)
    machines = choose_devices(section, inventory or box(), [])
    return choose_auto_hosts(facts, section, machines, workers=workers, fits=lambda hosts, _: hosts in fitting)


@pytest.mark.parametrize("inventory", [box(), box(T4, T4), box(A100, T4)])
def test_what_fits_every_worker_stays_there(inventory: Inventory) -> None:
    found = chosen(0, "colocated", 2, {"T4": 1}, inventory=inventory, workers=2)
    assert found == Resolved(0, "every worker has room for all experts")


def test_on_equal_gpus_the_workers_share_what_does_not_fit_one() -> None:
    found = chosen("colocated", inventory=box(T4, T4), workers=2)
    assert found.value == "colocated"
    assert found.reason == "the experts fit in shares of the workers; too little memory in every worker"


def test_the_slower_kind_of_gpu_holds_the_experts_where_the_model_does_not_fit_it() -> None:
    both = box(A100, T4, T4)
    found = chosen({"T4": 2}, "colocated", inventory=both, workers=3)
    assert found.value == {"T4": 2} and found.reason.startswith("the experts fit on 2 T4; too little memory in every")
    assert chosen({"T4": 2}, inventory=both, workers=3, accelerator="T4").value == 0, "the workers get T4s alone"


def test_hosts_hold_them_on_cpus_and_on_gpus_that_no_worker_has() -> None:
    assert chosen(2).value == 2
    spare = chosen(3, inventory=box(T4, T4, T4, T4), mode="multi_gpu")
    assert spare.value == 3 and spare.reason == "the experts fit on 3 hosts; too little memory in every worker"


def test_where_nothing_fits_the_reason_says_so() -> None:
    found = chosen(workers=2)
    assert found.value == 0
    assert found.reason == (
        "by the estimate, there is too little memory in every worker or in shares of the workers or on 2 hosts"
    )


def test_expert_parallel_is_never_in_process_where_there_is_a_choice() -> None:
    assert chosen(0, 2, strategy="expert_parallel").value == 2
    assert chosen(0, "colocated", strategy="expert_parallel", workers=2).value == "colocated"


def test_without_sizes_and_with_one_gpu_there_is_no_choice() -> None:
    assert "not known before the start" in chosen(facts=None, inventory=box(T4, T4), workers=2).reason
    assert chosen("colocated", inventory=box(T4)).value == 0


def test_the_slowest_kind_is_by_the_data_sheets_and_unknown_kinds_have_none() -> None:
    def slowest(*gpus: tuple[str, int]) -> tuple[str, int] | None:
        return slowest_kind(choose_devices(ScaleConfig(), box(*gpus), []))

    assert slowest(A100, T4, T4) == ("T4", 2) and slowest(("NVIDIA H100 80GB HBM3", 80), A100) == ("A100", 1)
    assert slowest(T4, T4) is None and slowest(A100, ("Imaginary 1", 15)) is None
