"""The parts of `bench infer` about several processes: what the pool of workers costs, and a model over two stages.

Times are those from the begin of the first unit to the end of the last one, as `summary.json` has them: the start of
Ray and of the workers is not in them. A steady run is timed from the end of its first unit, in which a process
computes its first batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.infer_generation import VOCABULARY
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.input import InputRows, Unit, UnitReport, units_of
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import part_name
from raytrain.infer.ray_data import run_units
from raytrain.infer.worker import InferenceWorker, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Seconds of one worker of the pool over those of the same units in this process.
GOAL_POOL = Goal(at_most=1.05)
#: A job begins when all its workers have loaded the model, so that its time is that of a steady pool.
STARTED_WITHIN_S = 300
#: Seconds of one process with the whole model over those of two stages with all batches in flight; 16 / 9 is possible.
GOAL_STAGES = Goal(at_least=1.3)
STAGES = 2
BUILDER = "jobs.bench.infer_generation:seeded_gpt"

Arm = Callable[[Work, list[Unit]], list[UnitReport]]


def pooled(work: Work, units: list[Unit], *, workers: int) -> list[UnitReport]:
    """The units on so many actors of the pool."""
    return list(run_units(work, units, workers=workers, at_once=workers, cpus=1, gpus=0))


def _here(work: Work, units: list[Unit]) -> list[UnitReport]:
    worker = InferenceWorker(work, "this process")
    worker.load()
    return [worker.run(unit) for unit in units]


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
        parts.mkdir(parents=True)
        reports = arm(replace(self.work, parts=str(parts)), self.units)
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


def measure_pool(options: Any, found: BenchMeasurement, say: Say) -> None:
    """One worker of the pool against the loop in this process, each with one thread."""
    from ray.data import DataContext

    from jobs.bench.harness.sessions import restored_threads
    from jobs.driver.runtime import connected

    DataContext.get_current().wait_for_min_actors_s = STARTED_WITHIN_S
    say("pool: starting Ray")
    with (
        TemporaryDirectory(prefix="bench-infer-") as folder,
        connected("local", num_cpus=2, num_gpus=0, verbose=False),
        restored_threads(1),
    ):
        work, units = gpt_work(options, Path(folder), units=options.units, unit_rows=options.steady_rows)
        jobs = JobRunner(work, units, Path(folder) / "pool", _steady)
        one, here = "one worker of the pool", "this process"
        arms: dict[str, Arm] = {one: partial(pooled, workers=1), here: _here}
        say(f"pool: {options.jobs} times two jobs of {options.units} units")
        blocks = {name: partial(jobs.run, name, arm) for name, arm in arms.items()}
        times = alternate(blocks, blocks=options.jobs, dropped=0)
        found.arms |= times
        jobs.gate(found, "pool")
        name = f"seconds, one worker of the pool / this process, units of {options.steady_rows} rows"
        found.compare(times, of=one, to=here, goal=GOAL_POOL, name=name)


def gpt_work(options: Any, folder: Path, *, units: int, unit_rows: int) -> tuple[Work, list[Unit]]:
    """Prompts that a GPT with the sizes of the options answers, in batches of `options.unit_rows`, with one thread."""
    keys = {name: getattr(options, name) for name in ("layers", "heads", "width", "seed")}
    keys |= {"context": options.prompt + options.answer, "vocab_size": VOCABULARY}
    model = InferenceModel(ModelConfig(builder=BUILDER, **keys), facts={"vocab_size": VOCABULARY})
    rows = units * unit_rows
    found_in = _text_rows(folder / f"text-{unit_rows}.parquet", rows, options)
    work = Work(model, InferConfig(max_new_tokens=options.answer), found_in, "", options.unit_rows, 0, 1)
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


# -- stages ---------------------------------------------------------------------------------------


def measure_stages(options: Any, found: BenchMeasurement, say: Say) -> None:
    """Seconds of the same batches through the whole model, and over two stages with one or all of them in flight."""
    import torch

    from jobs.bench.harness.sessions import restored_threads
    from jobs.driver.runtime import connected
    from raytrain.infer.stages.actors import remote_pipeline
    from raytrain.infer.stages.partition import plan_stages
    from raytrain.infer.stages.split import SplitModule, StageSplit, skeleton_of
    from raytrain.infer.stages.stage import parts_of

    draw = torch.Generator().manual_seed(options.seed)
    shape = (options.stage_rows, options.stage_tokens)
    batches = [torch.randint(VOCABULARY, shape, generator=draw) for _ in range(options.micro_batches)]
    say("stages: starting Ray")
    with (
        TemporaryDirectory(prefix="bench-infer-") as folder,
        connected("local", num_cpus=STAGES + 1, num_gpus=0, verbose=False),
        ThreadPoolExecutor(len(batches)) as pool,
        restored_threads(1),
        torch.inference_mode(),
    ):
        model, whole = _model(options, Path(folder))
        split = StageSplit(plan_stages(parts_of(skeleton_of(model)), STAGES), len(batches))
        work = Work(model, InferConfig(), InputRows.at([]), folder, 1, 0, 1, split=split)
        pipeline = remote_pipeline(work, cpus=1, gpus=0)
        module = SplitModule(skeleton_of(model).module, pipeline, inflight=len(batches))
        outputs: dict[str, list[Tensor]] = {}
        arms = {
            "whole model": partial(_timed, outputs, "whole", partial(_in_turn, whole, batches)),
            "two stages, 1 in flight": partial(_timed, outputs, "one", partial(_in_turn, module, batches)),
            f"two stages, {len(batches)} in flight": partial(
                _timed, outputs, "all", partial(_at_once, pool, module, batches)
            ),
        }
        say(f"stages: {options.stage_blocks} times {len(arms)} arms of {len(batches)} batches")
        times = alternate(arms, blocks=options.stage_blocks)
        pipeline.close()
    equal = all(
        torch.equal(a, b) for name in ("one", "all") for a, b in zip(outputs["whole"], outputs[name], strict=True)
    )
    found.gate(
        Check("stages: the outputs of the whole model, bit for bit", equal, f"{len(batches)} batches of {shape}")
    )
    found.arms |= times
    name = "seconds, whole model in one process / "
    *_, one, every = arms
    found.compare(times, of="whole model", to=one, name=name + one)
    found.compare(times, of="whole model", to=every, name=name + every, goal=GOAL_STAGES)


def _model(options: Any, folder: Path) -> tuple[InferenceModel, nn.Module]:
    """The model with weights in a file, and itself whole."""
    from jobs.bench.infer_generation import seeded_gpt
    from raytrain.models.weights.stored import export_weights

    sizes = {"layers": options.stage_layers, "heads": options.heads, "width": options.stage_width,
             "context": options.stage_tokens, "vocab_size": VOCABULARY}  # fmt: skip
    module = seeded_gpt(**sizes, seed=options.seed).module.eval()
    path = str(folder / "model.safetensors")
    export_weights(module.state_dict(), path)
    keys = {"builder": "raytrain.models.gpt:gpt", "init_from": path, **sizes}
    return InferenceModel(ModelConfig.model_validate(keys)), module


def _timed(outputs: dict[str, list[Tensor]], name: str, run: Any) -> float:
    began = time.perf_counter()
    outputs[name] = run()
    return time.perf_counter() - began


def _in_turn(module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [module(input_ids=batch)["logits"] for batch in batches]


def _at_once(pool: ThreadPoolExecutor, module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return list(pool.map(lambda batch: module(input_ids=batch)["logits"], batches))
