"""Bytes of experts: the plan's formulas against the tensors and the memory of real shards and routers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from cluster.devices.inventory import Device
from experts.config import ExpertsConfig, LayerShape
from experts.member.shard import CommitDecision, ExpertShard
from experts.placement.policy import first_placement
from experts.placement.values import LayerPlacement, Placement
from experts.router import TopKRouter
from experts.sizes import expert_costs, expert_facts, shared_out
from raytrain.config.sections import OptimConfig
from raytrain.plan.facts import ExpertFacts
from raytrain.plan.memory import held_bytes, trained_bytes

WIDTH, HIDDEN = 16, 64
GROWN = """
import os, sys, torch
from experts.config import LayerShape
from experts.member.shard import CommitDecision, ExpertShard
from experts.placement.policy import first_placement
from raytrain.config.sections import OptimConfig

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def shard(number):
    shape = LayerShape(512, (2048,) * number, "gelu")
    made = ExpertShard([shape], first_placement([number], hosts=1), 0, optim=OptimConfig(), dtype=torch.float32,
                       device=torch.device("cpu"))
    for key in made.held():
        for weight in made.weights_of(key).values():
            weight.fill_(0.5)
    rows = torch.ones(8 * number, 512)
    out = made.forward(0, 0, rows, [[8] * number], keep=True)
    made.backward(0, 0, out, [[8] * number])
    made.commit(CommitDecision(skip=False, coefficient=1.0, inverse_scale=1.0, lr=1e-3))
    return made

