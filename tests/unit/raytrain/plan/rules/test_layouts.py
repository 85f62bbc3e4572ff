"""`experts.hosts: auto` by stated rates: the layout that is predicted to be the fastest among those that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.devices.calibration import MachineRates, RatesAtThreads
from cluster.devices.inventory import Device, Inventory, Node
from experts.config import ExpertsConfig
from experts.plan.sizes import expert_facts
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.plan.choice import Resolved
from raytrain.plan.facts import ExpertFacts, ModelFacts, PassFacts
from raytrain.plan.rules.devices import choose_devices
from raytrain.plan.rules.layouts import choose_layout

GIB = 1 << 30


def rates(*, gain: float = 1.6, trip_s: float = 4e-5, wire: float = 1e9) -> MachineRates:
    """A machine of which all four cores together are `gain` times as fast as one."""
    one = RatesAtThreads(1, {"fp32": ((128, 100e9),)}, 5e9, 8e9, 3e-6)
    return MachineRates("cpu", (one, one.with_threads(4, gain=gain)), trip_s, wire)


def box(*gpus: tuple[str, float], cpus: int = 4) -> Inventory:
    """One node without GPUs, or one node for each kind of GPU."""
    nodes = [
        Node(f"n{at}", cpus, 64 * GIB, (Device("cuda", name, int(size * GIB), (8, 0), f"GPU-{at}", 0),))
        for at, (name, size) in enumerate(gpus)
    ]
    return Inventory(tuple(nodes) or (Node("a", cpus, 16 * GIB),), "a test", "Test CPU", {})


def mixture(*, trunk: int = 1_000_000, expert: int = 1_000_000, rows: int = 256, width: int = 128) -> ModelFacts:
    """Four experts of a layer, two layers; a sample is `rows` rows of each layer."""
    experts = ExpertFacts(((expert,) * 4,) * 2, 64, rows, 4 * width, 10 * width)
    parameters = trunk + experts.total
    flops = 6.0 * rows * trunk + experts.flops_per_sample
    passes = PassFacts(1000, 600, 500, 300, 4000.0, 300, width)
    return ModelFacts(parameters, 4 * parameters, 1000, flops, "a test", experts, passes=passes)


def chosen(
    facts: ModelFacts | None, *, inventory: Inventory | None = None, measured: MachineRates | None = None,
    workers: int = 1, rows: int = 16, fits: Any = lambda _hosts, _workers: True, **scale: Any,
) -> Resolved:  # fmt: skip
    inventory = inventory or box()
    section = ScaleConfig(**scale)
    return choose_layout(
        facts, section, LoopConfig(), Resolved("fp32", ""), choose_devices(section, inventory, []), inventory,
        workers=workers, rows=rows, measured=measured or rates(), fits=fits,
    )  # fmt: skip


def default_recipe() -> ModelFacts:
    keys = {"layers": 4, "heads": 4, "width": 128, "context": 128}
    found = expert_facts("experts.models:moe_gpt", keys, {"vocab_size": 256}, ExpertsConfig(num_experts=4, top_k=2))
    assert found is not None
    return found


@pytest.mark.parametrize("cpus", [2, 4])
def test_the_default_recipe_keeps_its_experts_in_process_on_one_box(cpus: int) -> None:
    found = chosen(default_recipe(), inventory=box(cpus=cpus))
    assert found.value == 0
    assert found.reason.startswith("predicted step: in every worker 0.") and "2 hosts 0." in found.reason


def test_hosts_are_chosen_where_more_processes_use_the_cores_better() -> None:
    wide = mixture(expert=8_000_000, trunk=100_000)
    assert chosen(wide, measured=rates(gain=3.9)).value == 0, "the threads of one process use all cores"
    assert chosen(wide, measured=rates(gain=1.0)).value == 2, (
        "its threads gain nothing, two hosts compute twice as fast"
    )
    assert chosen(wide, measured=rates(gain=1.0, wire=1e6)).value == 0, "the rows take longer than they save"
    assert chosen(wide, measured=rates(gain=1.0, trip_s=1.0)).value == 0, "so do the messages"


def test_more_processes_must_save_a_tenth() -> None:
    wide = mixture(expert=8_000_000, trunk=100_000)
    gains = [1.0 + 0.01 * step for step in range(200)]
    values = [chosen(wide, measured=rates(gain=gain)).value for gain in gains]
    switch = values.index(0)
    assert set(values[:switch]) == {2} and set(values[switch:]) == {0}
    close = chosen(wide, measured=rates(gain=gains[switch]))
    assert close.reason.endswith("more processes must save more than 10%")


def test_a_layout_that_does_not_fit_is_left_out() -> None:
    found = chosen(mixture(), fits=lambda hosts, _workers: hosts != 0)
    assert found.value == 2 and found.reason.endswith("too little memory for in every worker")
    assert chosen(mixture(), fits=lambda _hosts, _workers: False).value == 0, "the plan warns of it elsewhere"


def test_workers_share_experts_where_reducing_and_updating_them_all_costs_more() -> None:
    many = replace(mixture(rows=8), experts=ExpertFacts(((500_000,) * 64,) * 2, 64, 8, 512, 1280))
    many = replace(many, parameters=65_000_000, flops_per_sample=1e7)
    assert chosen(many, workers=2).value == "colocated"
    assert chosen(mixture(expert=1000), workers=2).value == 0


def test_expert_parallel_is_never_in_process_where_there_is_a_choice() -> None:
    assert chosen(mixture(), strategy="expert_parallel").value == 2


def test_the_slower_kind_of_gpu_holds_the_experts_where_the_model_does_not_fit_it() -> None:
    both = box(("NVIDIA A100-SXM4-80GB", 80), ("Tesla T4", 15), ("Tesla T4", 15))

    def fits(hosts: Any, workers: int) -> bool:
        return hosts == {"T4": 2} and workers == 1

    found = chosen(mixture(), inventory=both, workers=3, fits=fits)
    assert found.value == {"T4": 2}
    assert "2 T4 hosts" in found.reason and "too little memory for in every worker, colocated" in found.reason
    assert chosen(mixture(), inventory=both, workers=3, fits=fits, accelerator="T4").value != {"T4": 2}
    alike = box(("Tesla T4", 15), ("Tesla T4", 15))
    assert "T4 hosts" not in chosen(mixture(), inventory=alike, workers=2).reason


def test_without_sizes_there_is_no_prediction() -> None:
    assert chosen(None).value == 0
    assert chosen(None, inventory=box(("Tesla T4", 15), ("Tesla T4", 15)), workers=2).value == "colocated"
    assert chosen(mixture(), inventory=box(("Imaginary", 15), ("Imaginary", 15)), workers=2).value == "colocated"
    assert chosen(mixture(), inventory=box(("Tesla T4", 15))).value == 0
