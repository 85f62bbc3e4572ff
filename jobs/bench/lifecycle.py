"""Bench `lifecycle`: what experts that come and go cost: while nothing happens, and in the steps of their changes.

An idle lifecycle is compared with none, in one process, on the same tensors: its bounds leave it nothing to do. Changes
are timed in a worker with two hosts; a birth, a merge or a prune happens at the end of a step, so the larger of that
step and the next one counts, over the median of those around them.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from cluster.config import Count
from experts.lifecycle.policy import merge
from experts.lifecycle.table import Change, ExpertTable
from jobs.bench.harness.measuring import BenchMeasurement, Goal, equal_series
from jobs.bench.harness.options import key
from jobs.bench.harness.processes import Arms
from jobs.bench.harness.sessions import SessionArm, alternate_steps, restored_threads, write_text
from jobs.bench.moves import AROUND, ExpertsTrainer, MoeOptions, moe_job, over_around, run_member, start_trainer

IDLE_GOAL = Goal(at_most=1.01)
CHANGE_GOAL = Goal(at_most=1.5)
OFF, ON = "without", "idle"
KINDS = {"expert_born": "birth", "expert_merged": "merge", "expert_pruned": "prune"}


class LifecycleOptions(MoeOptions):
    blocks: Count = key(30, "repetitions; each runs one block of both arms", quick=3)
    block_steps: Count = key(10, "steps of one block", quick=4)
    steps: Count = key(300, "steps of the run with changes on two hosts", quick=60)
    every: Count = key(12, "steps from one change of that run to the next", quick=5)


def run(options: LifecycleOptions, found: BenchMeasurement) -> None:
    found.block = f"seconds per step, the mean of {options.block_steps}"
    with Arms() as arms, restored_threads(1):
        number = max(options.steps, (2 + options.blocks) * options.block_steps)
        text = write_text(arms.folder, options, steps=number)
        _measure_idle(options, found, text)
        if found.passed:
            _measure_changes(options, found, arms, text)


def _measure_idle(options: LifecycleOptions, found: BenchMeasurement, text: Path) -> None:
    found.say(f"{options.blocks} blocks of {options.block_steps} steps with and without an idle lifecycle")
    cycle = {"max_experts": options.experts, "birth": {"uncertainty": 1.0}, "prune": {"idle_steps": None}}
    sections = {OFF: {}, ON: {"lifecycle": {**cycle, "merge": {"similarity": None}, "every": options.every}}}
    arms = {
        name: SessionArm(moe_job(options, text, name, {"num_experts": options.experts, **more}))
        for name, more in sections.items()
    }
    alternate_steps(found, arms, steps=options.block_steps, blocks=options.blocks)
    label = "the losses with an idle lifecycle are those without"
    if found.gate(equal_series(label, arms[ON].losses, arms[OFF].losses)):
        found.compare(found.arms, of=ON, to=OFF, name="a step with an idle lifecycle / without", goal=IDLE_GOAL)


def _measure_changes(options: LifecycleOptions, found: BenchMeasurement, arms: Arms, text: Path) -> None:
    found.say(f"{options.steps} steps with changes on two hosts")
    cycle = {"max_experts": options.experts, "birth": {"uncertainty": 1.0}, "prune": {"idle_steps": None}}
    experts = {"num_experts": options.experts // 2, "balance": "none", "lifecycle": cycle}
    job = moe_job(options, text, "changes", experts)
    arm = start_trainer(arms, "changes", "jobs.bench.lifecycle:run_changing", job, hosts=2, every=options.every)
    arm.await_ready()
    answer = arm.ask(steps=options.steps)
    events = [(KINDS[kind], fields["step"]) for kind, fields in answer["events"] if kind in KINDS]
    found.values |= {"step_times": answer["times"], "changes": events}
    for kind in KINDS.values():
        steps = dict.fromkeys(step for one, step in events if one == kind)
        # the first steps allocate what the others have
        ratios = over_around(answer["times"], ((step - 1, step + 1) for step in steps if step > AROUND))
        effect = f"the step of a {kind} takes at most {CHANGE_GOAL.at_most} median steps, on two hosts"
        if not ratios:
            found.cannot(effect, "there was none in this run")
            continue
        middle = statistics.median(ratios)
        found.claim(effect, CHANGE_GOAL.met(middle), f"median {middle:.3f}, worst {max(ratios):.3f} of {len(ratios)}")


def run_changing(settings: dict[str, Any], rank: int) -> None:
    """Run as the worker (rank 0), whose experts change every `every` steps, or as a host."""
    if rank:
        run_member(settings, rank)
        return
    trainer = ExpertsTrainer(settings)
    living: Any = trainer.session.trainable.state_parts()["lifecycle"]  # pyright: ignore[reportOptionalCall]
    living.sleep = lambda step: [] if step % settings["every"] else wanted(living.table, step // settings["every"])
    trainer.serve()


def wanted(table: ExpertTable, turn: int) -> list[Change]:
    """In turn a birth, a merge, a birth and a prune, in one layer after the other."""
    layer = turn // 4 % len(table.layers)
    first, *_, last = table.ids(layer)
    if turn % 2 == 0:
        return [Change("birth", layer, (first, table.next_ids[layer]), "a bench", slot=table.free_slots(layer)[0])]
    return [
        merge(table, layer, first, last, "a bench") if turn % 4 == 1 else Change("prune", layer, (last,), "a bench")
    ]
