"""Bench `loop`: a `train` run in Ray Train workers against a plain PyTorch loop, and against DDP under torchrun.

Ray is running throughout. The plain loop has its own processes, our run has Ray's workers; blocks alternate, and the
waiting arm uses no CPU. Bench `startup` measures the start.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from jobs.bench.harness.measuring import BenchMeasurement, Goal, Say, equal_series
from jobs.bench.harness.processes import ArmServer
from jobs.bench.loop_arms import (
    LoopOptions,
    OurRun,
    TrainingBlocks,
    check_block_steps,
    loop_job,
    make_text,
    start_script,
    threads_of,
)
from raytrain.errors import InputError

#: Steady-state steps per second of our run over those of the plain loop, and of several workers over those of DDP.
GOAL, GOAL_DDP = Goal(at_least=0.98), Goal(at_least=1.0)
#: Two workers sum in a different order than DDP's buckets: equal within fp32 rounding over the first blocks.
DDP_TOLERANCE = 1e-4


def run(options: LoopOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure each world size; see `LoopOptions`.

    Raises:
        InputError: a block does not end with a logged row, or the batch is not divisible by the workers.
        RunError: an arm died.
    """
    from jobs.driver.runtime import connected

    check_block_steps(options)
    for world_size in options.workers:
        if options.batch % world_size:
            raise InputError("batch", got=f"{options.batch} for {world_size} workers", expected="a multiple of workers")
    found = BenchMeasurement(
        "loop", quick, options.model_dump(), f"seconds per step, the mean of {options.block_steps} steps"
    )
    with ArmServer() as server:
        text = make_text(options, server.folder)
        say("starting Ray")
        with connected("local", num_cpus=max(options.workers) + 1, num_gpus=0, verbose=False):
            for world_size in options.workers:
                if not _measure(options, found, server, world_size=world_size, text=text, say=say):
                    break
    return found


def _measure(
    options: LoopOptions, found: BenchMeasurement, server: ArmServer, *, world_size: int, text: Path, say: Say
) -> bool:
    """Check the gate, then run alternating blocks of our run and of the plain loop with both ways to clip; False if the
    gate failed."""
    label, peer = f"{world_size} worker(s)", "plain loop" if world_size == 1 else "plain DDP"
    say(f"{label}, {threads_of(options, world_size)} thread(s) each: starting both arms")
    plain = start_script(
        server, "plain", "jobs.bench.harness.sessions:main", options, world_size=world_size, text=text
    )  # fmt: skip
    ours = OurRun(server, loop_job(options, world_size=world_size, text=text, save_dir=server.folder / "runs"))
    asks = {
        peer: partial(plain.ask_slowest, clip="rows"),
        f"{peer}, torch's clip": partial(plain.ask_slowest, clip="torch"),
        "ours": ours.ask_slowest,
    }
    blocks = TrainingBlocks(asks, options.block_steps)
    with ours.beside(plain):
        blocks.run(options.dropped)
        gate = f"losses of {label} equal those of the {peer}"
        tolerance = 0.0 if world_size == 1 else DDP_TOLERANCE
        if not found.gate(equal_series(gate, blocks.losses["ours"], blocks.losses[peer], relative=tolerance)):
            return False
        say(f"{label}: {options.blocks} blocks of {len(asks)} arms")
        times = blocks.run(options.blocks)
    if world_size == 1:
        found.gate(equal_series(f"{gate}, whole run", blocks.losses["ours"], blocks.losses[peer]))
    found.arms |= {f"{name}, {label}": values for name, values in times.items()}
    goal, cost = (GOAL, "at most 2 %") if world_size == 1 else (GOAL_DDP, "nothing")
    ratios = [
        found.compare(times, of=name, to="ours", name=f"{name} / ours, {label}", goal=goal)
        for name in asks
        if name != "ours"
    ]
    found.claim(
        f"with {label}, Ray, logging and votes cost {cost} of a steady step, whichever way the plain loop clips",
        all(ratio.met for ratio in ratios),
        f"{ratios[0]} of the {peer}'s rate, {ratios[1]} where it uses torch's clip_grad_norm_",
    )
    found.values[label] = {
        "threads": threads_of(options, world_size),
        "samples_per_s": {name: options.batch / statistics.median(times[name]) for name in asks},
        "cpu_s_per_step": {name: statistics.median(values) for name, values in blocks.cpu_s.items()},
        "losses": blocks.losses,
    }
    return True
