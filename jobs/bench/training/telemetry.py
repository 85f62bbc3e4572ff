"""Bench `telemetry`: the steps of one session while a thread samples the node, against the same without.

Both arms train the same session in this process, in alternating blocks; in one of them the thread that a worker starts
on each node runs: it samples the node, writes the row, publishes it (Ray is running) and judges it.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, Positive
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.harness.options import BenchOptions

#: Seconds per step with telemetry over those without.
GOAL = Goal(at_most=1.01)
ON, OFF = "with telemetry", "without"


class TelemetryOptions(BenchOptions):
    """The thread that samples a node, in the process that trains."""

    MEASURES: ClassVar[str] = "cost of sampling the node while a worker trains, over the same steps without"
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "width": 16, "context": 16, "batch": 4, "blocks": 3, "block_steps": 20, "every": 0.02,
    }  # fmt: skip

    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(16, description="rows of a step")
    block_steps: Count = Field(100, description="steps of one block")
    every: Positive = Field(5.0, description="seconds between samples, as telemetry.every")


def run(options: TelemetryOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `TelemetryOptions`."""
    from jobs.bench.harness.sessions import SessionArm, restored_threads
    from jobs.driver.runtime import connected

    block = f"seconds per step, the mean of {options.block_steps}"
    found = BenchMeasurement("telemetry", quick, options.model_dump(), block)
    with tempfile.TemporaryDirectory() as folder, restored_threads(options.thread_count):
        text = write_text(
            Path(folder), batch=options.batch, context=options.context, steps=options.block_steps, seed=options.seed
        )
        loop = {"global_batch_size": options.batch, "log_every": options.block_steps}
        job = job_of(
            options, gpt_model(options), text, name="telemetry", loop=loop, threads=options.thread_count,
            precision={"dtype": "fp32"},
        )  # fmt: skip
        arm = SessionArm(job, precision="fp32")
        arm.run(options.block_steps)
        say("starting Ray, which publishes the samples")
        with connected("local", num_cpus=1, num_gpus=0, verbose=False):
            _measure(options, found, arm, folder=folder, say=say)
    return found


def _measure(options: TelemetryOptions, found: BenchMeasurement, arm: Any, *, folder: str, say: Say) -> None:
    from cluster.telemetry.gauges import RayGauges
    from cluster.telemetry.sampler import NodeSampler
    from cluster.telemetry.warnings import MemoryWatch
    from raytrain.execution.telemetry import TelemetryThread
    from raytrain.runs.folder import RunFolder

    run_folder, gauges = RunFolder(f"{folder}/run"), RayGauges("bench")

    def thread() -> TelemetryThread:
        def position() -> dict[str, Any]:
            return {"attempt": 1, "step": arm.session.state.step}

        return TelemetryThread(
            run_folder, NodeSampler("bench"), every=options.every, gauges=gauges, watch=MemoryWatch(),
            warn=lambda warning: None, tags=position,
        )  # fmt: skip

    @contextlib.contextmanager
    def sampled() -> Iterator[None]:
        running = thread()
        running.start()
        try:
            yield
        finally:
            running.close()

    def block(*, on: bool) -> float:
        with sampled() if on else contextlib.nullcontext():
            return arm.run(options.block_steps) / options.block_steps

    one = thread()
    costs = []
    for _ in range(20):
        began = time.perf_counter()
        one.sample()
        costs.append(time.perf_counter() - began)
    say(f"{options.blocks} blocks of {options.block_steps} steps, two arms")
    times = alternate({ON: lambda: block(on=True), OFF: lambda: block(on=False)}, blocks=options.blocks)
    found.arms |= times
    rows = len(run_folder.read_rows("telemetry/bench.jsonl")) - len(costs)
    found.values |= {"sample_s": statistics.median(costs), "samples": rows}
    if not found.gate(Check("samples were taken while it trained", rows > 0, f"{rows} samples")):
        return
    ratio = found.compare(times, of=ON, to=OFF, goal=GOAL)
    share = found.values["sample_s"] / options.every
    found.claim(
        "telemetry takes at most 1 % of a step",
        ratio.median <= (GOAL.at_most or 0.0) and share <= 0.01,
        f"{ratio} times the seconds of a step; a sample takes {1e3 * found.values['sample_s']:.2f} ms, "
        f"{share:.2%} of the {options.every:g} s between two",
    )
