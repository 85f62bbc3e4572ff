"""Bench `scaling`: one worker against two on equal work, each with one thread: training steps, and answers of a model.

Training: two runs of `train`, whose blocks alternate, take the same steps over the same global batches. Inference: the
same units go to one actor of the pool, and to two. Both need a machine with two free cores.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, equal_series
from jobs.bench.harness.processes import ArmServer
from jobs.bench.loop_arms import (
    BlockObserver,
    LoopOptions,
    OurRun,
    TrainingBlocks,
    check_block_steps,
    loop_job,
    make_text,
)
from raytrain.errors import InputError

Part = Literal["training", "inference"]
PARTS: tuple[Part, ...] = ("training", "inference")
ONE, TWO = "one worker", "two workers"
#: Time of two workers over that of one, on equal work: half is what two cores can bring.
GOAL = Goal(at_most=0.55)
#: Two workers add gradients in another order.
TOLERANCE = 1e-4


class ScalingOptions(LoopOptions):
    """One worker against two on equal work: training steps, and answers of a model."""

    QUICK: ClassVar[dict[str, Any]] = {
        **LoopOptions.QUICK, "dropped": 1, "jobs": 1, "samples": 4, "unit_rows": 2, "prompt": 6, "answer": 2,
    }  # fmt: skip

    parts: list[Part] = Field(list(PARTS), description="what to measure")
    threads: Count | Literal["auto"] = Field(1, description="threads of a worker")
    workers: list[Count] = Field([1, 2], description="always one and two")
    batch: Count = Field(64, description="rows of a step, over all workers")
    block_steps: Count = Field(10, description="steps of one block, a multiple of 10 (the log interval)")
    jobs: Count = Field(6, description="repetitions of inference; each runs a job of one and a job of two workers")
    samples: Count = Field(50, description="rows for each of two workers; one worker answers twice as many")
    unit_rows: Count = Field(10, description="rows of a unit, one batch")
    prompt: Count = Field(32, description="tokens of the longest prompt")
    answer: Count = Field(64, description="tokens of an answer")


class OneWorker(BlockObserver):
    """Holds the run of one worker between blocks."""

    ARM: ClassVar[str] = ONE


class TwoWorkers(BlockObserver):
    """Holds the run of two workers between blocks."""

    ARM: ClassVar[str] = TWO


def run(options: ScalingOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `ScalingOptions`.

    Raises:
        InputError: a block does not end with a logged row, or the rows are not divisible by two.
        RunError: Ray did not start, or a run ended early.
    """
    from jobs.driver.runtime import connected

    check_block_steps(options)
    if options.batch % 2 or 2 * options.samples % options.unit_rows:
        raise InputError("batch, samples", got=f"{options.batch}, {options.samples}", expected="equal parts for two")
    block = f"seconds per step, the mean of {options.block_steps}; for inference seconds of a job"
    found = BenchMeasurement("scaling", quick, options.model_dump(), block)
    with ArmServer() as server:
        say("starting Ray")
        with connected("local", num_cpus=4, num_gpus=0, verbose=False):
            if "training" in options.parts:
                _measure_training(options, found, server, say)
            if "inference" in options.parts:
                _measure_inference(options, found, server.folder, say)
    return found


def _measure_training(options: ScalingOptions, found: BenchMeasurement, server: ArmServer, say: Say) -> None:
    text = make_text(options, server.folder)
    one, two = (
        OurRun(
            server, loop_job(options, world_size=workers, text=text, save_dir=server.folder / f"runs-{workers}"),
            observer=kind,
        )
        for workers, kind in ((1, OneWorker), (2, TwoWorkers))
    )  # fmt: skip
    blocks = TrainingBlocks({ONE: one.ask_slowest, TWO: two.ask_slowest}, options.block_steps)
    say("training: starting both")
    with one.beside(), two.beside():
        blocks.run(options.dropped)
        say(f"training: {options.blocks} blocks of both")
        times = blocks.run(options.blocks)
    label = "the losses of two workers equal those of one: equal work"
    if found.gate(equal_series(label, blocks.losses[TWO], blocks.losses[ONE], relative=TOLERANCE)):
        _compare(found, times, what="training step")


def _measure_inference(options: ScalingOptions, found: BenchMeasurement, folder: Path, say: Say) -> None:
    from ray.data import DataContext

    from jobs.bench.infer_workers import STARTED_WITHIN_S, JobRunner, gpt_work, pooled, rows_by_worker

    DataContext.get_current().wait_for_min_actors_s = STARTED_WITHIN_S  # the time of a job is that of a steady pool
    rows = 2 * options.samples
    work, units = gpt_work(options, folder, units=rows // options.unit_rows, unit_rows=options.unit_rows)
    jobs = JobRunner(work, units, folder / "scaling")
    say(f"inference: {options.jobs} times two jobs of {rows} rows")
    arms = {name: partial(jobs.run, name, partial(pooled, workers=workers)) for name, workers in ((ONE, 1), (TWO, 2))}
    times = alternate(arms, blocks=options.jobs, dropped=0)
    jobs.gate(found, "one and two workers")
    counts = [sorted(rows_by_worker(reports).values()) for reports in jobs.reports[TWO]]
    found.values["rows of each of two workers, by job"] = counts
    equal = all(sum(count) == rows for count in counts)
    found.gate(Check("two workers answer all rows, each once", equal, f"{counts} of {rows}"))
    _compare(found, times, what="inference job")


def _compare(found: BenchMeasurement, times: dict[str, list[float]], *, what: str) -> None:
    """Add the arms, the ratio of two workers to one, and the claim."""
    found.arms |= {f"{what}, {name}": values for name, values in times.items()}
    name = f"seconds of {'an' if what[0] in 'aeiou' else 'a'} {what}, two workers / one"
    ratio = found.compare(times, of=TWO, to=ONE, name=name, goal=GOAL)
    found.claim(
        f"two workers of one thread take about half the time of one for an equal {what}", ratio.high <= 0.6,
        f"{ratio} of one worker's time; 0.5 is half",
    )  # fmt: skip
