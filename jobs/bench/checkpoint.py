"""Bench `checkpoint`: how long saving a checkpoint stops the loop, asynchronously and synchronously.

A block is a few training steps with one checkpoint after the first step. The asynchronous arm copies the state and
continues; the copy is its stall, and the cost of the write for the following steps shows in the time of the whole
block. Both are reported. The saved state is that of a real run: weights, AdamW moments, random generators.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from cluster.config import Count, Text
from jobs.bench.harness.inputs import draw_rows, job_of, perceptron_model
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.harness.options import BenchOptions
from raytrain.execution.reporter import SilentReporter
from raytrain.runs.folder import RunFolder

if TYPE_CHECKING:
    from jobs.bench.harness.sessions import SessionArm

#: Stall of an asynchronous checkpoint over that of a synchronous one.
GOAL = Goal(at_most=0.25)
FEATURES = 64
CLASSES = 10
KINDS = ("asynchronous", "synchronous")


class CheckpointOptions(BenchOptions):
    """The stall of the loop for a checkpoint that is saved asynchronously, and for one saved synchronously."""

    MEASURES: ClassVar[str] = "pause of training for an asynchronous checkpoint, against a synchronous one"
    QUICK: ClassVar[dict[str, Any]] = {"millions": [0.05], "blocks": 3, "steps": 2, "batch": 4}

    millions: list[float] = Field([1.0, 10.0, 50.0], description="millions of parameters, with AdamW state")
    batch: Count = Field(64, description="rows of a step")
    steps: Count = Field(5, description="steps of one block; the checkpoint is taken after the first")
    dir: Text | None = Field(None, description="folder to save them in; null is the system's temporary directory")


def run(options: CheckpointOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure every model size; see `CheckpointOptions`."""
    from jobs.bench.harness.sessions import restored_threads

    found = BenchMeasurement("checkpoint", quick, options.model_dump(), "seconds that one checkpoint stops the loop")
    found.values["models"] = {}
    with restored_threads(), tempfile.TemporaryDirectory(prefix="rtb-", dir=options.dir) as folder:
        for millions in options.millions:
            say(f"{millions:g} million parameters: {options.blocks} blocks")
            _size(found, options, millions, folder=folder)
    worst = max((ratio for ratio in found.ratios if ratio.goal), key=lambda ratio: ratio.median)
    found.claim(
        "an asynchronous checkpoint stops the loop for at most a quarter of a synchronous one",
        bool(worst.met),
        f"{worst.median:.3f} of it at the worst size ({worst.name.split(':')[0]})",
    )
    return found


def _job(options: CheckpointOptions, millions: float, *, folder: str) -> dict[str, Any]:
    """A perceptron of about `millions` million parameters: three layers of one width."""
    width = max(8, round(math.sqrt(millions * 1e6 / 2)))
    return job_of(
        options, perceptron_model(width, classes=CLASSES),
        draw_rows(4 * options.batch, FEATURES, classes=CLASSES, seed=options.seed), name=f"{millions:g}m",
        loop={"global_batch_size": options.batch, "log_every": 0}, threads=options.thread_count, save={"dir": folder},
    )  # fmt: skip


class _Arm:
    """Saving of one kind; both kinds save the same session in turn."""

    def __init__(self, session_arm: SessionArm, run: RunFolder, *, kind: str, steps: int) -> None:
        from raytrain.execution.checkpointer import CheckpointSaver

        self.session_arm, self.run, self.steps = session_arm, run, steps
        self.saver = CheckpointSaver(
            session_arm.session, run, every=1_000_000, keep=1, asynchronous=kind == "asynchronous",
            reporter=SilentReporter(), clock=session_arm.loop.clock, fence=None,
        )  # fmt: skip
        self.blocks: list[float] = []
        self.writes: list[float] = []

    def block(self) -> float:
        """A step, a checkpoint, the other steps; returns the stall, after the write has finished."""
        state = self.session_arm.session.state
        began = time.perf_counter()
        self.session_arm.run(1)
        called = time.perf_counter()
        self.saver.save(state, final=False)
        stall = time.perf_counter() - called
        if self.steps > 1:
            self.session_arm.run(self.steps - 1)
        self.blocks.append(time.perf_counter() - began)
        self.writer.wait()  # not part of the block, so that the next arm starts with an idle disk
        self.writes.append(self.writer.last_write_s or 0.0)
        return stall

    @property
    def writer(self) -> Any:
        """The writer of the checkpoints."""
        writer = self.saver.writer
        assert writer is not None  # this is rank 0
        return writer


