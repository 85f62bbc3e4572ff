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

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cluster.config import Count
from experts.config import ExpertsConfig, LayerShape
from experts.member.shard import ExpertShard
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import Placement, equal_hosts
from experts.router import TopKRouter
from experts.sizes import hidden_widths
from jobs.bench.experts import FileConnection, serve_host
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer, serve_blocks
from jobs.bench.harness.sessions import SessionArm
from raytrain.train.memory.device import keep_freed_memory

#: Seconds per step of round-robin over those of moving experts.
GOAL = Goal(at_least=1.2)
#: The step after a switch of placements over the median step around it.
SWITCH_GOAL = Goal(at_most=1.5)
AROUND = 10
ROUND_ROBIN, MOVING = "round-robin", "moving"


class MovesOptions(BenchOptions):
    """Options of bench `moves`."""

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


def run(options: MovesOptions, found: BenchMeasurement, say: Say) -> None:
    """Measure; see `MovesOptions`.

    Raises:
        RunError: a process died.
    """
    found.block = f"seconds per step, the mean of {options.block_steps}"
    with ArmServer() as server:
        steps = (2 + options.blocks) * options.block_steps
        text = write_text(server.folder, batch=options.batch, context=options.context, steps=steps, seed=options.seed)
        arms = {name: MovesArm(server, name, options, text) for name in (ROUND_ROBIN, MOVING)}
        for arm in arms.values():
            arm.await_ready()
        _measure(options, found, arms, say)


def settings_of(
    name: str, server: ArmServer, section: ExpertsConfig, job: dict[str, Any], *, hosts: int, **more: Any
) -> dict[str, Any]:
    """Settings of the processes of an arm: one worker that trains the job's GPT, and so many hosts.

    Args:
        section: the section `experts` of the job. more: of `ExpertsTrainer` and `run_member`.
    """
    width, layers = job["model"]["width"], job["model"]["layers"]
    shape = LayerShape(width, tuple(hidden_widths(section, width)), "gelu")
    return {
        "arm": name, "workers": 1, "hosts": hosts, "seed": job["seed"], "job": job,
        "store": str(server.folder / f"{name}.store"), "rules": PlacementRules.of(section).to_json(),
        "shapes": [shape.to_json()] * layers, **more,
    }  # fmt: skip


class MovesArm(ArmProcesses):
    """The processes of one arm, and the reports of its worker."""

    def __init__(self, server: ArmServer, name: str, options: MovesOptions, text: Path) -> None:
        moving = name == MOVING
        experts = {
            "num_experts": options.experts, "top_k": options.top_k, "balance": "none", "noise": 1.0, "hosts": 1,
            "placement": "auto" if moving else "round_robin", "rebalance_every": options.every if moving else None,
        }  # fmt: skip
        job = job_of(
            options, gpt_model(options, builder="experts.models:moe_gpt"), text, name=name,
            loop={"global_batch_size": options.batch, "log_every": 1}, optim={"schedule": "constant"}, experts=experts,
        )  # fmt: skip
        settings = settings_of(
            name, server, ExpertsConfig.model_validate(experts), job, hosts=len(options.slowness),
            skew=options.skew, shift_steps=options.shift_steps, slowness=options.slowness,
        )  # fmt: skip
        processes = 1 + len(options.slowness)
        super().__init__(server, name, "jobs.bench.moves:run_member", settings, processes=processes, connecting=1)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def run_block(self, steps: int) -> float:
        """Train `steps` steps; returns the seconds per step."""
        answer = self.ask(steps=steps)
        self.times += answer["times"]
        self.losses += answer["losses"]
        self.events += answer["events"]
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
    moves = [fields for kind, fields in moving.events if kind == "move"]
    after = _after_switches(moving.times, [fields["step"] for fields in moves])
    found.values |= {
        "moves": moves,
        "decisions": [fields for kind, fields in moving.events if kind == "decision"],
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


# ---------------------------------------------------------------- in the processes, of bench `lifecycle` too


class ExpertsTrainer:
    """The worker: a session whose routers are biased towards some experts, and towards others after each shift."""

    def __init__(self, settings: dict[str, Any]) -> None:
        connection = FileConnection(settings, 0, partial(_place, settings))
        self._arm = SessionArm(settings["job"], connection=connection)
        self.session = self._arm.session
        self._routers = [part for part in self.session.trainable.module.modules() if isinstance(part, TopKRouter)]
        self._skew, self._shift_steps = settings.get("skew", 0.0), settings.get("shift_steps")
        self._draw = np.random.default_rng(settings["seed"])

    def serve(self, arm: str) -> None:
        """Train blocks for the bench, then let the hosts exit."""
        serve_blocks(arm, self._run_block)
        self.session.full_module()

    def _run_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train a block; returns the seconds of each step, the losses and the events."""
        self._arm.log.events.clear()
        self._arm.losses.clear()
        times = []
        for _ in range(request["steps"]):
            if self._shift_steps and self.session.state.step % self._shift_steps == 0:
                self._shift_preference()
            times.append(self._arm.run(1))
        return {"seconds": sum(times), "times": times, "losses": self._arm.losses, "events": self._arm.log.events}

    def _shift_preference(self) -> None:
        """Prefer other experts in every layer, with a bias on their scores like the loss-free bias."""
        for router in self._routers:
            ranks = self._draw.permutation(router.num_experts) + 1
            router.bias_E.copy_(torch.tensor(self._skew / ranks, dtype=router.bias_E.dtype))


def run_member(settings: dict[str, Any], rank: int) -> None:
    """Run as the worker (rank 0), or as a host until the worker lets it exit."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if rank == 0:
        ExpertsTrainer(settings).serve(settings["arm"])
        return
    if "slowness" in settings:
        slow_down(settings["slowness"][rank - 1])
    shapes = [LayerShape.from_json(row) for row in settings["shapes"]]
    serve_host(settings, rank, _place(settings, shapes, PlacementRules.from_json(settings["rules"])))


def _place(settings: dict[str, Any], shapes: list[LayerShape], rules: PlacementRules) -> Placement:
    """The initial placement in all processes, before the hosts' speeds are known."""
    return starting_placement(rules, shapes, equal_hosts(settings["hosts"]))


def slow_down(factor: int) -> None:
    """Make this host's experts compute everything `factor` times: each repetition is an unused forward of the same rows
    for a forward, and two for a backward."""
    forward, backward = ExpertShard.forward, ExpertShard.backward

    def repeat_forward(shard: ExpertShard, layer: int, rows: Tensor, counts: list[int], times: int) -> None:
        with shard.timer.measure(), torch.no_grad():
            for _ in range(times if counts else 0):
                shard.layers[layer].forward(rows, counts)

    def slow_forward(
        self: ExpertShard, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool
    ) -> Tensor:
        repeat_forward(self, layer, rows, sources[0], factor - 1)
        return forward(self, layer, micro_batch, rows, sources, keep=keep)

    def slow_backward(
        self: ExpertShard, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]
    ) -> Tensor:
        repeat_forward(self, layer, grads, sources[0], 2 * (factor - 1))
        return backward(self, layer, micro_batch, grads, sources)

    ExpertShard.forward, ExpertShard.backward = slow_forward, slow_backward  # type: ignore[method-assign]
