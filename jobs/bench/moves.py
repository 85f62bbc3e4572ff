"""Bench `moves`: training with a skewed, shifting load on hosts of unequal speed; experts that move between hosts,
against a fixed round-robin placement.

Both arms train the same model on the same text, each with its own worker and hosts; blocks alternate. The preferred
experts change every `shift_steps` steps. A slow host computes everything several times. The times include the moves;
the moving arm starts without knowledge of load or speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.config import Count
from experts.member.shard import ExpertShard
from experts.router import TopKRouter
from jobs.bench.experts import FileConnection, group_settings, serve_host
from jobs.bench.harness.measuring import BenchMeasurement, Goal, alternate, equal_series
from jobs.bench.harness.options import TextOptions, key
from jobs.bench.harness.processes import ArmProcesses, Arms, serve_blocks
from jobs.bench.harness.sessions import SessionArm, gpt_model, job_of, write_text
from raytrain.train.memory.device import keep_freed_memory

#: Seconds per step of round-robin over those of moving experts.
GOAL = Goal(at_least=1.2)
#: The step after a switch of placements over the median of so many steps on each side.
SWITCH_GOAL, AROUND = Goal(at_most=1.5), 10
ROUND_ROBIN, MOVING = "round-robin", "moving"


class MoeOptions(TextOptions):
    """Options of a bench that trains a small GPT with experts."""

    block_steps: Count = key(20, "steps of one block", quick=8)
    layers: Count = key(2, "of the GPT", quick=1)
    width: Count = key(256, "of the GPT", quick=32)
    context: Count = key(128, "tokens of a row", quick=16)
    batch: Count = key(8, "rows of a step", quick=4)
    experts: Count = key(8, "of each layer; with a lifecycle the room for them")


class MovesOptions(MoeOptions):
    blocks: Count = key(15, "repetitions; each runs one block of both arms", quick=3)
    skew: float = key(0.4, "added to the score of the preferred expert; to the n-th, 1/n of it", ge=0)
    shift_steps: Count = key(60, "steps until other experts are preferred", quick=12)
    every: Count = key(10, "experts.rebalance_every of the moving arm", quick=4)
    slowness: list[Count] = key([1, 3], "times that each host computes everything", quick=[1, 2])


def run(options: MovesOptions, found: BenchMeasurement) -> None:
    found.block = f"seconds per step, the mean of {options.block_steps}"
    reports: dict[str, list[dict[str, Any]]] = {ROUND_ROBIN: [], MOVING: []}
    with Arms() as started:
        arms = _start(options, started)

        def block(name: str) -> float:
            reports[name].append(arms[name].ask(steps=options.block_steps))
            return reports[name][-1]["seconds"] / options.block_steps

        found.say(f"{options.blocks} blocks of {options.block_steps} steps, two arms")
        times = alternate({name: partial(block, name) for name in arms}, blocks=options.blocks, dropped=0)

    def all_of(name: str, what: str) -> list[Any]:
        return [one for report in reports[name] for one in report[what]]

    label = "losses of the moving arm equal those of the round-robin arm"
    if not found.gate(equal_series(label, all_of(MOVING, "losses"), all_of(ROUND_ROBIN, "losses"))):
        return
    found.arms |= times
    speeds = " : ".join(str(1 / factor)[:5] for factor in options.slowness)
    label = f"step on hosts {speeds} in speed, round-robin / moving by measured load, moves included"
    found.compare(times, of=ROUND_ROBIN, to=MOVING, name=label, goal=GOAL)
    moves = [fields for kind, fields in all_of(MOVING, "events") if kind == "move"]
    steps = {name: all_of(name, "times") for name in arms}
    after = over_around(steps[MOVING], ((fields["step"], fields["step"] + 1) for fields in moves))
    found.values |= {
        "moves": moves,
        "decisions": [fields for kind, fields in all_of(MOVING, "events") if kind == "decision"],
        "step_times": steps,
        "after_switch": after,
    }
    if after:
        worst, middle = max(after), statistics.median(after)
        effect = f"the step after a switch takes at most {SWITCH_GOAL.at_most} median steps"
        found.claim(effect, SWITCH_GOAL.met(middle), f"median {middle:.3f}, worst {worst:.3f} of {len(after)} switches")


def _start(options: MovesOptions, started: Arms) -> dict[str, ArmProcesses]:
    """The processes of both arms, once they are ready."""
    text = write_text(started.folder, options, steps=(2 + options.blocks) * options.block_steps)
    common = {"num_experts": options.experts, "top_k": 2, "balance": "none", "noise": 1.0}
    placements = {
        ROUND_ROBIN: {"placement": "round_robin"}, MOVING: {"placement": "auto", "rebalance_every": options.every},
    }  # fmt: skip
    more = {"skew": options.skew, "shift_steps": options.shift_steps, "slowness": options.slowness}
    arms = {
        name: start_trainer(
            started, name, "jobs.bench.moves:run_member", moe_job(options, text, name, {**common, **placement}),
            hosts=len(options.slowness), **more,
        )
        for name, placement in placements.items()
    }  # fmt: skip
    started.await_ready()
    return arms


def moe_job(options: MoeOptions, text: Any, name: str, experts: dict[str, Any]) -> dict[str, Any]:
    """The job that trains the GPT with this section `experts`."""
    model = gpt_model(options, builder="experts.models:moe_gpt")
    loop = {"global_batch_size": options.batch, "log_every": 1, "micro_batch_size": options.batch}
    return job_of(options, model, text, name=name, loop=loop, optim={"schedule": "constant"}, experts=experts)


def start_trainer(arms: Arms, name: str, target: str, job: dict[str, Any], *, hosts: int, **more: Any) -> ArmProcesses:
    """Start the processes of an arm: a worker that trains the job on request, and so many hosts; `more` are settings of
    theirs."""
    job = {**job, "experts": {"hosts": 1, **job["experts"]}}
    settings = group_settings(arms, name, job["experts"], job["model"], workers=1, hosts=hosts)
    return ArmProcesses(arms, name, target, {**settings, "job": job, **more}, processes=1 + hosts, connecting=1)


def over_around(times: list[float], spans: Iterable[tuple[int, int]]) -> list[float]:
    """The slowest step of each span, from its begin to before its end, over the median of the steps around it."""
    found = []
    for begin, end in spans:
        around = times[max(0, begin - AROUND) : begin] + times[end : end + AROUND]
        if begin < len(times) and around:
            found.append(max(times[begin:end]) / statistics.median(around))
    return found


# ---------------------------------------------------------------- in the processes, of bench `lifecycle` too


class ExpertsTrainer:
    """The worker: a session whose routers are biased towards some experts, and towards others after each shift."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._arm = SessionArm(settings["job"], connection=FileConnection(settings, rank=0))
        self.session = self._arm.session
        self._routers = [part for part in self.session.trainable.module.modules() if isinstance(part, TopKRouter)]
        self._skew, self._shift_steps = settings.get("skew", 0.0), settings.get("shift_steps")
        self._draw = np.random.default_rng(settings["job"]["seed"])

    def serve(self) -> None:
        """Train blocks for the bench, then let the hosts exit."""
        serve_blocks(self._run_block)
        self.session.full_module()

    def _run_block(self, request: dict[str, Any]) -> dict[str, Any]:
        self._arm.log.events.clear()
        self._arm.losses.clear()
        times = []
        for _ in range(request["steps"]):
            if self._shift_steps and self.session.state.step % self._shift_steps == 0:
                for router in self._routers:  # other experts in every layer, by a bias like the loss-free one
                    ranks = self._draw.permutation(router.num_experts) + 1
                    router.bias_E.copy_(torch.tensor(self._skew / ranks, dtype=router.bias_E.dtype))
            times.append(self._arm.run(1))
        return {"seconds": sum(times), "times": times, "losses": self._arm.losses, "events": self._arm.log.events}


def run_member(settings: dict[str, Any], rank: int) -> None:
    """Run as the worker (rank 0), or as a host until the worker lets it exit."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if rank == 0:
        ExpertsTrainer(settings).serve()
        return
    if "slowness" in settings:
        slow_down(settings["slowness"][rank - 1])
    serve_host(settings, rank)


def slow_down(factor: int) -> None:
    """Make this host's experts compute everything `factor` times: each repetition is an unused forward of the same rows
    for a forward, and two for a backward."""

    def slowed(method: Any, times: int) -> Any:
        def run(shard: Any, layer: int, micro_batch: int, rows: Tensor, sources: Any, **more: Any) -> Tensor:
            with shard.timer.measure(), torch.no_grad():
                for _ in range(times if sources[0] else 0):
                    shard.layers[layer].forward(rows, sources[0])
            return method(shard, layer, micro_batch, rows, sources, **more)

        return run

    ExpertShard.forward = slowed(ExpertShard.forward, factor - 1)
    ExpertShard.backward = slowed(ExpertShard.backward, 2 * (factor - 1))
