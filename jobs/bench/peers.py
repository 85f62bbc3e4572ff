"""Bench `peers`: the same model on the same text, trained by raytrain in a Ray worker, Lightning and Accelerate.

Each runs in a separate process; blocks alternate, and a waiting arm uses no CPU. The peers are an optional extra
(`pip install raytrain[peers]`); without it their claims are "not measurable here".
"""

from __future__ import annotations

import importlib.util
from functools import partial

from pydantic import Field

from cluster.config import Count
from cluster.environment import package_version
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, equal_series, median_interval
from jobs.bench.harness.processes import ArmServer
from jobs.bench.loop_arms import (
    LoopOptions,
    OurRun,
    TrainingBlocks,
    check_block_steps,
    loop_job,
    make_text,
    start_script,
)

#: Step time of the faster peer over ours.
GOAL = Goal(at_least=1.0)
#: They compute the gradient norm in float32, we in float64; the losses of the first blocks differ by at most this.
TOLERANCE = 1e-3
PEERS = ("lightning", "accelerate")


class PeersOptions(LoopOptions):
    """A training step against Lightning's and Accelerate's, if they are installed."""

    workers: list[Count] = Field([1], description="always one")


def run(options: PeersOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the peers that are installed; see `PeersOptions`.

    Raises:
        InputError: a block does not end with a logged row.
        RunError: an arm died.
    """
    check_block_steps(options)
    found = BenchMeasurement(
        "peers", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    installed = [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]
    if installed:
        with ArmServer() as server:
            _measure(options, found, server, installed, say=say)
    found.values["versions"] = {peer: package_version(peer) for peer in installed}
    missing = [peer for peer in PEERS if peer not in installed]
    if missing:
        effect = f"a step of ours takes no longer than one of {' or of '.join(missing)}"
        found.cannot(effect, "not installed: pip install raytrain[peers]")
    return found


def _measure(options: PeersOptions, found: BenchMeasurement, server: ArmServer, peers: list[str], *, say: Say) -> None:
    from jobs.driver.runtime import connected

    text = make_text(options, server.folder)
    say(f"starting Ray, {' and '.join(peers)}")
    others = {
        name: start_script(
            server, name, "jobs.bench.peers_arms:main", options, world_size=1, text=text, cwd=server.folder
        )
        for name in peers
    }
    ours = OurRun(server, loop_job(options, world_size=1, text=text, save_dir=server.folder / "runs"))
    asks = {"ours": ours.ask_slowest, **{name: partial(arm.ask_slowest, clip="torch") for name, arm in others.items()}}
    blocks = TrainingBlocks(asks, options.block_steps)
    with connected("local", num_cpus=2, num_gpus=0, verbose=False), ours.beside(*others.values()):
        blocks.run(options.dropped)
        for name in others:
            label = f"ours and {name} train the same steps"
            found.gate(equal_series(label, blocks.losses["ours"], blocks.losses[name], relative=TOLERANCE))
        if not found.passed:
            return
        say(f"{options.blocks} blocks of {len(asks)} arms")
        found.arms = blocks.run(options.blocks)
    for name in others:
        found.compare(found.arms, of=name, to="ours", name=f"{name} / ours, a step")
    better = min(peers, key=lambda name: median_interval(found.arms[name]).median)
    found.values["better"] = better
    label = f"the better of the peers ({better}) / ours, a step"
    found.compare(found.arms, of=better, to="ours", name=label, goal=GOAL)
