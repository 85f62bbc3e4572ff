"""What is printed of a plan: the grouped table, and the lines with which a training begins."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cluster.devices.inventory import Device, Inventory, Node
from jobs.driver.plan_table import GROUPS, ResumedFrom, print_plan, print_start
from jobs.driver.planning import plan_job
from jobs.job.spec import load_spec
from raytrain.plan.choice import Deferred
from raytrain.plan.plan import Plan

MACHINE = Inventory((Node("box", 4, 8 << 30),), source="a test", cpu_model="c", cpu_flags={})


def recipe(*overrides: str) -> Plan:
    return plan_job(load_spec(None, overrides), inventory=MACHINE)


def printed(show: Any, plan: Plan, *, terminal: bool = False, **options: Any) -> list[str]:
    out = io.StringIO()
    show(plan, Console(file=out, width=80, force_terminal=terminal, color_system=None), **options)
    return out.getvalue().splitlines()


def test_every_decision_belongs_to_one_part_of_the_table() -> None:
    known = [name for names in GROUPS.values() for name in names]
    fields = {name for name, about in Plan.__dataclass_fields__.items() if "Choice" in str(about.type)}
    assert len(known) == len(set(known)) and set(known) == fields


@pytest.mark.parametrize("terminal", [False, True])
def test_the_table_is_grouped_and_says_each_fact_once(terminal: bool) -> None:
    lines = printed(print_plan, recipe("loop.deterministic=true", "save.dir=some/where"), terminal=terminal)
    groups = [*GROUPS, "keys"]
    assert [line.removeprefix("# ") for line in lines if line.removeprefix("# ") in groups] == groups
    text = "\n".join(lines)
    assert text.count("loop.max_steps") == text.count("optim.lr") == text.count("no GPU (") == 1
    assert "loop.deterministic" in text and " true " in text and '"' not in text, "as people write it"
    assert not any(line.strip().startswith("strategy") for line in lines) and "effective batch" not in text, (
        "one worker, whose batch is the whole one"
    )
    if terminal:
        assert max(map(len, lines)) <= 80
    else:
        assert all(line == line.rstrip() and "  " not in line.replace("  # ", "") for line in lines[2:])


def test_several_workers_bring_back_what_one_makes_pointless() -> None:
    lines = printed(print_plan, recipe("scale.workers=2", "experts.hosts=0", "loop.global_batch_size=47"))
    names = {line.partition(":")[0] for line in lines}
    assert {"strategy", "worker placement", "backend"} <= names


def test_a_training_begins_with_at_most_eight_lines_of_80_columns() -> None:
    plan = replace(recipe(), warnings=[])
    lines = printed(print_start, plan, terminal=True, warnings=[])
    assert [line.split()[0] for line in lines] == ["machine", "model", "data", "batch", "precision", "run"]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "4 CPU cores, no GPU",
        "moe_gpt, 2.71 M parameters",
        "84,374 rows of 32 tokens, 9,374 held out, 2.86 MiB, resident",
        "48 rows",
        "400 steps",
    ):
        assert part in text, part
    two = printed(print_start, plan, warnings=["one", "two"])
    assert two[6:] == ["warning: one", "warning: two"]
    many = printed(print_start, plan, warnings=["one", "two", "three"])
    assert many[6:] == ["warning: one", "warning: and 2 more (-v, or the report)"]
    assert len(printed(print_start, plan, warnings=["one", "two", "three"], every=True)) == 9


def test_a_resumed_training_says_from_where_and_what_it_takes_over() -> None:
    open_ = {"precision": Deferred("measured", ("bf16", "fp32")), "micro_batch_size": Deferred("measured", (1, 48))}
    plan = replace(recipe(), warnings=[], **open_)
    before = ResumedFrom(276, 2, {"precision": "fp32", "micro_batch": 16})
    lines = printed(print_start, plan, terminal=True, warnings=[], resumed=before)
    assert "precision fp32, as before" in lines
    assert any("micro-batches of 16, as before" in line for line in lines)
    assert lines[-1] == "resuming  from step 276 (checkpoints/step_00000276), attempt 2"
    new = printed(print_start, plan, terminal=True, warnings=[])
    assert "precision bf16 or fp32, measured at the start" in new and not any("before" in line for line in new)


def test_machines_are_counted_by_kind() -> None:
    gpus = tuple(Device("cuda", "NVIDIA H100", 80 << 30, (9, 0), f"GPU-{index}", index) for index in range(8))
    nodes = tuple(Node(name, 32, 512 << 30, devices=gpus) for name in ("a", "b"))
    pair = Inventory(nodes, source="a test", cpu_model="c", cpu_flags={})
    (machine, *_) = printed(print_start, plan_job(load_spec(None), inventory=pair), warnings=[])
    assert machine.startswith("machine   2 nodes, 64 CPU cores, 16 x NVIDIA H100, ")
    plain = tuple(Node(name, 4, 8 << 30) for name in "abc")
    there = Inventory(plain, source="Ray cluster at x", cpu_model="c", cpu_flags={})
    (machine, *_) = printed(print_start, plan_job(load_spec(None), inventory=there), warnings=[])
    assert machine.startswith("machine   Ray cluster at x: 3 nodes, 12 CPU cores, no GPU, "), machine
