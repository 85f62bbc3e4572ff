"""Bench `moves`: training with a load that is skewed and shifts, on hosts of unequal speed; experts that move, against
experts that stay where round-robin put them.

Both arms train the same model on the same text, each with a worker and hosts of its own, and take turns block by block.
Which experts are liked changes every `shift_steps`. A slow host computes everything several times. The moves are in the
times: the arm begins like one that knows nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experts.config import ExpertsConfig
from experts.placement.starting import PlacementRules
from experts.plan.sizes import hidden_widths
from experts.shapes import LayerShape
from jobs.bench.harness.lines import ADDRESS, Arms, await_end
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, compare, equal_series
from jobs.bench.harness.options import LoopOptions, MovesOptions
from jobs.bench.training.loop_arms import borrowed_environment, make_text
from raytrain.errors import RunError

#: Seconds per step of round-robin over those of experts that move.
GOAL = Goal(at_least=1.2)
#: The step after a switch over the median step around it.
SWITCH_GOAL = Goal(at_most=1.5)
AROUND = 10
ROUND_ROBIN, MOVING = "round-robin", "moving"


def run(options: MovesOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `MovesOptions`.

    Raises:
        RunError: a process died.
    """
    found = BenchMeasurement(
        "moves", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder, borrowed_environment(), Arms() as arms:
        os.environ[ADDRESS] = arms.address
        text = _text(options, Path(folder))
        gangs = {name: MovesGang(arms, name, options, Path(folder), text) for name in (ROUND_ROBIN, MOVING)}
        try:
            for gang in gangs.values():
                gang.await_ready()
            _measure(options, found, gangs, say)
        finally:
            for gang in gangs.values():
                gang.close()
    return found


def _text(options: MovesOptions, folder: Path) -> Path:
    sizes = {"batch": options.batch, "context": options.context, "seed": options.seed}
    steps = {"block_steps": options.block_steps, "blocks": options.blocks}
    return make_text(LoopOptions.model_validate({**sizes, **steps}), folder)


def settings_of(options: MovesOptions, name: str, folder: Path, text: Path) -> dict[str, Any]:
    """What the processes of an arm are told."""
    moving = name == MOVING
    experts = {
        "num_experts": options.experts, "top_k": options.top_k, "balance": "none", "noise": 1.0, "hosts": 1,
        "placement": "auto" if moving else "round_robin", "rebalance_every": options.every if moving else None,
    }  # fmt: skip
    model = {"layers": options.layers, "heads": 4, "width": options.width, "context": options.context}
    section = ExpertsConfig(**experts)
    shape = LayerShape(options.width, tuple(hidden_widths(section, options.width)), "gelu")
    rules = PlacementRules(section.placement, 0, section.rebalance_every)
    return {
        "arm": name, "seed": options.seed, "skew": options.skew, "shift_steps": options.shift_steps,
        "slowness": options.slowness, "store": str(folder / f"{name}.store"), "rules": rules.to_json(),
        "shapes": [shape.to_json()] * options.layers,
        "job": {
            "name": f"bench-{name}", "seed": options.seed,
            "model": {"builder": "experts.models:moe_gpt", **model},
            "data": {"source": "text", "path": str(text), "eval_fraction": 0.0},
            "optim": {"schedule": "constant"},
            "loop": {"max_steps": 1_000_000, "global_batch_size": options.batch, "log_every": 1},
            "scale": {"workers": 1, "mode": "cpu", "threads": 1},
            "experts": experts,
        },
    }  # fmt: skip


class MovesGang:
    """The processes of one arm."""

    def __init__(self, arms: Arms, name: str, options: MovesOptions, folder: Path, text: Path) -> None:
        self.arms, self.name = arms, name
        path = folder / f"{name}.json"
        path.write_text(json.dumps(settings_of(options, name, folder, text)))
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "jobs.bench.experts.moves_member", str(path)]
            self.processes = [
                subprocess.Popen([*command, str(rank)], stdout=log, stderr=log)
                for rank in range(1 + len(options.slowness))
            ]
        self.times: list[float] = []
        self.losses: list[float] = []
        self.notices: list[tuple[str, dict[str, Any]]] = []

    def await_ready(self) -> None:
        """Until the worker is there."""
        alive = lambda: all(process.poll() is None for process in self.processes)  # noqa: E731
        try:
            self.arms.await_arm(self.name, processes=1, alive=alive)
        except RunError as error:
            raise RunError(f"{error}; its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}") from error

    def block(self, steps: int) -> float:
        """Seconds per step of so many."""
        try:
            answer = self.arms.order(self.name, {"steps": steps})
        except RunError as error:
            raise RunError(f"{self.name}: {error}; log:\n{self._log.read_text(errors='replace')[-2000:]}") from error
        self.times += answer["times"]
        self.losses += answer["losses"]
        self.notices += [tuple(notice) for notice in answer["notices"]]
        return answer["seconds"] / steps

    def close(self) -> None:
        """Let them go; whoever does not is killed."""
        self.arms.dismiss(self.name)
        for process in self.processes:
            await_end(process)


def _measure(options: MovesOptions, found: BenchMeasurement, gangs: dict[str, MovesGang], say: Say) -> None:
    say(f"{options.blocks} blocks of {options.block_steps} steps, two arms")
    turns = {name: (lambda gang=gang: gang.block(options.block_steps)) for name, gang in gangs.items()}
    times = alternate(turns, blocks=options.blocks, dropped=0)
    still, moving = gangs[ROUND_ROBIN], gangs[MOVING]
    label = "losses of the arm that moves experts equal those of the arm that does not"
    if not found.gate(equal_series(label, moving.losses, still.losses)):
        return
    found.arms |= times
    ratio = compare(times, of=ROUND_ROBIN, to=MOVING, name=f"{ROUND_ROBIN} / {MOVING}", goal=GOAL)
    found.ratios.append(ratio)
    moves = [fields for kind, fields in moving.notices if kind == "move"]
    after = _after_switches(moving.times, [fields["step"] for fields in moves])
    found.values |= {
        "moves": moves,
        "decisions": [fields for kind, fields in moving.notices if kind == "decision"],
        "step_times": {name: gang.times for name, gang in gangs.items()},
        "after_switch": after,
        "whole_run": sum(still.times) / sum(moving.times),
    }
    found.claim(
        f"on hosts {' : '.join(str(1 / factor)[:5] for factor in options.slowness)} in speed, experts that move by "
        "measured load train at least 1.2 times as fast, the moves counted in",
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
    """Time of the step after each switch over the median of those around it; `steps` count from 1."""
    found = []
    for step in steps:
        around = times[max(0, step - AROUND) : step] + times[step + 1 : step + 1 + AROUND]
        if step < len(times) and around:
            found.append(times[step] / statistics.median(around))
    return found
