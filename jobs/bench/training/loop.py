"""Bench `loop`: a real `train` run in Ray Train workers against a plain PyTorch loop, and against DDP under torchrun.

Ray runs throughout. The plain loop has processes of its own, our run has Ray's workers; blocks alternate, and the arm
that waits uses no CPU. Start-up is measured separately, with the command that a user types.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Text
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, compare, equal_series, median_interval
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer
from jobs.bench.training.loop_arms import (
    LOG_EVERY,
    OurRun,
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


class LoopOptions(BenchOptions):
    """Our loop in Ray Train workers against the loop one writes by hand."""

    MEASURES: ClassVar[str] = (
        "raytrain against a plain PyTorch loop and plain DDP: steady state and, separately, startup"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 2, "width": 16, "context": 16, "batch": 4, "blocks": 3, "block_steps": 10, "startups": 0,
    }  # fmt: skip

    workers: list[Count] = Field([1, 2], description="world sizes, one after the other")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step, over all workers")
    text: Text | None = Field(None, description="a text file; null generates one")
    block_steps: Count = Field(40, description="steps of one block, a multiple of 10 (the log interval)")
    dropped: Count = Field(2, description="blocks before the kept ones")
    startups: NonNegativeInt = Field(2, description="times that each arm's start-up is measured, apart")


def run(options: LoopOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each world size; see `LoopOptions`.

    Raises:
        InputError: a block does not end with a logged row, or the workers cannot share the batch equally.
        RunError: an arm died.
    """
    _check(options)
    found = BenchMeasurement(
        "loop", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps} steps"
    )
    with ArmServer() as server:
        text = make_text(options, server.folder)
        _steady(options, found, server, text=text, say=say)
        if found.passed and options.startups:
            _startups(options, found, folder=server.folder, text=text, say=say)
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


def _steady(options: LoopOptions, found: BenchMeasurement, server: ArmServer, *, text: Path, say: Say) -> None:
    from jobs.driver.runtime import connected

    say("starting Ray")
    with connected("local", num_cpus=max(options.workers) + 1, num_gpus=0, verbose=False):
        for world_size in options.workers:
            if not _one_world(options, found, server, world_size=world_size, text=text, say=say):
                return


def _one_world(
    options: LoopOptions, found: BenchMeasurement, server: ArmServer, *, world_size: int, text: Path, say: Say
) -> bool:
    """Gate, then alternating blocks; False if the gate failed."""
    say(f"{world_size} worker(s), {threads_of(options, world_size)} thread(s) each: starting both arms")
    plain = start_plain(server, options, world_size=world_size, text=text)
    ours = OurRun(server, job_of(options, world_size=world_size, text=text, save_dir=server.folder / "runs"))
    try:
        plain.await_ready()
        ours.start()
        passed = _blocks(options, found, ours, plain, world_size=world_size, say=say)
    except RunError as error:
        raise RunError(f"{error}; ours: {ours.error or 'running'}; the plain loop: {plain.log_tail()}") from error
    finally:
        ours.dismiss()
        plain.close()
    if passed:
        ours.join(ENDING_S)
    return passed


def _blocks(
    options: LoopOptions, found: BenchMeasurement, ours: OurRun, plain: ArmProcesses, *, world_size: int, say: Say
) -> bool:
    peer = "plain loop" if world_size == 1 else "plain DDP"
    arms: dict[str, tuple[OurRun | ArmProcesses, str]] = {
        peer: (plain, "float64"), f"{peer}, torch's clip": (plain, "torch"), "ours": (ours, "")
    }  # fmt: skip
    losses: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}

    def block(name: str) -> float:
        arm, clip = arms[name]
        answer = arm.ask_slowest(steps=options.block_steps, clip=clip)
        losses[name] += answer["losses"]
        cpu[name].append(answer["cpu_s"] / options.block_steps)
        return answer["seconds"] / options.block_steps

    blocks = {name: partial(block, name) for name in arms}
    alternate(blocks, blocks=options.dropped, dropped=0)
    tolerance = 0.0 if world_size == 1 else DDP_TOLERANCE
    label = f"losses of {world_size} worker(s) equal those of the {peer}"
    if not found.gate(equal_series(label, losses["ours"], losses[peer], relative=tolerance)):
        return False
    say(f"{world_size} worker(s): {options.blocks} blocks of {len(arms)} arms")
    times = alternate(blocks, blocks=options.blocks, dropped=0)
    if world_size == 1:
        found.gate(equal_series(f"{label}, whole run", losses["ours"], losses[peer]))
    for name in arms:
        found.arms[f"{name}, {world_size} worker(s)"] = times[name]
    for name in arms:
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
        "samples_per_s": {name: options.batch / statistics.median(times[name]) for name in arms},
        "cpu_s_per_step": {name: statistics.median(values) for name, values in cpu.items()},
        "losses": losses,
    }
    return True


# -- start-up -------------------------------------------------------------------------------------


def _startups(options: LoopOptions, found: BenchMeasurement, *, folder: Path, text: Path, say: Say) -> None:
    """Seconds from the start of the process to the first step; one arm at a time, alternating."""
    for world_size in options.workers:
        say(f"{world_size} worker(s): start-up, {options.startups} times each")
        arms = {
            "plain": partial(_plain_startup, options, world_size=world_size, text=text),
            "ours": partial(_our_startup, options, world_size=world_size, text=text, folder=folder),
        }
        times = alternate(arms, blocks=options.startups, dropped=0)
        found.values[f"{world_size} worker(s)"]["startup_s"] = {
            name: {"values": values, "median": median_interval(values).median} for name, values in times.items()
        }


def _plain_startup(options: LoopOptions, *, world_size: int, text: Path) -> float:
    with ArmServer() as server:
        began = time.time()
        plain = start_plain(server, options, world_size=world_size, text=text)
        ready = plain.await_ready()
        plain.close()
    return ready - began


def _our_startup(options: LoopOptions, *, world_size: int, text: Path, folder: Path) -> float:
    """`raytrain train` of a single step; the event of the attempt is written right before it."""
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
