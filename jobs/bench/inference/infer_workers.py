"""The parts of `bench infer` about workers: what the pool costs, pulled units, and workers that only sleep.

Times are those from the begin of the first unit to the end of the last one, as `summary.json` has them: the start of
Ray and of the workers is not in them. A steady run is timed from the end of its first unit, in which a process
computes its first batch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.inference.infer_models import VOCABULARY
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.input import InputRows, Unit, UnitReport, units_of
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import part_name
from raytrain.infer.ray_data import run_units
from raytrain.infer.worker import InferenceWorker, Work

#: Seconds of one worker of the pool over those of the same units in this process.
GOAL_POOL = Goal(at_most=1.05)
#: Seconds of two equal shards over those of units that two workers pull, one worker at half speed.
GOAL_PULL = Goal(at_least=1.3)
#: Seconds of one sleeping worker over those of two, and of four.
GOAL_TWO = Goal(at_least=1.9)
GOAL_FOUR = Goal(at_least=3.8)
FOUR = 4
#: A job begins when all its workers have loaded the model, so that its time is that of a steady pool.
STARTED_WITHIN_S = 300
FOUR_OVER_ONE = "seconds, one sleeping worker / four"
MODELS = "jobs.bench.inference.infer_models"

Arm = Callable[[Work, list[Unit]], list[UnitReport]]


def measure_workers(options: Any, found: BenchMeasurement, say: Say) -> None:
    """The parts that need a cluster, on one."""
    from ray.data import DataContext

    from jobs.driver.runtime import connected

    DataContext.get_current().wait_for_min_actors_s = STARTED_WITHIN_S
    say("starting Ray")
    with (
        TemporaryDirectory(prefix="bench-infer-") as folder,
        connected("local", num_cpus=FOUR + 1, num_gpus=0, verbose=False),
    ):
        for part, measure in (("pool", _measure_pool), ("pull", _measure_pull), ("four", _measure_four)):
            if part in options.parts:
                measure(options, found, Path(folder), say)


def pooled(work: Work, units: list[Unit], *, workers: int) -> list[UnitReport]:
    """The units on so many actors of the pool."""
    return list(run_units(work, units, workers=workers, at_once=workers, cpus=1, gpus=0))


def _here(work: Work, units: list[Unit]) -> list[UnitReport]:
    worker = InferenceWorker(work, "this process")
    worker.load()
    return [worker.run(unit) for unit in units]


def _halves(work: Work, units: list[Unit]) -> list[UnitReport]:
    """Equal shards for two workers, fixed before they start."""
    workers = [InferenceWorker(replace(work, rows=replace(work.rows)), name) for name in ("a", "b")]
    for worker in workers:
        worker.load()
    reports: list[UnitReport] = []
    shards = units[: len(units) // 2], units[len(units) // 2 :]
    threads = [
        threading.Thread(target=_shard, args=(worker, shard, reports))
        for worker, shard in zip(workers, shards, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def _shard(worker: InferenceWorker, units: Sequence[Unit], reports: list[UnitReport]) -> None:
    for unit in units:
        reports.append(worker.run(unit))


def wall_seconds(reports: Sequence[UnitReport]) -> float:
    """Seconds from the begin of the first unit to the end of the last one."""
    return max(report.end for report in reports) - min(report.begin for report in reports)


def _steady(reports: Sequence[UnitReport]) -> float:
    """Seconds from the end of the first unit to the end of the last one."""
    ends = [report.end for report in reports]
    return max(ends) - min(ends)


def rows_by_worker(reports: Sequence[UnitReport]) -> dict[str, int]:
    """Worker -> rows that it answered."""
    return dict(sum((Counter({report.worker: report.rows}) for report in reports), Counter[str]()))


class JobRunner:
    """Runs the same units again and again, each time into a folder of its own, and compares what was written."""

    def __init__(
        self,
        work: Work,
        units: list[Unit],
        folder: Path,
        seconds: Callable[[Sequence[UnitReport]], float] = wall_seconds,
    ) -> None:
        self.work, self.units, self.folder, self.seconds = work, units, folder, seconds
        self.reports: dict[str, list[list[UnitReport]]] = {}
        self.answers: dict[str, set[tuple[Any, ...]]] = {}
        self._numbers = count()

    def run(self, name: str, arm: Arm) -> float:
        """Seconds of one job."""
        parts = self.folder / f"parts-{next(self._numbers)}"
        model = self.work.model
        if "claim" in model.model.keys:
            model = replace(model, model=ModelConfig(**{**model.model.model_dump(exclude_none=True),
                                                        "claim": f"{parts}.claim"}))  # fmt: skip
        parts.mkdir(parents=True)
        reports = arm(replace(self.work, model=model, parts=str(parts)), self.units)
        self.reports.setdefault(name, []).append(reports)
        self.answers.setdefault(name, set()).add(tuple(_answers(parts, self.units)))
        return self.seconds(reports)

    def gate(self, found: BenchMeasurement, what: str) -> None:
        """All jobs wrote the same predictions."""
        distinct = set[tuple[Any, ...]]().union(*self.answers.values())
        rows = sum(unit.rows for unit in self.units)
        equal = len(distinct) == 1 and all(len(one) == rows for one in distinct)
        jobs = sum(map(len, self.reports.values()))
        found.gate(Check(f"{what}: every job wrote the same answer to each row", equal, f"{jobs} jobs of {rows} rows"))


def _answers(parts: Path, units: Sequence[Unit]) -> Iterator[Any]:
    from pyarrow import parquet

    for unit in units:
        yield from parquet.read_table(parts / part_name(unit.number))["prediction"].to_pylist()


def _measure_pool(options: Any, found: BenchMeasurement, folder: Path, say: Say) -> None:
    """What the pool costs: one worker of it against the loop in this process, each with one thread."""
    for kind, units, unit_rows, seconds, goal in (
        ("steady", options.steady_units, options.steady_rows, _steady, GOAL_POOL),
        ("small units", options.units, options.unit_rows, wall_seconds, None),
    ):
        work, every = gpt_work(options, folder, units=units, unit_rows=unit_rows)
        jobs = JobRunner(work, every, folder / f"pool-{unit_rows}", seconds)
        one, here = f"one worker, {kind}", f"this process, {kind}"
        arms: dict[str, Arm] = {one: partial(pooled, workers=1), here: _here}
        with _one_thread():
            times = _measured(options, jobs, arms, f"pool, {kind}", say)
        found.arms |= times
        jobs.gate(found, f"pool, {kind}")
        found.compare(times, of=one, to=here, goal=goal,
                      name=f"seconds, one worker of the pool / this process, units of {unit_rows} rows")  # fmt: skip
        idle = [1 - sum(report.seconds for report in reports) / wall_seconds(reports) for reports in jobs.reports[one]]
        found.values[f"share of the time in which the pool's worker waits for a unit of {unit_rows} rows"] = idle


def gpt_work(options: Any, folder: Path, *, units: int, unit_rows: int) -> tuple[Work, list[Unit]]:
    """Prompts that a GPT with the sizes of the options answers, in batches of `options.unit_rows`, with one thread."""
    keys = {name: getattr(options, name) for name in ("layers", "heads", "width", "seed")}
    keys |= {"context": options.prompt + options.answer, "vocab_size": VOCABULARY}
    model = InferenceModel(ModelConfig(builder=f"{MODELS}:seeded_gpt", **keys), facts={"vocab_size": VOCABULARY})
    rows = units * unit_rows
    found_in = _text_rows(folder / f"text-{unit_rows}.parquet", rows, options)
    work = Work(model, InferConfig(max_new_tokens=options.answer), found_in, "", options.unit_rows, 0, 1)
    return work, units_of(rows, unit_rows)


def _measure_pull(options: Any, found: BenchMeasurement, folder: Path, say: Say) -> None:
    work, units = _sleeping(options, folder, units=max(1, options.sleep_units // 2), claim=True)
    jobs = JobRunner(work, units, folder / "pull")
    arms: dict[str, Arm] = {"equal shards": _halves, "pulled": partial(pooled, workers=2)}
    times = _measured(options, jobs, arms, "pull", say)
    found.arms |= times
    jobs.gate(found, "pull")
    found.compare(times, of="equal shards", to="pulled", goal=GOAL_PULL,
                  name="seconds, equal shards / pulled units, one of two workers at half speed")  # fmt: skip


def _measure_four(options: Any, found: BenchMeasurement, folder: Path, say: Say) -> None:
    work, units = _sleeping(options, folder, units=options.sleep_units, claim=False)
    jobs = JobRunner(work, units, folder / "four")
    arms: dict[str, Arm] = {
        "one sleeping worker": partial(pooled, workers=1), "two sleeping workers": partial(pooled, workers=2),
        "four sleeping workers": partial(pooled, workers=FOUR),
    }  # fmt: skip
    times = _measured(options, jobs, arms, "four", say)
    found.arms |= times
    jobs.gate(found, "four")
    found.compare(times, of="one sleeping worker", to="two sleeping workers", goal=GOAL_TWO,
                  name="seconds, one sleeping worker / two")  # fmt: skip
    found.compare(times, of="one sleeping worker", to="four sleeping workers", goal=GOAL_FOUR, name=FOUR_OVER_ONE)


def _measured(options: Any, jobs: JobRunner, arms: dict[str, Arm], part: str, say: Say) -> dict[str, list[float]]:
    say(f"{part}: {options.jobs} times {len(arms)} jobs of {len(jobs.units)} units")
    blocks = {name: partial(jobs.run, name, arm) for name, arm in arms.items()}
    return alternate(blocks, blocks=options.jobs, dropped=0)


def _sleeping(options: Any, folder: Path, *, units: int, claim: bool) -> tuple[Work, list[Unit]]:
    """Units whose batches sleep; of two workers, one sleeps twice as long with `claim`."""
    import pyarrow as pa
    from pyarrow import parquet

    rows, unit_rows = units * 8, 8
    path = folder / "numbers.parquet"
    parquet.write_table(pa.table({"x": [float(row) for row in range(rows)]}), path)
    keys = {"seconds": options.sleep_ms / 1e3, **({"claim": "one for each job"} if claim else {})}
    model = InferenceModel(ModelConfig(builder=f"{MODELS}:sleeper", **keys))
    work = Work(model, InferConfig(), InputRows.at([str(path)]), "", unit_rows, 0, 1)
    return work, units_of(rows, unit_rows)


def _text_rows(path: Path, rows: int, options: Any) -> InputRows:
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    draw = np.random.default_rng(options.seed)
    lengths = draw.integers(max(1, options.prompt // 2), options.prompt + 1, rows)
    texts = [bytes(draw.integers(97, 123, length).astype(np.uint8)).decode() for length in lengths]
    parquet.write_table(pa.table({"text": texts}), path)
    return InputRows.at([str(path)])


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
