"""Plans of invented jobs and machines: the plan as a pure function, for the tests of its rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.devices.inventory import Inventory, Node
from experts.config import ExpertsConfig
from experts.placement.values import Costs, HostSpec, Placement
from experts.sizes import shared_out
from raytrain.config.sections import DataConfig, LoopConfig, OptimConfig, PrecisionConfig, SaveConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.plan import Plan, PlanInputs, make_plan

GIB = 1 << 30
NO_FLAGS = {"amx_bf16": False, "avx512_bf16": False}
DATA = DataFacts(
    train_rows=1000, eval_rows=100, row_bytes=64, tokens_per_row=None, total_bytes=70_400, vocab_size=None,
    reason="a test",
)  # fmt: skip
MODEL = ModelFacts(
    parameters=1000, trainable_bytes=4000, activation_bytes_per_sample=10, flops_per_sample=1e3, reason="a test"
)


def machines(*nodes: Node, flags: dict[str, bool] | None = None) -> Inventory:
    return Inventory(nodes, source="a test", cpu_model="Test CPU", cpu_flags=flags or NO_FLAGS)


CPU = machines(Node("a", 8, 64 * GIB))


def plan(
    inventory: Inventory = CPU, *, data_facts: DataFacts | None = DATA, model_facts: ModelFacts | None = MODEL,
    experts_hosts: Any = None, experts_inflight: Any = "auto", **sections: dict[str, Any],
) -> Plan:  # fmt: skip
    """The plan of a job with these sections."""

    def section(name: str) -> dict[str, Any]:
        return sections.pop(name, {})

    inputs = PlanInputs(
        data=DataConfig(source="c:d", **section("data")), optim=OptimConfig(**section("optim")),
        precision=PrecisionConfig(**section("precision")), loop=LoopConfig(**section("loop")),
        save=SaveConfig(**section("save")), scale=ScaleConfig(**section("scale")),
        cluster=ClusterConfig(**section("cluster")), experts_hosts=experts_hosts, experts_inflight=experts_inflight,
        seed=42, inventory=inventory, model_facts=model_facts, data_facts=data_facts,
        share_out=shared_out(model_facts.experts, ExpertsConfig()) if model_facts and model_facts.experts else None,
    )  # fmt: skip
    assert not sections, f"no sections of a plan: {list(sections)}"
    return make_plan(inputs)


def resolved(made: Plan, name: str) -> Resolved:
    """A choice that the plan has made, with its reason."""
    choice = made.choices()[name]
    assert isinstance(choice, Resolved), f"{name} is {choice}"
    return choice


def value(made: Plan, name: str) -> Any:
    return resolved(made, name).value


def reason(made: Plan, name: str) -> str:
    """Of a choice, also of one that is deferred."""
    return made.choices()[name].reason


def refused(key: str, *, plan: Any = plan, **arguments: Any) -> str:
    """The message that names this key."""
    with pytest.raises(InputError) as caught:
        plan(**arguments)
    assert caught.value.key == key and caught.value.exit_code == 2
    return str(caught.value)


def check_placement(
    placement: Placement, num_experts: Sequence[int], *, hosts: Sequence[HostSpec] = (), costs: Costs = ()
) -> None:
    """Every expert of every layer is on hosts that exist, none twice, with shares that sum to one; and all fit."""
    assert [len(layer.copies) for layer in placement.layers] == list(num_experts)
    for layer in placement.layers:
        for held, shares in zip(layer.copies, layer.shares, strict=True):
            assert held and len(set(held)) == len(held) == len(shares) and set(held) <= set(range(placement.num_hosts))
            assert min(shares) >= 0 and sum(shares) == pytest.approx(1.0, abs=1e-9)
    assert placement.fits(hosts, costs)
