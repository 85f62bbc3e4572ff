"""What a plan says under `scale.strategy: fsdp`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plans
import pytest
from plans import GIB, resolved

from cluster.devices.inventory import Device, Inventory, Node
from raytrain.models.sizes import model_facts
from raytrain.plan.facts import ModelFacts
from raytrain.plan.memory import gathered_bytes
from raytrain.plan.plan import Plan

GPT = {"layers": 4, "heads": 2, "width": 64, "context": 32, "vocab_size": 256}
CPU = Inventory((Node("a", 8, 64 * GIB, ()),), source="a test", cpu_model="Test CPU", cpu_flags={"amx_bf16": True})


def gpus(capability: tuple[int, int], number: int = 2) -> Inventory:
    devices = tuple(Device("cuda", "A100", 80 * GIB, capability, f"GPU-{index}", index) for index in range(number))
    return Inventory((Node("a", 8, 64 * GIB, devices),), source="a test", cpu_model="Test CPU", cpu_flags={})


def facts() -> ModelFacts:
    found = model_facts("raytrain.models.gpt:gpt", GPT, {})
    assert found is not None
    return found


def plan(inventory: Inventory = CPU, *, hosts: Any = None, known: ModelFacts | None = None, **sections: Any) -> Plan:
    sections["scale"] = {"strategy": "fsdp", "workers": 2, **sections.get("scale", {})}
    return plans.plan(inventory, experts_hosts=hosts, model_facts=known or facts(), **sections)


def test_each_worker_holds_its_share_and_one_block_together() -> None:
    known = facts()
    assert known.blocks == (12 * 64 * 64 + 2 * 64,) * 4
    parameters, block = known.parameters, known.blocks[0]
    outside = parameters - 4 * block
    for workers in (1, 2, 4):
        made = plan(scale={"workers": workers})
        memory = resolved(made, "memory")
        kept = sum(-(-size * parameters // workers) for size in (4, 4, 8))
        assert f"weights / {workers}" in memory.reason and "a gathered block" in memory.reason
        others = plan(scale={"workers": workers, "strategy": "data_parallel"}, precision={"dtype": "fp32"})
        assert resolved(others, "memory").value - memory.value == 16 * parameters - kept - 12 * block - 8 * outside
    assert "nothing is saved" in resolved(plan(scale={"workers": 1}), "strategy").reason
    assert "its rows of every block" in resolved(plan(), "strategy").reason
    assert "blocks are unknown" in resolved(plan(known=replace(known, blocks=None)), "memory").reason


def test_on_gpus_the_next_block_counts_too_as_it_is_gathered_meanwhile() -> None:
    known = facts()
    assert known.blocks is not None
    for dtype, width in (("fp32", 4), ("bf16", 2), ("fp64", 8)):
        ahead = gathered_bytes(known, dtype=dtype, overlap=True) or 0
        assert ahead - (gathered_bytes(known, dtype=dtype) or 0) == width * known.blocks[0]
    on_gpus = resolved(plan(gpus((8, 0)), known=known), "memory").reason
    assert "a gathered block and the next one" in on_gpus
    assert "the next one" not in resolved(plan(known=known), "memory").reason
    alone = resolved(plan(gpus((8, 0), 1), known=known, scale={"workers": 1}), "memory").reason
    assert "the next one" not in alone, "one worker gathers nothing"


def test_half_precision_brings_less_together() -> None:
    known = facts()
    assert known.blocks is not None
    bare = replace(known, activation_bytes_per_sample=0, full_bytes_per_sample=0)
    full, half = (resolved(plan(precision={"dtype": d}, known=bare), "memory").value for d in ("fp32", "bf16"))
    assert full - half == 4 * known.blocks[0], "weights and gradients of one block in two bytes each"


def test_sharded_weights_stay_within_a_limit_that_replicated_weights_exceed() -> None:
    large = replace(facts(), parameters=GIB // 4, trainable_bytes=GIB, activation_bytes_per_sample=None)
    limit = {"cluster": {"memory_limit": 3 * GIB}, "known": large}
    plans.refused("cluster.memory_limit", plan=plan, scale={"workers": 1}, **limit)
    assert resolved(plan(scale={"workers": 2}, **limit), "workers").value == 2


def test_nothing_is_measured_before_the_first_step() -> None:
    made = plan(gpus((8, 0)))
    assert resolved(made, "precision").value == "bf16" and "measures nothing" in resolved(made, "precision").reason
    assert "half of it" in resolved(made, "micro_batch_size").reason
    assert resolved(plan(gpus((7, 0))), "precision").value == "fp32"
    assert resolved(plan(), "precision").value == "fp32", "on a CPU bf16 is asked for"
    assert resolved(plan(precision={"dtype": "fp16"}), "precision").value == "fp16"
    assert resolved(plan(gpus((8, 0)), scale={"shares": "auto"}), "shares").value == "equal"
    words = plans.refused("precision.fp32_layers", plan=plan, precision={"dtype": "bf16", "fp32_layers": "auto"})
    assert "scale.strategy fsdp" in words


@pytest.mark.parametrize("hosts", [2, "colocated", {"A100": 2}])
def test_hosts_of_experts_are_refused_by_name(hosts: Any) -> None:
    assert "scale.strategy fsdp" in plans.refused("experts.hosts", plan=plan, hosts=hosts)


@pytest.mark.parametrize("hosts", [0, "auto"])
def test_experts_in_the_workers_are_sharded_as_the_rest(hosts: Any) -> None:
    assert resolved(plan(hosts=hosts), "hosts").value == 0
    assert resolved(plan(hosts=hosts), "strategy").value == "fsdp"