torch.set_num_threads(1)
warm = shard(1)
before = resident()
kept = shard(int(sys.argv[1]))
print(resident() - before)
"""


def shard_of(placement: Placement, shapes: list[LayerShape], host: int, optim: OptimConfig) -> ExpertShard:
    """The shard of one host after a step: the optimizer creates its state with the first."""
    shard = ExpertShard(shapes, placement, host, optim=optim, dtype=torch.float32, device=torch.device("cpu"))
    for key in shard.held():
        for weight in shard.weights_of(key).values():
            weight.fill_(0.5)
    shard.commit(CommitDecision(skip=False, coefficient=1.0, inverse_scale=1.0, lr=1e-3))
    return shard


def allocated(shard: ExpertShard) -> tuple[int, int, int]:
    """Bytes of (weights, gradients, optimizer) of every tensor that a shard holds."""
    stacks = [stack for layer in shard.layers for stack in (layer.homes, layer.replicas) if stack is not None]
    weights = [parameter for stack in stacks for parameter in stack.parameters()]
    gradients = [parameter.grad for parameter in weights]
    states = [value for one in shard.optimizers for state in one.state.values() for value in state.values()]
    moments = [value for value in states if isinstance(value, torch.Tensor) and value.ndim]
    return tuple(sum(one.numel() * one.element_size() for one in part) for part in (weights, gradients, moments))  # type: ignore[union-attr,return-value]


def facts(number: int, layers: int = 2, **experts: Any) -> ExpertFacts:
    keys = {"layers": layers, "heads": 2, "width": WIDTH, "context": 8, "vocab_size": 31}
    found = expert_facts("experts.models:moe_gpt", keys, {}, ExpertsConfig(num_experts=number, **experts))
    assert found is not None and found.experts is not None
    return found.experts


@pytest.mark.parametrize(
    ("optim", "kind"),
    [({}, {}), ({"name": "sgd"}, {"activation": "swiglu"}), ({"name": "sgd", "momentum": 0.0}, {"bias": True})],
)
def test_planned_bytes_are_those_of_the_tensors(optim: dict[str, Any], kind: dict[str, Any]) -> None:
    section, planned = OptimConfig(**optim), facts(6, hidden=HIDDEN, **kind)
    shapes = [LayerShape(WIDTH, (HIDDEN,) * 6, kind.get("activation", "gelu"), kind.get("bias", False))] * 2
    copies = ((0,), (1,), (2, 0), (0, 1, 2), (1,), (2,))
    placement = Placement(1, 3, (LayerPlacement(copies, tuple((1 / len(own),) * len(own) for own in copies)),) * 2)
    costs = expert_costs(shapes, section, dtype="fp32")
    for host in range(3):
        assert sum(allocated(shard_of(placement, shapes, host, section))) == placement.bytes_on(host, costs)
    alone = shard_of(first_placement([6, 6], hosts=1), shapes, 0, section)
    taken = trained_bytes(planned.total, section, dtype="fp32")
    assert allocated(alone) == (taken.weights, taken.gradients, taken.optimizer)


@pytest.mark.covers("MEM-16")
def test_a_process_grows_by_the_planned_bytes_of_its_experts() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN, "4"], capture_output=True, text=True, timeout=120, check=True)
    one = trained_bytes(LayerShape(512, (2048,), "gelu").numel(0), OptimConfig(), dtype="fp32")
    assert one.kept == 16 * 2 * 512 * 2048
    assert int(done.stdout) == pytest.approx(4 * one.kept, rel=0.15)


@pytest.mark.covers("MEM-17")
def test_gate_bytes_are_linear_in_the_experts_and_those_of_the_router() -> None:
    numbers, sizes = [4, 8, 12, 16, 24, 32], []
    for number in numbers:
        router = TopKRouter(WIDTH, number, 2)
        tensors = [*router.parameters(), *router.buffers()]
        sizes.append(sum(one.numel() * one.element_size() for one in tensors))
        assert facts(number).gate_bytes == 2 * sizes[-1]
    slope, offset = np.polyfit(numbers, sizes, 1)
    residual = np.array(sizes) - (slope * np.array(numbers) + offset)
    assert 1 - (residual**2).sum() / ((np.array(sizes) - np.mean(sizes)) ** 2).sum() > 0.99 and slope > 4 * WIDTH


@pytest.mark.covers("PAR-17")
@pytest.mark.parametrize(("number", "layers", "slots"), [(8, 2, 4), (8, 4, 2), (5, 4, 4), (10, 6, 4)])
def test_expert_parallel_spreads_the_bytes_that_data_parallel_holds_in_every_slot(
    number: int, layers: int, slots: int
) -> None:
    optim, planned = OptimConfig(), facts(number, layers, hidden=HIDDEN)
    shapes = [LayerShape(WIDTH, (HIDDEN,) * number, "gelu")] * layers
    placement = first_placement([number] * layers, hosts=slots)
    held = [sum(allocated(shard_of(placement, shapes, slot, optim))) for slot in range(slots)]
    whole = sum(allocated(shard_of(first_placement([number] * layers, hosts=1), shapes, 0, optim)))
    assert max(held) * slots / sum(held) <= 1.25
    assert sum(held) == whole, "in total as much as one of the N copies that data parallelism keeps"
    told = shared_out(planned, ExpertsConfig())(slots)
    assert [held_bytes(own, optim, dtype="fp32").kept for own in told] == held
    assert sum(own.number for own in told) == number * layers


def test_the_plan_gives_kinds_of_gpus_experts_in_proportion_to_their_data_sheets() -> None:
    named = shared_out(facts(58, 1), ExpertsConfig(hosts={"A100": 2, "T4": 2}), dtype="fp16")
    assert [own.number for own in named(4)] == [24, 24, 5, 5], "312 to 65"
    gpus = [Device("cuda", name, 16 << 30, None, None, 0) for name in ("Tesla T4", "NVIDIA A100-SXM4-80GB")]
    shares = shared_out(facts(40, 1), ExpertsConfig(hosts="colocated"), gpus, dtype="tf32")(2)
    assert [own.number for own in shares] == [2, 38], "an A100 is 19 times as fast: a T4 computes it in fp32"
    unknown = [*gpus[:1], Device("cuda", "Other", 16 << 30, None, None, 0)]
    assert [own.number for own in shared_out(facts(12, 1), ExpertsConfig(), unknown)(2)] == [6, 6]
    assert [own.number for own in shared_out(facts(12, 1), ExpertsConfig(), gpus)(3)] == [4] * 3, "which is not known"
