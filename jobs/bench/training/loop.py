"""Bench `loop`: a real `train` run in Ray Train workers against a plain PyTorch loop, and against DDP under torchrun.

Ray is up throughout. The plain loop lives in processes of its own, ours in Ray's workers; they take turns, block by
block, and whoever waits uses no CPU. Start-up is measured apart, with the command a user types.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs.bench.harness.lines import ADDRESS, Arms
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, compare, equal_series, median_interval
from jobs.bench.harness.options import LoopOptions
from jobs.bench.training.loop_arms import (
    LOG_EVERY,
    OurRun,
    borrowed_environment,
    job_of,
    make_text,
    start_plain,
    threads_of,
)
from raytrain.errors import InputError, RunError

#: Steady-state steps per second of ours over those of the plain loop.
GOAL = Goal(at_least=0.98)
#: Two workers sum in another order than DDP's buckets: equal within fp32 rounding over the first blocks.
DDP_TOLERANCE = 1e-4
ENDING_S = 120.0


def run(options: LoopOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each world size; see `LoopOptions`.

    Raises:
        InputError: blocks that do not end with a logged row, a batch that the workers cannot share equally.
        RunError: an arm died.
    """
    _check(options)
    found = BenchMeasurement(
        "loop", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps} steps"
    )
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        text = make_text(options, Path(folder))
        with borrowed_environment(), Arms() as arms:
            os.environ[ADDRESS] = arms.address
            _steady(options, found, arms, folder=Path(folder), text=text, say=say)
        if found.passed and options.startups:
            _startups(options, found, folder=Path(folder), text=text, say=say)
    return found


def _check(options: LoopOptions) -> None:
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", seen=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")
    for world_size in options.workers:
        if options.batch % world_size:
            raise InputError(
                "batch", seen=f"{options.batch} for {world_size} workers", expected="a multiple of workers"
            )


# -- steady state ---------------------------------------------------------------------------------


def _steady(options: LoopOptions, found: BenchMeasurement, arms: Arms, *, folder: Path, text: Path, say: Say) -> None:
    from jobs.driver.runtime import connected

    say("starting Ray")
    with connected("local", num_cpus=max(options.workers) + 1, num_gpus=0, verbose=False):
        for world_size in options.workers:
            if not _one_world(options, found, arms, world_size=world_size, folder=folder, text=text, say=say):
                return


def _one_world(
    options: LoopOptions, found: BenchMeasurement, arms: Arms, *, world_size: int, folder: Path, text: Path, say: Say
) -> bool:
    """Gate, then blocks in turn; False where the gate failed."""
    say(f"{world_size} worker(s), {threads_of(options, world_size)} thread(s) each: starting both arms")
    plain = start_plain(options, world_size=world_size, text=text, folder=folder)
    ours = OurRun(job_of(options, world_size=world_size, text=text, save_dir=folder / "runs"))
    try:
        arms.await_arm("plain", processes=world_size, alive=lambda: plain.poll() is None)
        ours.start()
        arms.await_arm("ours", processes=1, alive=ours.is_alive)
        passed = _blocks(options, found, arms, world_size=world_size, say=say)
    except RunError as error:
        log = (folder / f"plain-{world_size}.log").read_text(errors="replace")[-2000:]
        raise RunError(f"{error}; ours: {ours.error or 'running'}; the plain loop's log ends with:\n{log}") from error
    finally:
        arms.dismiss("plain")
        arms.dismiss("ours")
        with contextlib.suppress(subprocess.TimeoutExpired):
            plain.wait(timeout=10.0)
        plain.kill()
    if passed:
        ours.join(ENDING_S)
    return passed


