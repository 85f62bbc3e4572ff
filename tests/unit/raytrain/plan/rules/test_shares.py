"""What a plan says of unequal workers, and of layers that stay in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.devices.inventory import Device, Inventory, Node
from raytrain.config.sections import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    SaveConfig,
    ScaleConfig,
)
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.plan import Plan, make_plan

GIB = 1 << 30
DATA = DataFacts(2000, 100, 64, None, 134_400, None, "a test")
SMALL = ModelFacts(1000, 4000, 10, 1e3, "a test")
LARGE = ModelFacts(1000, 4000, GIB // 2, 1e12, "a test")
A100, V100, T4 = ("A100", (8, 0)), ("V100", (7, 0)), ("T4", (7, 5))
MEMORY = {"A100": 80 * GIB, "V100": 32 * GIB, "T4": 16 * GIB}


def machines(*nodes: Node) -> Inventory:
    return Inventory(nodes, source="a test", cpu_model="c", cpu_flags={"amx_bf16": False, "avx512_bf16": False})


def host(name: str, *kinds: tuple[str, tuple[int, int]], each: int = 4) -> Node:
    """A node with so many GPUs of each of these kinds."""
    wanted = [kind for kind in kinds for _ in range(each)]
    found = [Device("cuda", n, MEMORY.get(n, GIB), power, f"{name}-{i}", i) for i, (n, power) in enumerate(wanted)]
    return Node(name, 64, 512 * GIB, tuple(found))


CPU = machines(Node("a", 8, 64 * GIB))
MIXED = machines(host("a", A100, T4), host("b", A100, A100), host("c", V100, V100), host("d", T4, V100))
AUTO = {"shares": "auto"}


def plan(
    inventory: Inventory = CPU,
    *,
    scale: dict[str, Any] | None = None,
    loop: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    model_facts: ModelFacts = SMALL,
    experts_hosts: Any = None,
) -> Plan:
    return make_plan(
        model=ModelConfig(builder="a:b"), data=DataConfig(source="c:d"), optim=OptimConfig(), save=SaveConfig(),
        precision=PrecisionConfig(**(precision or {})), loop=LoopConfig(**(loop or {})),
        scale=ScaleConfig(**(scale or {})), experts_hosts=experts_hosts, experts_inflight="auto",
        cluster=ClusterConfig(), seed=42, inventory=inventory, model_facts=model_facts, data_facts=DATA,
    )  # fmt: skip


def value(made: Plan, name: str) -> Any:
    choice = made.choices()[name]
    assert isinstance(choice, Resolved), f"{name} is {choice}"
    return choice.value


def reason(made: Plan, name: str) -> str:
    return made.choices()[name].reason


def shares(made: Plan) -> Deferred:
    choice = made.choices()["shares"]
    assert isinstance(choice, Deferred)
    return choice


def test_the_plan_of_four_nodes_with_mixed_gpus_shows_the_task_of_each_kind() -> None:
    made = plan(MIXED, scale=AUTO, loop={"global_batch_size": 1024}, precision={"dtype": "fp16"}, model_facts=LARGE)
    assert value(made, "workers") == 32
    (told,) = shares(made).bounds
    assert told == (
        "12 A100: 56 rows each, up to 32 a pass, 12 V100: 20 to 24 rows each, up to 32 a pass,"
        " 8 T4: 12 rows each, up to 16 a pass"
    )
    row = next(text for name, *text in made.rows() if name == "shares")
    assert row[0] == told and row[1].startswith("measured at the start, on all workers at the same time")
    assert "expected 2.56 times as fast as equal shares, at 40% of data-sheet peaks in fp16" in row[1]
    assert "TFLOP/s: A100 125, V100 50, T4 26" in row[1] and "what each kind of device has memory for" in row[1]
    assert not any("kinds" in warning for warning in made.warnings)
    given = {"global_batch_size": 1024, "micro_batch_size": 8}
    named = shares(plan(MIXED, scale=AUTO, loop=given, precision={"dtype": "fp16"}, model_facts=LARGE))
    assert named.bounds[0].count("up to 8 a pass") == 3 and "loop.micro_batch_size" in named.reason


def test_the_step_is_predicted_at_the_mean_rate_where_shares_are_unequal() -> None:
    loop = {"global_batch_size": 1024, "micro_batch_size": 4}
    made = [
        plan(MIXED, scale=scale, loop=loop, precision={"dtype": "fp16"}, model_facts=LARGE) for scale in (AUTO, None)
    ]
    assert "each of A100, T4, V100" in reason(made[0], "step_time")
    assert "the slowest of A100, T4, V100" in reason(made[1], "step_time")


def test_equal_shares_and_one_worker_need_no_measurement() -> None:
    assert "shares" not in plan(MIXED).choices()
    (warning,) = [text for text in plan(MIXED).warnings if "kinds" in text]
    assert "scale.shares auto" in warning
    assert value(plan(CPU, scale=AUTO), "shares") == "equal" and "one worker" in reason(plan(CPU, scale=AUTO), "shares")


def test_workers_on_cpus_have_eight_micro_batches_each_to_move() -> None:
    made = plan(CPU, scale={**AUTO, "workers": 2}, loop={"global_batch_size": 64})
    assert value(made, "micro_batch_size") == 4 and "/ 8" in reason(made, "micro_batch_size")
    assert value(made, "accumulation") == 8 and shares(made).bounds == ()
    whole = plan(CPU, scale={**AUTO, "workers": 2}, loop={"global_batch_size": 64, "micro_batch_size": 32})
    assert value(whole, "shares") == "equal" and "lower loop.micro_batch_size" in reason(whole, "shares")


@pytest.mark.parametrize("hosts", [1, "colocated"])
def test_with_experts_outside_the_workers_shares_stay_equal(hosts: Any) -> None:
    made = plan(CPU, scale={**AUTO, "workers": 2}, experts_hosts=hosts)
    assert value(made, "shares") == "equal" and "experts.hosts 0" in reason(made, "shares")
    assert value(made, "micro_batch_size") == 16, "no finer than without"
    assert isinstance(plan(CPU, scale={**AUTO, "workers": 2}, experts_hosts=0).choices()["shares"], Deferred)


def test_a_kind_without_a_rate_is_measured_all_the_same() -> None:
    odd = machines(host("a", A100, ("Own Brand", (8, 0)), each=1))
    assert "the peak rate is unknown for Own Brand" in shares(plan(odd, scale=AUTO)).reason


def test_fp32_layers_are_named_or_measured_or_change_nothing() -> None:
    assert "fp32_layers" not in plan().choices()
    named = plan(precision={"dtype": "bf16", "fp32_layers": ["head", "blocks.0"]})
    assert value(named, "fp32_layers") == ["head", "blocks.0"]
    assert next(text for name, *text in named.rows() if name == "fp32_layers")[0] == "head, blocks.0"
    auto = plan(precision={"dtype": "bf16", "fp32_layers": "auto"}).choices()["fp32_layers"]
    assert isinstance(auto, Deferred) and "one layer at a time" in auto.how
    for asked in ("auto", ["head"]):
        made = plan(precision={"dtype": "fp32", "fp32_layers": asked})
        assert value(made, "fp32_layers") == [] and "computes in fp32" in reason(made, "fp32_layers")
        assert any("fp32_layers changes nothing" in text for text in made.warnings) == (asked != "auto")
    assert Plan.from_json(named.to_json()) == named
