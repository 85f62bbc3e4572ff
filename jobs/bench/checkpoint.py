"""Bench `checkpoint`: how long saving a checkpoint stops the loop, asynchronously and synchronously.

A block is a step, a checkpoint and a few more steps. The asynchronous arm copies the state and
continues: the copy is its stall. The saved state is that of a real run: weights, AdamW moments, random generators.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file

from cluster.config import Count, Text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.sessions import SessionArm, draw_rows, job_of, perceptron_model, restored_threads, timed
from raytrain.checkpoint.reader import load
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.execution.reporter import SilentReporter
from raytrain.runs.folder import RunFolder

#: Stall of an asynchronous checkpoint over that of a synchronous one.
GOAL = Goal(at_most=0.25)
FEATURES = 64
CLASSES = 10
KINDS = ("asynchronous", "synchronous")


class CheckpointOptions(BenchOptions):
    millions: list[float] = key([1.0, 10.0, 50.0], "millions of parameters, with AdamW state", quick=[0.05])
    batch: Count = key(64, "rows of a step", quick=4)
    steps: Count = key(5, "steps of one block after its checkpoint", quick=2)
    dir: Text | None = key(None, "folder to save them in; null is the system's temporary directory")


def run(options: CheckpointOptions, found: BenchMeasurement) -> None:
    found.block = "seconds that one checkpoint stops the loop"
    found.values["models"] = {}
    with restored_threads(), tempfile.TemporaryDirectory(prefix="rtb-", dir=options.dir) as folder:
        for millions in options.millions:
            found.say(f"{millions:g} million parameters: {options.blocks} blocks")
            _measure(found, options, millions, folder=folder)


def _measure(found: BenchMeasurement, options: CheckpointOptions, millions: float, *, folder: str) -> None:
    """Both kinds save the same session in turn: a perceptron of three layers, of about `millions` million weights."""
    width = max(8, round(math.sqrt(millions * 1e6 / 2)))
    arm = SessionArm(job_of(
        options, perceptron_model(width, classes=CLASSES),
        draw_rows(4 * options.batch, FEATURES, classes=CLASSES, seed=options.seed), name=f"{millions:g}m",
        loop={"global_batch_size": options.batch, "log_every": 0}, threads=options.thread_count, save={"dir": folder},
    ))  # fmt: skip
    arm.run(3)  # the first step creates AdamW's moments
    runs = {kind: RunFolder.create(folder, f"{millions:g}m-{kind}") for kind in KINDS}
    savers: dict[str, Any] = {
        kind: CheckpointSaver(
            arm.session, run, every=1_000_000, keep=1, asynchronous=kind == "asynchronous", reporter=SilentReporter(),
            clock=arm.loop.clock, fence=None,
        )
        for kind, run in runs.items()
    }  # fmt: skip
    writes: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def block(kind: str) -> float:
        """A step, a checkpoint, the other steps; returns the stall, after the write has finished."""
        saver = savers[kind]
        arm.run(1)
        stall = timed(lambda: saver.save(arm.session.state, final=False))
        arm.run(options.steps)
        saver.writer.wait()  # so that the next arm starts with an idle disk
        writes[kind].append(saver.writer.last_write_s or 0.0)
        return stall

    name = f"{millions:g} M parameters"
    found.gate(_same_bytes(name, arm, savers, runs))
    arms = {kind: partial(block, kind) for kind in KINDS}
    stalls = found.alternate(arms, blocks=options.blocks, named=f"{name}, {{}}")
    label = f"{name}: stall, asynchronous / synchronous"
    found.compare(stalls, of="asynchronous", to="synchronous", name=label, goal=GOAL)
    found.values["models"][name] = {
        "parameters": sum(p.numel() for p in arm.session.trainable.module.parameters()),
        "checkpoint_bytes": savers["synchronous"].writer.last_bytes,
        "staged_bytes": savers["asynchronous"].writer.staged_bytes,
        "write_s": {kind: values[-options.blocks :] for kind, values in writes.items()},
    }
    for kind, saver in savers.items():
        saver.close()
        shutil.rmtree(runs[kind].path, ignore_errors=True)


def _same_bytes(name: str, arm: SessionArm, savers: dict[str, Any], runs: dict[str, RunFolder]) -> Check:
    """Whether both kinds save the live state bit for bit, with valid checksums."""
    state, live = arm.session.state, arm.session.trainable.module.state_dict()
    paths = {kind: run.checkpoint_dir(state.step) for kind, run in runs.items()}
    for saver in savers.values():
        saver.save(state, final=True)
    different = [
        f"{kind}: {key}"
        for kind, path in paths.items()
        for key, value in load(path).parts["model"].items()
        if not torch.equal(live[key], value)
    ]
    ours, theirs = (load_file(f"{path}/optimizer.safetensors") for path in paths.values())
    different += [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
    detail = f"{len(live)} weights and {len(ours)} optimizer tensors compared; different: {len(different)}"
    return Check(f"{name}: both checkpoints hold the live state", not different, detail)
