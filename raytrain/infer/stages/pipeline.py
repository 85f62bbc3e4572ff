"""Runs passes through the stages of a model, several at a time, and measures how busy each stage is."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raytrain.errors import OutOfMemory, RunError
from raytrain.infer.stages.links import Link, StageLost
from raytrain.infer.stages.message import CacheUse, StagePass
from raytrain.infer.stages.stage import ModelStage

ENDED = "a stage of this model has ended"


@dataclass
class StageTimes:
    """How busy the stages were.

    Attributes:
        busy_s: seconds that each stage computed.
        wall_s: seconds while at least one pass was on its way.
        passes: how many.
        rounds: how often the pipeline was filled and drained.
    """

    busy_s: list[float]
    wall_s: float = 0.0
    passes: int = 0
    rounds: int = 0

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they waited."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s) if self.wall_s else 0.0

    def expected_bubble(self, in_flight: int) -> float:
        """The bubble of stages of equal speed: (p - 1) / (m + p - 1) for m passes a round, and 1 - n / p where only n
        passes are in flight at a time."""
        p = len(self.busy_s)
        m = self.passes / max(self.rounds, 1)
        return max((p - 1) / (m + p - 1), 1 - in_flight / p)

    def add(self, other: StageTimes) -> None:
        """Count another replica's."""
        self.busy_s = [own + more for own, more in zip(self.busy_s, other.busy_s, strict=True)]
        self.wall_s += other.wall_s
        self.passes += other.passes
        self.rounds += other.rounds


def serve(stage: ModelStage, source: Link, target: Link, *, threads: int | None) -> None:
    """Compute passes until the source ends; the loop of a stage's thread."""
    if threads is not None:
        torch.set_num_threads(threads)
    if stage.device.type == "cuda":
        torch.cuda.set_device(stage.device)
    try:
        while (message := source.receive()) is not None:
            target.send(stage.run(message))
    except StageLost:
        pass  # the caller notices, since nothing comes back
    finally:
        target.close()


@dataclass
class _Waiting:
    """The passes that are on their way."""

    futures: dict[int, Future[StagePass]] = field(default_factory=dict)
    since: float = 0.0


class StagePipeline:
    """The caller's end of a replica's stages; any number of threads may call it at the same time.

    Args:
        source: into the first stage.
        target: out of the last one.
        stages: how many there are.
        close: called at the end.
        lost: the error of the stage that ended, given one that says only that some did.
    """

    def __init__(
        self, source: Link, target: Link, *, stages: int, close: Callable[[], None] | None = None,
        lost: Callable[[StageLost], StageLost] = lambda error: error,
    ) -> None:  # fmt: skip
        self.stages, self._error_of = stages, lost
        self._source, self._close = source, close
        self._numbers, self._cache_numbers = itertools.count(), itertools.count()
        self._lock = threading.Lock()
        self._waiting = _Waiting()
        self._ended: deque[int] = deque()
        self._lost = False
        self._times = StageTimes([0.0] * stages)
        self._receiver = threading.Thread(target=self._receive, args=(target,), name="stages", daemon=True)
        self._receiver.start()

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], cache: CacheUse | None = None) -> Tensor:
        """The model's output, (B, ...) on the CPU, or on the device of the last stage where that is in this process.

        Raises:
            RunError: a stage failed. OutOfMemory: for lack of memory. StageLost: a stage has ended.
        """
        future: Future[StagePass] = Future()
        with self._lock:
            if self._lost:
                raise self._error_of(StageLost(ENDED))
            number = next(self._numbers)
            ended = tuple(self._ended.popleft() for _ in range(len(self._ended)))
            if not self._waiting.futures:
                self._waiting.since = time.perf_counter()
                self._times.rounds += 1
            self._waiting.futures[number] = future
            self._source.send(StagePass(number, tuple(args), kwargs, cache, ended))
        result = future.result()
        if result.error is not None:
            short, text = result.error
            raise OutOfMemory(text) if short else RunError(text)
        assert result.hidden is not None
        return result.hidden

    def new_cache(self) -> int:
        """The number of a new key/value cache."""
        return next(self._cache_numbers)

    def end_cache(self, number: int) -> None:
        """Free a cache in all stages, with the next pass. No lock: a garbage collection may call it anywhere."""
        self._ended.append(number)

    def take_times(self) -> StageTimes:
        """What was measured since the last call."""
        with self._lock:
            taken, self._times = self._times, StageTimes([0.0] * self.stages)
            if self._waiting.futures:  # a round goes on
                now = time.perf_counter()
                taken.wall_s += now - self._waiting.since
                self._waiting.since = now
            return taken

    def close(self) -> None:
        """End the stages."""
        self._source.close()
        if self._close is not None:
            self._close()
        self._receiver.join()

    def _receive(self, target: Link) -> None:
        while (message := target.receive()) is not None:
            with self._lock:
                future = self._waiting.futures.pop(message.number)
                self._times.passes += 1
                busy = [own + more for own, more in zip(self._times.busy_s, message.seconds, strict=True)]
                self._times.busy_s = busy
                if not self._waiting.futures:
                    self._times.wall_s += time.perf_counter() - self._waiting.since
            future.set_result(message)
        with self._lock:
            self._lost = True
            left, self._waiting.futures = list(self._waiting.futures.values()), {}
        error = self._error_of(StageLost(ENDED)) if left else None
        for future in left:
            future.set_exception(error)


class RemoteCache:
    """The caller's side of a key/value cache: which rows go on, and how long they are; the stages hold the tensors.

    It has the verbs of `raytrain.models.cache.KeyValueCache` that a generator calls.
    """

    def __init__(self, pipeline: StagePipeline, lengths: Sequence[int], *, capacity: int) -> None:
        self._pipeline = pipeline
        self._use = CacheUse(pipeline.new_cache(), tuple(lengths), capacity)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        before = self._use.keep
        kept = tuple(rows) if before is None else tuple(before[row] for row in rows)
        self._use = replace(self._use, keep=kept)

    def use(self) -> CacheUse:
        """For the next pass."""
        use, self._use = self._use, replace(self._use, keep=None)
        return use

    def __del__(self) -> None:
        self._pipeline.end_cache(self._use.number)
