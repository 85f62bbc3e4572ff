"""What a plan says of unequal workers, and of layers that stay in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import CPU, DATA, GIB, machines, plan, reason, value

from cluster.devices.inventory import Device, Node
from raytrain.plan.choice import Deferred
from raytrain.plan.plan import Plan

A100, V100, T4 = ("A100", (8, 0)), ("V100", (7, 0)), ("T4", (7, 5))
MEMORY = {"A100": 80 * GIB, "V100": 32 * GIB, "T4": 16 * GIB}


def host(name: str, *kinds: tuple[str, tuple[int, int]], each: int = 4) -> Node:
    """A node with so many GPUs of each of these kinds."""
    wanted = [kind for kind in kinds for _ in range(each)]
    found = [Device("cuda", n, MEMORY.get(n, GIB), power, f"{name}-{i}", i) for i, (n, power) in enumerate(wanted)]
    return Node(name, 64, 512 * GIB, tuple(found))


MIXED = machines(host("a", A100, T4), host("b", A100, A100), host("c", V100, V100), host("d", T4, V100))
AUTO = {"shares": "auto"}


def shares(made: Plan) -> Deferred:
    choice = made.choices()["shares"]
    assert isinstance(choice, Deferred)
    return choice


def test_the_shares_of_mixed_gpus_are_measured_and_the_kinds_are_named() -> None:
    facts = replace(DATA, train_rows=2000)
    made = plan(MIXED, data_facts=facts, scale=AUTO, loop={"global_batch_size": 1024}, precision={"dtype": "fp16"})
    assert value(made, "workers") == 32
    assert shares(made).reason.endswith("; 12 A100, 8 T4, 12 V100")
    row = next(text for name, *text in made.rows() if name == "shares")
    assert row[1].startswith("measured at the start, on all workers at the same time")
    assert not any("kinds" in warning for warning in made.warnings)


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
