"""Bench `peers`: the same model on the same text, trained by us in a Ray worker, by Lightning and by Accelerate.

Each lives in a process of its own; they take turns, block by block, and whoever waits uses no CPU. The peers are an
optional extra (`pip install raytrain[peers]`); one that is not installed is left out, and its claim says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.environment import package_version
from jobs.bench.harness.lines import ADDRESS, Arms, await_end
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, compare, equal_series, median_interval
from jobs.bench.harness.options import PeersOptions
from jobs.bench.training.loop_arms import (
    LOG_EVERY,
    OurRun,
    borrowed_environment,
    job_of,
    make_text,
    threads_of,
    total_steps,
)
from raytrain.errors import InputError, RunError

#: Step time of the better peer over ours.
GOAL = Goal(at_least=1.0)
#: The norm they clip by is a sum in float32, ours in float64; the losses of the first blocks differ no more than this.
TOLERANCE = 1e-3
PEERS = ("lightning", "accelerate")
ENDING_S = 120.0


def run(options: PeersOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure whichever peers are installed; see `PeersOptions`.

    Raises:
        InputError: blocks that do not end with a logged row.
        RunError: an arm died.
    """
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", seen=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")
    found = BenchMeasurement(
        "peers", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps}"
    )
    here = [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]
    if here:
        with tempfile.TemporaryDirectory(prefix="rtb-") as folder, borrowed_environment(), Arms() as arms:
            os.environ[ADDRESS] = arms.address
            _measure(options, found, arms, here, folder=Path(folder), say=say)
    _note(found, here)
    return found


def _measure(
    options: PeersOptions, found: BenchMeasurement, arms: Arms, peers: list[str], *, folder: Path, say: Say
) -> None:
    from jobs.driver.runtime import connected

    text = make_text(options, folder)
    say(f"starting Ray, the plain loop, {' and '.join(peers)}")
    members = {name: _start(name, options, text=text, folder=folder) for name in ("plain", *peers)}
    ours = OurRun(job_of(options, world_size=1, text=text, save_dir=folder / "runs"))
    try:
        with connected("local", num_cpus=2, num_gpus=0, verbose=False):
            for name, process in members.items():
                arms.await_arm(name, processes=1, alive=lambda process=process: process.poll() is None)
            ours.start()
            arms.await_arm("ours", processes=1, alive=ours.is_alive)
            _blocks(options, found, arms, peers, say=say)
            arms.dismiss("ours")
            ours.join(ENDING_S)
    except RunError as error:
        logs = {name: (folder / f"{name}.log").read_text(errors="replace")[-1000:] for name in members}
        raise RunError(f"{error}; ours: {ours.error or 'running'}; the others' logs end with: {logs}") from error
    finally:
        for name in ("ours", *members):
            arms.dismiss(name)
        for process in members.values():
            await_end(process)


def _start(name: str, options: PeersOptions, *, text: Path, folder: Path) -> subprocess.Popen[bytes]:
    """One arm in a process of its own."""
    keys = ("layers", "heads", "width", "context", "batch", "seed")
    settings = {key: getattr(options, key) for key in keys}
    settings |= {"text": str(text), "threads": threads_of(options, 1), "max_steps": total_steps(options), "arm": name}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(settings))
    own = {"OMP_NUM_THREADS": str(settings["threads"])}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.bench.training.peers_member", str(path)], env={**os.environ, **own},
            stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip


def _blocks(options: PeersOptions, found: BenchMeasurement, arms: Arms, peers: list[str], *, say: Say) -> None:
    names = ["ours", "plain", *peers]
    losses: dict[str, list[float]] = {name: [] for name in names}

    def block(name: str) -> float:
        answer = arms.order(name, {"steps": options.block_steps, "clip": "torch"})
        losses[name] += answer["losses"]
        return answer["seconds"] / options.block_steps

    turns = {name: (lambda name=name: block(name)) for name in names}
    alternate(turns, blocks=options.dropped, dropped=0)
    for name in names[1:]:
        label = f"ours and {name} take the same steps"
        found.gate(equal_series(label, losses["ours"], losses[name], relative=TOLERANCE))
    if not found.passed:
        return
    say(f"{options.blocks} blocks of {len(names)} arms")
    found.arms = alternate(turns, blocks=options.blocks, dropped=0)
    found.ratios = [compare(found.arms, of=name, to="ours", name=f"{name} / ours, a step") for name in names[1:]]
    better = min(peers, key=lambda name: median_interval(found.arms[name]).median)
    found.values["better"] = better
    label = f"the better of the peers ({better}) / ours, a step"
    found.ratios.append(compare(found.arms, of=better, to="ours", name=label, goal=GOAL))


def _note(found: BenchMeasurement, here: list[str]) -> None:
    found.values["versions"] = {peer: package_version(peer) for peer in here}
    missing = [peer for peer in PEERS if peer not in here]
    if missing:
        effect = f"a step of ours takes no longer than one of {' or of '.join(missing)}"
        found.cannot(effect, "not installed: pip install raytrain[peers]")