def _size(found: BenchMeasurement, options: CheckpointOptions, millions: float, *, folder: str) -> None:
    from jobs.bench.harness.sessions import SessionArm
    from raytrain.execution.checkpointer import STALL_BUDGET, solve_interval

    session_arm = SessionArm(_job(options, millions, folder=folder), precision="fp32")
    session_arm.run(3)  # the first step creates AdamW's moments
    arms = {
        kind: _Arm(session_arm, RunFolder.create(folder, f"{millions:g}m-{kind}"), kind=kind, steps=options.steps)
        for kind in KINDS
    }
    name = f"{millions:g} M parameters"
    found.gate(_same_bytes(name, session_arm, arms))
    turns: dict[str, Callable[[], float]] = {kind: arm.block for kind, arm in arms.items()}
    stalls = alternate(turns, blocks=options.blocks)
    alone = [_block_without(session_arm, options.steps) for _ in range(options.blocks)]
    for kind, values in stalls.items():
        found.arms[f"{name}, {kind}"] = values
    blocks = {kind: arm.blocks[-options.blocks :] for kind, arm in arms.items()} | {"no checkpoint": alone}
    for kind, values in blocks.items():
        found.arms[f"{name}, block with {kind}"] = values
    medians = {kind: statistics.median(values) for kind, values in blocks.items()}
    share = statistics.median(stalls["synchronous"]) / medians["synchronous"]
    for what, values, goal in (("stall", stalls, GOAL), ("whole block", blocks, None)):
        label = f"{name}: {what}, asynchronous / synchronous"
        found.compare(values, of="asynchronous", to="synchronous", name=label, goal=goal, share=share)
    stall, step = statistics.median(stalls["asynchronous"]), medians["no checkpoint"] / options.steps
    solved = solve_interval(stall_s=stall, step_time_s=step, budget=STALL_BUDGET)
    found.values["models"][name] = {
        "parameters": sum(p.numel() for p in session_arm.session.trainable.module.parameters()),
        "checkpoint_bytes": arms["synchronous"].writer.last_bytes,
        "staged_bytes": arms["asynchronous"].writer.staged_bytes,
        "write_s": {kind: arm.writes[-options.blocks :] for kind, arm in arms.items()},
        "step_s": step,
        "asynchronous_over_synchronous": stall / statistics.median(stalls["synchronous"]),
        "stall_budget": STALL_BUDGET,
        "interval_steps": solved.value,
        "share_of_budget": stall / (stall + solved.value * step) / STALL_BUDGET,
        "block_extra_s": {kind: medians[kind] - medians["no checkpoint"] for kind in KINDS},
    }
    for arm in arms.values():
        arm.saver.close()
        shutil.rmtree(arm.run.path, ignore_errors=True)


def _block_without(session_arm: SessionArm, steps: int) -> float:
    """The same steps without a checkpoint."""
    began = time.perf_counter()
    session_arm.run(1)
    if steps > 1:
        session_arm.run(steps - 1)
    return time.perf_counter() - began


def _same_bytes(name: str, session_arm: SessionArm, arms: dict[str, _Arm]) -> Check:
    """Whether both kinds save the live state bit for bit, with valid checksums."""
    import torch
    from safetensors.torch import load_file

    from raytrain.checkpoint.reader import load

    state, live = session_arm.session.state, session_arm.session.trainable.module.state_dict()
    different: list[str] = []
    for kind, arm in arms.items():
        arm.saver.save(state, final=True)
        loaded = load(arm.run.checkpoint_dir(state.step))
        kept = loaded.parts["model"]
        different += [f"{kind}: {key}" for key, value in live.items() if not torch.equal(kept[key], value)]
    paths = [f"{arm.run.checkpoint_dir(state.step)}/optimizer.safetensors" for arm in arms.values()]
    with_moments = [load_file(path) for path in paths]
    different += [key for key, value in with_moments[0].items() if not torch.equal(value, with_moments[1][key])]
    return Check(
        f"{name}: both checkpoints hold the live state",
        not different,
        f"{len(live)} weights and {len(with_moments[0])} optimizer tensors compared"
        + (f"; different: {different[0]} and {len(different) - 1} more" if different else ""),
    )
