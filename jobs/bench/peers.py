"""Bench `peers`: the same model on the same text, trained by raytrain in a Ray worker, Lightning and Accelerate.

Each runs in a separate process; blocks alternate, and a waiting arm uses no CPU. The peers are an optional extra
(`pip install raytrain[peers]`); without it their claims are "not measurable here".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from pydantic import Field

from cluster.config import Count, NonNegativeInt
from cluster.environment import package_version
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, equal_series, median_interval
from jobs.bench.harness.processes import ArmProcesses, ArmServer
from jobs.bench.loop_arms import LOG_EVERY, LoopOptions, OurRun, loop_job, make_text, start_script
from raytrain.errors import InputError, RunError

#: Step time of the faster peer over ours.
GOAL = Goal(at_least=1.0)
#: They compute the gradient norm in float32, we in float64; the losses of the first blocks differ by at most this.
TOLERANCE = 1e-3
PEERS = ("lightning", "accelerate")
END_TIMEOUT_S = 120.0


class PeersOptions(LoopOptions):
    """A step of raytrain against Lightning and Accelerate: same model, text, optimizer and schedule."""

    MEASURES: ClassVar[str] = "a training step against Lightning's and Accelerate's, if they are installed"
    workers: list[Count] = Field([1], description="always one")
    startups: NonNegativeInt = Field(0, description="always 0; bench loop measures the start-up")


def run(options: PeersOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the peers that are installed; see `PeersOptions`.

    Raises:
        InputError: a block does not end with a logged row.
        RunError: an arm died.
    """
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", got=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")
    found = BenchMeasurement(
        "peers", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    installed = [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]
    if installed:
        with ArmServer() as server:
            _measure(options, found, server, installed, say=say)
    _add_versions(found, installed)
    return found


def _measure(options: PeersOptions, found: BenchMeasurement, server: ArmServer, peers: list[str], *, say: Say) -> None:
    from jobs.driver.runtime import connected

    text = make_text(options, server.folder)
    say(f"starting Ray, the plain loop, {' and '.join(peers)}")
    target = "jobs.bench.peers_arms:main"
    others = {
        name: start_script(server, name, target, options, world_size=1, text=text, cwd=server.folder)
        for name in ("plain", *peers)
    }
    ours = OurRun(server, loop_job(options, world_size=1, text=text, save_dir=server.folder / "runs"))
    try:
        with connected("local", num_cpus=2, num_gpus=0, verbose=False):
            for arm in others.values():
                arm.await_ready()
            ours.start()
            _run_blocks(options, found, {"ours": ours, **others}, peers, say=say)
            ours.dismiss()
            ours.join(END_TIMEOUT_S)
    except RunError as error:
        logs = "; ".join(f"{name}: {arm.log_tail()}" for name, arm in others.items())
        raise RunError(f"{error}; ours: {ours.error or 'running'}; {logs}") from error
    finally:
        ours.dismiss()


def _run_blocks(
    options: PeersOptions, found: BenchMeasurement, arms: Mapping[str, OurRun | ArmProcesses], peers: list[str], *,
    say: Say,
) -> None:  # fmt: skip
    losses: dict[str, list[float]] = {name: [] for name in arms}

    def block(name: str) -> float:
        answer = arms[name].ask_slowest(steps=options.block_steps, clip="torch")
        losses[name] += answer["losses"]
        return answer["seconds"] / options.block_steps

    blocks = {name: partial(block, name) for name in arms}
    alternate(blocks, blocks=options.dropped, dropped=0)
    others = [name for name in arms if name != "ours"]
    for name in others:
        label = f"ours and {name} train the same steps"
        found.gate(equal_series(label, losses["ours"], losses[name], relative=TOLERANCE))
    if not found.passed:
        return
    say(f"{options.blocks} blocks of {len(arms)} arms")
    found.arms = alternate(blocks, blocks=options.blocks, dropped=0)
    for name in others:
        found.compare(found.arms, of=name, to="ours", name=f"{name} / ours, a step")
    better = min(peers, key=lambda name: median_interval(found.arms[name]).median)
    found.values["better"] = better
    label = f"the better of the peers ({better}) / ours, a step"
    found.compare(found.arms, of=better, to="ours", name=label, goal=GOAL)


def _add_versions(found: BenchMeasurement, installed: list[str]) -> None:
    found.values["versions"] = {peer: package_version(peer) for peer in installed}
    missing = [peer for peer in PEERS if peer not in installed]
    if missing:
        effect = f"a step of ours takes no longer than one of {' or of '.join(missing)}"
        found.cannot(effect, "not installed: pip install raytrain[peers]")
