"""Bench `loop`: a `train` run in Ray Train workers against a plain PyTorch loop, and against DDP under torchrun.

Ray is running throughout. The plain loop has its own processes, our run has Ray's workers; blocks alternate, and the
waiting arm uses no CPU. Start-up is measured separately, with the command line.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, alternate, equal_series, median_interval
from jobs.bench.harness.processes import ArmProcesses, ArmServer, run_command
from jobs.bench.loop_arms import (
    LOG_EVERY,
    LoopOptions,
    OurRun,
    loop_job,
    make_text,
    start_plain,
    threads_of,
)
from raytrain.errors import InputError, RunError

#: Steady-state steps per second of our run over those of the plain loop, and of several workers over those of DDP.
GOAL, GOAL_DDP = Goal(at_least=0.98), Goal(at_least=1.0)
#: Two workers sum in a different order than DDP's buckets: equal within fp32 rounding over the first blocks.
DDP_TOLERANCE = 1e-4
END_TIMEOUT_S = 120.0


def run(options: LoopOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each world size; see `LoopOptions`.

    Raises:
        InputError: a block does not end with a logged row, or the batch is not divisible by the workers.
        RunError: an arm died.
    """
    _check(options)
    found = BenchMeasurement(
        "loop", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps} steps"
    )
    with ArmServer() as server:
        text = make_text(options, server.folder)
        _measure_steps(options, found, server, text=text, say=say)
        if found.passed and options.startups:
            _measure_startups(options, found, folder=server.folder, text=text, say=say)
    return found


def _check(options: LoopOptions) -> None:
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", got=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")
    for world_size in options.workers:
        if options.batch % world_size:
            raise InputError("batch", got=f"{options.batch} for {world_size} workers", expected="a multiple of workers")


# -- steady state ---------------------------------------------------------------------------------


def _measure_steps(options: LoopOptions, found: BenchMeasurement, server: ArmServer, *, text: Path, say: Say) -> None:
    from jobs.driver.runtime import connected

    say("starting Ray")
    with connected("local", num_cpus=max(options.workers) + 1, num_gpus=0, verbose=False):
        for world_size in options.workers:
            if not _measure_world_size(options, found, server, world_size=world_size, text=text, say=say):
                return


def _measure_world_size(
    options: LoopOptions, found: BenchMeasurement, server: ArmServer, *, world_size: int, text: Path, say: Say
) -> bool:
    """Check the gate, then run alternating blocks; False if the gate failed."""
    say(f"{world_size} worker(s), {threads_of(options, world_size)} thread(s) each: starting both arms")
    plain = start_plain(server, options, world_size=world_size, text=text)
    ours = OurRun(server, loop_job(options, world_size=world_size, text=text, save_dir=server.folder / "runs"))
    try:
        plain.await_ready()
        ours.start()
        passed = _run_blocks(options, found, ours, plain, world_size=world_size, say=say)
    except RunError as error:
        raise RunError(f"{error}; ours: {ours.error or 'running'}; the plain loop: {plain.log_tail()}") from error
    finally:
        ours.dismiss()
        plain.close()
    if passed:
        ours.join(END_TIMEOUT_S)
    return passed


def _run_blocks(
    options: LoopOptions, found: BenchMeasurement, ours: OurRun, plain: ArmProcesses, *, world_size: int, say: Say
) -> bool:
    peer = "plain loop" if world_size == 1 else "plain DDP"
    arms: dict[str, tuple[OurRun | ArmProcesses, str]] = {
        peer: (plain, "rows"), f"{peer}, torch's clip": (plain, "torch"), "ours": (ours, "")
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
    goal, cost = (GOAL, "at most 2 %") if world_size == 1 else (GOAL_DDP, "nothing")
    label = f"{world_size} worker(s)"
    ratios = [
        found.compare(times, of=name, to="ours", name=f"{name} / ours, {label}", goal=goal)
        for name in arms
        if name != "ours"
    ]
    found.claim(
        f"with {label}, Ray, logging and votes cost {cost} of a steady step, whichever way the plain loop clips",
        all(ratio.met for ratio in ratios),
        f"{ratios[0]} of the {peer}'s rate, {ratios[1]} where it uses torch's clip_grad_norm_",
    )
    found.values[f"{world_size} worker(s)"] = {
        "threads": threads_of(options, world_size),
        "samples_per_s": {name: options.batch / statistics.median(times[name]) for name in arms},
        "cpu_s_per_step": {name: statistics.median(values) for name, values in cpu.items()},
        "losses": losses,
    }
    return True


# -- start-up -------------------------------------------------------------------------------------


def _measure_startups(options: LoopOptions, found: BenchMeasurement, *, folder: Path, text: Path, say: Say) -> None:
    """Seconds from the start of the process to the first step, of both arms in turn."""
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
        return start_plain(server, options, world_size=world_size, text=text).await_ready() - began


def _our_startup(options: LoopOptions, *, world_size: int, text: Path, folder: Path) -> float:
    """Runs `raytrain train` for a single step; the event of the attempt is written right before it."""
    from raytrain.config.decode import dump_yaml
    from raytrain.runs.folder import RunFolder

    job = loop_job(options, world_size=world_size, text=text, save_dir=folder / "startup")
    path = folder / "job.yaml"
    path.write_text(dump_yaml({**job, "loop": {**job["loop"], "max_steps": 1}}))
    began = time.time()
    run_command([sys.executable, "-m", "jobs", "train", str(path)], timeout_s=2 * END_TIMEOUT_S)
    run = RunFolder.open(str(folder / "startup" / "latest"))
    return next(row["time"] for row in run.read_rows(run.events) if row["kind"] == "attempt") - began
