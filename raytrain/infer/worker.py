"""One worker of an inference job: loads the model once, then computes units and writes their files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import nn

from raytrain.accelerator import make_current
from raytrain.config.sections import InferConfig
from raytrain.infer.input import InputRows, Unit, UnitReport, as_json
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import write_part
from raytrain.infer.quantize import COMPARED_ROWS, quantization_of, quantize_compared
from raytrain.infer.runner import TooManyFailures, UnitRunner
from raytrain.infer.stages.split import SplitModule, StagePipeline, StageSplit, local_pipeline, skeleton_of
from raytrain.train.memory.device import limit_device_memory
from raytrain.trainable import RemoteState


@dataclass(frozen=True)
class Work:
    """What every worker of a job gets; can be pickled."""

    model: InferenceModel
    infer: InferConfig
    rows: InputRows
    parts: str  # the folder of the units' files
    batch_size: int  # rows of a batch
    most_failed: int  # failed rows that end the job
    threads: int | None = None  # CPU threads of a worker, or of each of its stages; None leaves torch's
    job: str = ""  # `digest_of` the job
    # memory_fraction, memory_limit: of the `cluster` section, for a worker's GPU
    memory_fraction: float = 1.0
    memory_limit: int | None = None
    # how a model that does not fit one device is divided; None for a whole copy in each worker
    split: StageSplit | None = None
    hosts: int = 0  # processes beside each worker that hold its experts, which the model's builder starts; 0 for none
    import_path: str = "."  # folder of the user's code

    @property
    def processes_of_worker(self) -> int:
        """A worker, or all stages of a replica, or a worker and its hosts."""
        return 1 + self.hosts if self.split is None else self.split.plan.stages


@dataclass
class InferenceWorker:
    """Computes units; the first call loads the model."""

    work: Work
    name: str
    # called after each batch with the unit and how many of its rows are done
    on_rows: Callable[[Unit, int], None] = field(default=lambda unit, rows: None)
    # returns the pipeline of a divided model's stages; by default all are in this process
    connect: Callable[[], StagePipeline] | None = None
    load_s: float = field(default=0.0, init=False)
    _runner: UnitRunner | None = field(default=None, init=False, repr=False)
    _pipeline: StagePipeline | None = field(default=None, init=False, repr=False)
    _quantized: str = field(default="", init=False, repr=False)

    def load(self) -> UnitRunner:
        if self._runner is None:
            began = time.perf_counter()
            work = self.work
            if work.threads is not None:
                torch.set_num_threads(work.threads)
            device = torch.device(work.model.device)
            make_current(device)
            limit_device_memory(device, fraction=work.memory_fraction, limit=work.memory_limit)
            module: nn.Module | None = None
            remote = RemoteState()
            if work.split is not None:
                connect = self.connect or partial(local_pipeline, work.model, work.split, threads=work.threads)
                self._pipeline = connect()
                skeleton = skeleton_of(work.model).module
                module = SplitModule(skeleton, self._pipeline, inflight=work.split.inflight)
            elif work.hosts:
                module, remote = work.model.beside_others()
            predictor = work.model.load(work.infer, work.rows.schema, module)
            if work.infer.quantize is not None:
                # where the device had no room for weights in floating point, they are quantized already
                found = quantization_of(predictor.module)
                if found is None:
                    rows = self.work.rows
                    table = rows.read(0, min(COMPARED_ROWS, rows.rows), list(predictor.columns))
                    refused = predictor.refused(table)
                    left = [row for row in range(table.num_rows) if row not in refused]
                    found = quantize_compared(predictor, table.take(left))
                self.work.model.halve(predictor.module)  # what is left: int8 values are those of float32
                self._quantized = json.dumps(asdict(found))
            at_once = 1 if work.split is None else work.split.inflight
            self._runner = UnitRunner(
                predictor, work.rows, work.batch_size, work.most_failed, device, self.on_rows, at_once, remote
            )
            self.load_s = time.perf_counter() - began
        return self._runner

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()

    def run(self, unit: Unit) -> UnitReport:
        """Compute a unit and write its file, unless more rows of it fail than the job allows."""
        import pyarrow as pa

        runner, begin = self.load(), time.time()
        began, shortages = time.perf_counter(), runner.out_of_memory
        infer = self.work.infer
        kept = kept_columns(infer, runner.rows.schema.names)
        needed = [*runner.predictor.columns, *kept, *([infer.id_column] if infer.id_column else [])]
        try:
            table, results = runner.run(unit, list(dict.fromkeys(needed)))
        except TooManyFailures as error:
            return UnitReport(
                unit.number, unit.rows, self.work.most_failed + 1, 0, time.perf_counter() - began, self.name,
                self.load_s, runner.out_of_memory - shortages, begin, time.time(), error=str(error),
            )  # fmt: skip
        places = range(unit.start, unit.start + unit.rows)
        ids = pa.array(places, pa.int64()) if infer.id_column is None else table[infer.id_column].combine_chunks()
        report = UnitReport(
            unit.number, unit.rows, sum(result.error is not None for result in results),
            sum(result.tokens for result in results), time.perf_counter() - began, self.name, self.load_s,
            runner.out_of_memory - shortages, begin, time.time(),
            "" if self._pipeline is None else json.dumps(asdict(self._pipeline.take_times())), self._quantized,
        )  # fmt: skip
        write_part(self.work.parts, unit, table.select(kept), results, ids=ids, report=report, job=self.work.job)
        return replace(report, seconds=time.perf_counter() - began, end=time.time())


def kept_columns(infer: InferConfig, among: Sequence[str] = ()) -> list[str]:
    """The columns to write beside the predictions, with those `among` the input's that hold their values as JSON."""
    names: list[str] = list(dict.fromkeys([*infer.keep, *([infer.label] if infer.label else [])]))
    exact = names if infer.format == "jsonl" else []
    return names + [as_json(name) for name in exact if as_json(name) in among]
