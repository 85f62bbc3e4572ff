"""Bench `scaling`: one worker against two on equal work, each with one thread: training steps, and answers of a model.

Training: two runs of `train`, whose blocks alternate, take the same steps over the same global batches. Inference: the
same units go to one actor of the pool, and to two. Both need a machine with two free cores.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, alternate, equal_series
from jobs.bench.harness.options import key
from jobs.bench.harness.processes import Arms
from jobs.bench.harness.sessions import write_text
from jobs.bench.loop import StepOptions, TrainingBlocks, check_blocks, loop_job, start_run
from jobs.driver.runtime import connected
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.errors import InputError
from raytrain.infer.input import InputRows, units_of
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import part_name
from raytrain.infer.ray_data import run_units
from raytrain.infer.worker import Work

Part = Literal["training", "inference"]
ONE, TWO = "one worker", "two workers"
#: Time of two workers over that of one, on equal work: half is what two cores can bring.
GOAL = Goal(at_most=0.55)
#: Two workers add gradients in another order.
TOLERANCE = 1e-4
#: A job begins when all its workers have loaded the model, so that its time is that of a steady pool.
STARTED_WITHIN_S = 300
VOCABULARY = 256  # bytes


class ScalingOptions(StepOptions):
    parts: list[Part] = key(["training", "inference"], "what to measure")
    threads: Count | Literal["auto"] = key(1, "threads of a worker")
    batch: Count = key(64, "rows of a step, over all workers")
    dropped: Count = key(2, "warm-up blocks", quick=1)
    block_steps: Count = key(10, "steps of one block, a multiple of 10 (the log interval)")
    jobs: Count = key(6, "repetitions of inference; each runs a job of one and a job of two workers", quick=1)
    samples: Count = key(50, "rows for each of two workers; one worker answers twice as many", quick=4)
    unit_rows: Count = key(10, "rows of a unit, one batch", quick=2)
    prompt: Count = key(32, "tokens of the longest prompt", quick=6)
    answer: Count = key(64, "tokens of an answer", quick=2)


def run(options: ScalingOptions, found: BenchMeasurement) -> None:
    check_blocks(options, workers=[2])
    if 2 * options.samples % options.unit_rows:
        raise InputError("samples", got=str(options.samples), expected="whole units for two workers")
    found.block = f"seconds per step, the mean of {options.block_steps}; for inference seconds of a job"
    if "training" in options.parts:
        _measure_training(options, found)
    if "inference" in options.parts:
        _measure_inference(options, found)


def _measure_training(options: ScalingOptions, found: BenchMeasurement) -> None:
    found.say("training: starting both")
    with Arms() as arms:
        text = write_text(arms.folder, options, steps=options.total_steps)
        jobs = {
            name: loop_job(options, world_size=workers, text=text, folder=arms.folder)
            for name, workers in ((ONE, 1), (TWO, 2))
        }
        runs = {name: start_run(arms, name, job).ask for name, job in jobs.items()}
        blocks = TrainingBlocks(arms, runs, options.block_steps)
        blocks.run(options.dropped)
        found.say(f"training: {options.blocks} blocks of both")
        times = blocks.run(options.blocks)
    label = "the losses of two workers equal those of one: equal work"
    if found.gate(equal_series(label, blocks.losses[TWO], blocks.losses[ONE], relative=TOLERANCE)):
        _compare(found, times, what="training step")


def _measure_inference(options: ScalingOptions, found: BenchMeasurement) -> None:
    from ray.data import DataContext

    DataContext.get_current().wait_for_min_actors_s = STARTED_WITHIN_S
    found.say("inference: starting Ray")
    with (
        TemporaryDirectory(prefix="bench-scaling-") as folder,
        connected("local", num_cpus=4, num_gpus=0, verbose=False),
    ):
        jobs = PoolJobs(options, Path(folder))
        found.say(f"inference: {options.jobs} times two jobs of {jobs.rows} rows")
        times = alternate({ONE: partial(jobs.run, 1), TWO: partial(jobs.run, 2)}, blocks=options.jobs, dropped=0)
    same = len(jobs.answers) == 1 and all(len(one) == jobs.rows for one in jobs.answers)
    detail = f"{len(jobs.rows_by_worker)} jobs of {jobs.rows} rows"
    found.gate(Check("one and two workers: every job wrote the same answer to each row", same, detail))
    counts = [sorted(rows.values()) for workers, rows in jobs.rows_by_worker if workers == 2]
    found.values["rows of each of two workers, by job"] = counts
    equal = all(sum(one) == jobs.rows for one in counts)
    found.gate(Check("two workers answer all rows, each once", equal, f"{counts} of {jobs.rows}"))
    _compare(found, times, what="inference job")


class PoolJobs:
    """Answers the same prompts again and again with actors of the pool, each time into a folder of its own."""

    def __init__(self, options: ScalingOptions, folder: Path) -> None:
        self.rows, self._folder, self._numbers = 2 * options.samples, folder, count()
        draw = np.random.default_rng(options.seed)
        lengths = draw.integers(max(1, options.prompt // 2), options.prompt + 1, self.rows)
        texts = [bytes(draw.integers(97, 123, length).astype(np.uint8)).decode() for length in lengths]
        parquet.write_table(pa.table({"text": texts}), folder / "prompts.parquet")
        sizes: Any = {**options.sizes, "context": options.prompt + options.answer, "vocab_size": VOCABULARY}
        keys = ModelConfig.model_validate({"builder": "jobs.bench.infer:seeded_gpt", "seed": options.seed, **sizes})
        model = InferenceModel(keys, facts={"vocab_size": VOCABULARY})
        prompts, config = InputRows.at([str(folder / "prompts.parquet")]), InferConfig(max_new_tokens=options.answer)
        self._work = Work(model, config, prompts, "", options.unit_rows, 0, 1)
        self._units = units_of(self.rows, options.unit_rows)
        self.answers: set[tuple[Any, ...]] = set()  # the distinct ones of all jobs: one, if they are the same
        self.rows_by_worker: list[tuple[int, dict[str, int]]] = []  # of each job: (workers, rows of each)

    def run(self, workers: int) -> float:
        """Seconds of one job from the begin of its first unit to the end of the last one, as `summary.json` has them:
        the start of the workers is not in them."""
        parts = self._folder / f"parts-{next(self._numbers)}"
        parts.mkdir()
        work = replace(self._work, parts=str(parts))
        reports = list(run_units(work, self._units, workers=workers, at_once=workers, cpus=1, gpus=0))
        tables = (parquet.read_table(parts / part_name(unit.number)) for unit in self._units)
        self.answers.add(tuple(answer for table in tables for answer in table["prediction"].to_pylist()))
        rows: Counter[str] = Counter()
        for report in reports:
            rows[report.worker] += report.rows
        self.rows_by_worker.append((workers, dict(rows)))
        return max(report.end for report in reports) - min(report.begin for report in reports)


def _compare(found: BenchMeasurement, times: dict[str, list[float]], *, what: str) -> None:
    """Add the arms, and the ratio of two workers to one."""
    found.arms |= {f"{what}, {name}": values for name, values in times.items()}
    name = f"seconds of {'an' if what[0] in 'aeiou' else 'a'} {what}, two workers / one"
    found.compare(times, of=TWO, to=ONE, name=name, goal=GOAL)
