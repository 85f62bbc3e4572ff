"""Measures how long each part of a divided model takes: one stage after another, in one process, on rows of the input.

No more than one stage has memory at a time, so that a model that fits no device can be measured before its stages are
balanced. All of its weights are read once for that.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raytrain.accelerator import empty_cache, seconds_of
from raytrain.errors import RunError
from raytrain.infer.input import Unit, batches_of
from raytrain.infer.predictor import Predictor, TextPredictor
from raytrain.infer.stages.split import SplitModule, load_stage, skeleton_of
from raytrain.infer.stages.stage import CacheUse, ModelStage, StagePass
from raytrain.train.memory.device import limit_device_memory

if TYPE_CHECKING:
    from raytrain.infer.worker import Work

#: Batches that are timed, after one that warms up; tokens of an answer that are generated for it.
BATCHES, TOKENS = 3, 4
#: A job of fewer batches is over sooner than its model is measured.
LEAST_BATCHES = 64


@dataclass(frozen=True)
class PartTimes:
    """What was measured; can be pickled."""

    # of each part of the plan, for a batch with its whole answers; () if nothing was measured
    seconds: tuple[float, ...] = ()
    reason: str = ""  # why nothing was measured; "" otherwise
    took_s: float = 0.0  # seconds of the measurement


def measure_parts(work: Work, unit: Unit) -> PartTimes:
    """Time every part on some batches of a unit. A row or a batch that fails ends it: the job computes the row
    again, and tells. Raises InputError: the model does not fit its weights or the input."""
    began = time.perf_counter()
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    recorder = PassRecorder()
    pipeline: Any = recorder
    module = SplitModule(skeleton_of(work.model).module, pipeline, inflight=1)
    predictor = work.model.load(work.infer, work.rows.schema, module)
    recorder.generates = predictor.generates
    try:
        batches = [_recorded(recorder, predictor, work, unit, batch) for batch in _chosen(predictor, work, unit)]
    except Exception as error:  # of a row
        return PartTimes(reason=f"a row failed: {type(error).__name__}")
    assert work.split is not None
    seconds = list[float]()
    for stage in range(work.split.plan.stages):
        try:
            seconds += _time_stage(work, stage, batches, tokens=predictor.answer_tokens)
        except RunError as error:
            return PartTimes(reason=f"a batch failed: {error}")
    return PartTimes(tuple(seconds), took_s=time.perf_counter() - began)


def _chosen(predictor: Predictor, work: Work, unit: Unit) -> list[list[int]]:
    """Batches at equal distances in the order of their lengths; the first one twice."""
    table = work.rows.read(unit.start, unit.rows, list(predictor.columns))
    lengths, refused = predictor.lengths(table), predictor.refused(table)
    left = [row for row in range(table.num_rows) if row not in refused] or list(range(table.num_rows))
    every = [[left[at] for at in batch] for batch in batches_of([lengths[row] for row in left], work.batch_size)]
    count = min(BATCHES, len(every))
    found = [every[at * len(every) // count] for at in range(count)]
    return [found[0], *found]


def _recorded(
    recorder: PassRecorder, predictor: Predictor, work: Work, unit: Unit, batch: Sequence[int]
) -> list[StagePass]:
    short: Any = predictor.shortened(TOKENS)
    if isinstance(short, TextPredictor):  # no answer may end early
        plain = replace(short.sampling, temperature=0.0, top_k=None, top_p=None, end_ids=frozenset(), stop=())
        short = replace(short, sampling=plain)
    table = work.rows.read(unit.start, unit.rows, list(predictor.columns)).take(list(batch))
    short.predict(table, [unit.start + row for row in batch])
    taken, recorder.passes = recorder.passes, []
    return taken


@dataclass
class PassRecorder:
    """In the place of a `StagePipeline`: keeps the inputs of passes instead of computing them; outputs are zeros."""

    generates: bool = False  # whether outputs are logits of tokens
    passes: list[StagePass] = field(default_factory=list)  # since they were last taken
    _caches: Any = field(default_factory=itertools.count, repr=False)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], cache: CacheUse | None = None) -> Tensor:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.passes.append(StagePass(tuple(args), dict(kwargs), cache))
        return torch.zeros(len(given), 1, 1) if self.generates else torch.zeros(len(given), 1)

    def new_cache(self) -> int:
        return next(self._caches)

    def end_cache(self, number: int) -> None:
        """Caches end with their stage."""


def _time_stage(work: Work, number: int, batches: list[list[StagePass]], *, tokens: int) -> list[float]:
    """Load a stage, run all passes through it in place, and let go of it; returns the seconds of its parts for one
    batch with answers of so many `tokens`. Raises RunError: a pass failed."""
    split = work.split
    assert split is not None
    device = torch.device(split.devices[number] if split.devices else work.model.device)
    limit_device_memory(device, fraction=work.memory_fraction, limit=work.memory_limit)
    stage = load_stage(work.model, split, number, device)
    clock = PartClock(stage)
    first: list[list[float]] = []
    later: list[list[float]] = []
    for at, passes in enumerate(batches):
        for place, one in enumerate(passes):
            passes[place] = made = stage.run(one)
            seconds = clock.take()
            if made.error is not None:
                raise RunError(made.error[1])
            if at:  # the first batch warms up; a batch's first pass reads the prompts, later ones a token each
                (later if place else first).append(seconds)
    del stage, clock
    gc.collect()  # hooks and modules refer to each other
    empty_cache(device)
    means = [sum(each) / len(first) for each in zip(*first, strict=True)]
    if later:
        each_token = [sum(each) / len(later) for each in zip(*later, strict=True)]
        means = [mean + (tokens - 1) * token for mean, token in zip(means, each_token, strict=True)]
    return means


class PartClock:
    def __init__(self, stage: ModelStage) -> None:
        plan, self._device = stage.plan, stage.device
        held = range(plan.bounds[stage.stage], plan.bounds[stage.stage + 1])
        self._seconds = [0.0] * len(held)
        self._began: list[float] = []
        for place, part in enumerate(held):
            for name in plan.parts[part].names:
                module = stage.module.get_submodule(name)
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end_of(place))

    def take(self) -> list[float]:
        taken, self._seconds = self._seconds, [0.0] * len(self._seconds)
        self._began.clear()
        return taken

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._began.append(seconds_of(self._device))

    def _end_of(self, place: int) -> Any:
        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._seconds[place] += seconds_of(self._device) - self._began.pop()

        return end