def _blocks(options: LoopOptions, found: BenchMeasurement, arms: Arms, *, world_size: int, say: Say) -> bool:
    peer = "plain loop" if world_size == 1 else "plain DDP"
    orders = {peer: ("plain", "float64"), f"{peer}, torch's clip": ("plain", "torch"), "ours": ("ours", "")}
    losses: dict[str, list[float]] = {name: [] for name in orders}
    cpu: dict[str, list[float]] = {name: [] for name in orders}

    def block(name: str) -> float:
        arm, clip = orders[name]
        answer = arms.order(arm, {"steps": options.block_steps, "clip": clip})
        losses[name] += answer["losses"]
        cpu[name].append(answer["cpu_s"] / options.block_steps)
        return answer["seconds"] / options.block_steps

    turns = {name: (lambda name=name: block(name)) for name in orders}
    alternate(turns, blocks=options.dropped, dropped=0)
    tolerance = 0.0 if world_size == 1 else DDP_TOLERANCE
    label = f"losses of {world_size} worker(s) equal those of the {peer}"
    if not found.gate(equal_series(label, losses["ours"], losses[peer], relative=tolerance)):
        return False
    say(f"{world_size} worker(s): {options.blocks} blocks of {len(orders)} arms")
    times = alternate(turns, blocks=options.blocks, dropped=0)
    if world_size == 1:
        found.gate(equal_series(f"{label}, whole run", losses["ours"], losses[peer]))
    for name in orders:
        key = "ours" if name == "ours" else name
        found.arms[f"{key}, {world_size} worker(s)"] = times[name]
    for name in orders:
        if name != "ours":
            label = f"{name} / ours, {world_size} worker(s)"
            found.ratios.append(compare(times, of=name, to="ours", name=label, goal=GOAL))
    first = next(ratio for ratio in found.ratios if ratio.name == f"{peer} / ours, {world_size} worker(s)")
    found.claim(
        f"with {world_size} worker(s), Ray, logging and votes cost at most 2 % of a steady step",
        bool(first.met),
        f"{first.median:.3f} of the {peer}'s rate, interval [{first.low:.3f}, {first.high:.3f}]",
    )
    found.values[f"{world_size} worker(s)"] = {
        "threads": threads_of(options, world_size),
        "samples_per_s": {name: options.batch / statistics.median(times[name]) for name in orders},
        "cpu_s_per_step": {name: statistics.median(values) for name, values in cpu.items()},
        "losses": losses,
    }
    return True


# -- start-up -------------------------------------------------------------------------------------


def _startups(options: LoopOptions, found: BenchMeasurement, *, folder: Path, text: Path, say: Say) -> None:
    """Seconds from the start of the process to the first step, each arm alone, in turn."""
    for world_size in options.workers:
        say(f"{world_size} worker(s): start-up, {options.startups} times each")
        turns = {
            "plain": lambda world_size=world_size: _plain_startup(
                options, world_size=world_size, text=text, folder=folder
            ),
            "ours": lambda world_size=world_size: _our_startup(
                options, world_size=world_size, text=text, folder=folder
            ),
        }
        times = alternate(turns, blocks=options.startups, dropped=0)
        found.values[f"{world_size} worker(s)"]["startup_s"] = {
            name: {"values": values, "median": median_interval(values).median} for name, values in times.items()
        }


def _plain_startup(options: LoopOptions, *, world_size: int, text: Path, folder: Path) -> float:
    with borrowed_environment(), Arms() as arms:
        os.environ[ADDRESS] = arms.address
        began = time.time()
        process = start_plain(options, world_size=world_size, text=text, folder=folder)
        ready = arms.await_arm("plain", processes=world_size, alive=lambda: process.poll() is None)
        arms.dismiss("plain")
        process.wait(timeout=ENDING_S)
    return ready - began


def _our_startup(options: LoopOptions, *, world_size: int, text: Path, folder: Path) -> float:
    """`raytrain train` for a single step: the attempt's event comes right before it."""
    from raytrain.config.decode import dump_yaml
    from raytrain.runs.folder import RunFolder

    job = job_of(options, world_size=world_size, text=text, save_dir=folder / "startup")
    path = folder / "job.yaml"
    path.write_text(dump_yaml({**job, "loop": {**job["loop"], "max_steps": 1}}))
    began = time.time()
    command = [sys.executable, "-m", "jobs", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDING_S * 2, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    run = RunFolder.open(str(folder / "startup" / "latest"))
    return next(row["time"] for row in run.read_rows(run.events) if row["kind"] == "attempt") - began
