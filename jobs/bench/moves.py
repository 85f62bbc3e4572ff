"""Bench `moves`: training with a skewed, shifting load on hosts of unequal speed; experts that move between hosts,
against a fixed round-robin placement.

Both arms train the same model on the same text, each with its own worker and hosts; blocks alternate. The preferred
experts change every `shift_steps` steps. A slow host computes everything several times. The times include the moves;
the moving arm starts without knowledge of load or speed.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from experts.config import ExpertsConfig, LayerShape
from experts.placement.policy import PlacementRules
from experts.sizes import hidden_widths
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer

#: Seconds per step of round-robin over those of moving experts.
GOAL = Goal(at_least=1.2)
#: The step after a switch of placements over the median step around it.
SWITCH_GOAL = Goal(at_most=1.5)
AROUND = 10
ROUND_ROBIN, MOVING = "round-robin", "moving"


class MovesOptions(BenchOptions):
    """Moving experts against round-robin, with a shifting load on expert hosts of unequal speed."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 32, "context": 16, "batch": 4, "blocks": 3, "block_steps": 8, "shift_steps": 12,
        "every": 4, "slowness": [1, 2],
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions; each runs one block of both arms")
    block_steps: Count = Field(20, description="steps of one block")
    layers: Count = Field(2, description="of the GPT")
    width: Count = Field(256, description="of the GPT")
    context: Count = Field(128, description="tokens of a window")
    batch: Count = Field(8, description="rows of a step")
    experts: Count = Field(8, description="of each layer")
    top_k: Count = Field(2, description="experts of a token")
    skew: float = Field(0.4, ge=0, description="added to the score of the preferred expert; to the n-th, 1/n of it")
    shift_steps: Count = Field(60, description="steps until other experts are preferred")
    every: Count = Field(10, description="experts.rebalance_every of the moving arm")
    slowness: list[Count] = Field([1, 3], description="times that each host computes everything")


def run(options: MovesOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `MovesOptions`.

    Raises:
        RunError: a process died.
    """
    block = f"seconds per step, the mean of {options.block_steps}"
    found = BenchMeasurement("moves", quick, options.model_dump(), block)
    with ArmServer() as server:
        steps = (2 + options.blocks) * options.block_steps
        text = write_text(server.folder, batch=options.batch, context=options.context, steps=steps, seed=options.seed)
        arms = {name: MovesArm(server, name, options, text) for name in (ROUND_ROBIN, MOVING)}
        for arm in arms.values():
            arm.await_ready()
        _measure(options, found, arms, say)
    return found


def settings_of(options: MovesOptions, name: str, folder: Path, text: Path) -> dict[str, Any]:
    """Settings of the processes of an arm."""
    moving = name == MOVING
    experts = {
        "num_experts": options.experts, "top_k": options.top_k, "balance": "none", "noise": 1.0, "hosts": 1,
        "placement": "auto" if moving else "round_robin", "rebalance_every": options.every if moving else None,
    }  # fmt: skip
    section = ExpertsConfig(**experts)
    shape = LayerShape(options.width, tuple(hidden_widths(section, options.width)), "gelu")
    rules = PlacementRules(section.placement, 0, section.rebalance_every)
    return {
        "arm": name, "workers": 1, "hosts": len(options.slowness),
        "seed": options.seed, "skew": options.skew, "shift_steps": options.shift_steps,
        "slowness": options.slowness, "store": str(folder / f"{name}.store"), "rules": rules.to_json(),
        "shapes": [shape.to_json()] * options.layers,
        "job": job_of(
            options, gpt_model(options, builder="experts.models:moe_gpt"), text, name=name,
            loop={"global_batch_size": options.batch, "log_every": 1}, optim={"schedule": "constant"}, experts=experts,
        ),
    }  # fmt: skip


class MovesArm(ArmProcesses):
    """The processes of one arm, and the reports of its worker."""

    def __init__(self, server: ArmServer, name: str, options: MovesOptions, text: Path) -> None:
        settings, processes = settings_of(options, name, server.folder, text), 1 + len(options.slowness)
        target = "jobs.bench.moves_member:main"
        super().__init__(server, name, target, settings, processes=processes, connecting=1)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.notices: list[tuple[str, dict[str, Any]]] = []

    def run_block(self, steps: int) -> float:
        """Train `steps` steps; returns the seconds per step."""
        answer = self.ask_slowest(steps=steps)
        self.times += answer["times"]
        self.losses += answer["losses"]
        self.notices += [tuple(notice) for notice in answer["notices"]]
        return answer["seconds"] / steps


def _measure(options: MovesOptions, found: BenchMeasurement, arms: dict[str, MovesArm], say: Say) -> None:
    say(f"{options.blocks} blocks of {options.block_steps} steps, two arms")
    blocks = {name: partial(arm.run_block, options.block_steps) for name, arm in arms.items()}
    times = alternate(blocks, blocks=options.blocks, dropped=0)
    still, moving = arms[ROUND_ROBIN], arms[MOVING]
    label = "losses of the moving arm equal those of the round-robin arm"
    if not found.gate(equal_series(label, moving.losses, still.losses)):
        return
    found.arms |= times
    ratio = found.compare(times, of=ROUND_ROBIN, to=MOVING, goal=GOAL)
    moves = [fields for kind, fields in moving.notices if kind == "move"]
    after = _after_switches(moving.times, [fields["step"] for fields in moves])
    found.values |= {
        "moves": moves,
        "decisions": [fields for kind, fields in moving.notices if kind == "decision"],
        "step_times": {name: arm.times for name, arm in arms.items()},
        "after_switch": after,
        "whole_run": sum(still.times) / sum(moving.times),
    }
    found.claim(
        f"on hosts {' : '.join(str(1 / factor)[:5] for factor in options.slowness)} in speed, experts moved by "
        "measured load train at least 1.2 times as fast, moves included",
        bool(ratio.met),
        f"{sum(still.times) / sum(moving.times):.3f} over all {len(still.times)} steps, {len(moves)} moves",
    )
    if after:
        worst, middle = max(after), statistics.median(after)
        found.claim(
            f"the step after a switch takes at most {SWITCH_GOAL.at_most} median steps",
            SWITCH_GOAL.met(middle),
            f"median {middle:.3f}, worst {worst:.3f} of {len(after)} switches",
        )


def _after_switches(times: list[float], steps: list[int]) -> list[float]:
    """The time of the step after each switch over the median of the steps around it; `steps` count from 1."""
    found = []
    for step in steps:
        around = times[max(0, step - AROUND) : step] + times[step + 1 : step + 1 + AROUND]
        if step < len(times) and around:
            found.append(times[step] / statistics.median(around))
    return found
