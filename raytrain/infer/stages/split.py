"""A model over stages as one module, with several passes in flight; measures how busy each stage is.

To the rest of inference a `SplitModule` is an ordinary module.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raytrain.errors import InputError, OutOfMemory, RunError
from raytrain.infer.generate import Sampling, padded_left
from raytrain.infer.stages.partition import KEY, StagePlan
from raytrain.infer.stages.stage import (
    CACHE,
    CacheUse,
    ModelStage,
    StagePass,
    check_weights,
    fill_stage,
    without_parameters,
)
from raytrain.models.huggingface import KEYS
from raytrain.models.weights.headers import StoredWeights, find_weights
from raytrain.train.job import build_trainable
from raytrain.trainable import MASK, Trainable

if TYPE_CHECKING:
    from raytrain.infer.model import InferenceModel
    from raytrain.infer.predictor import Codec


@dataclass(frozen=True)
class StageSplit:
    """How every replica of a model is divided; can be pickled."""

    plan: StagePlan
    inflight: int  # batches of a replica that are computed at the same time
    # of the stages in one process; () where each stage is an actor, which sees its own device only
    devices: tuple[str, ...] = ()
    balance: str = "by bytes"  # what the stages were balanced by


def skeleton_of(model: InferenceModel) -> Trainable:
    """The model without memory for its parameters, which have the formats that they are held in. Raises InputError:
    the builder refuses its keys, or the model has no weights in files."""
    config = model.model.model_copy(update={"init_from": None})
    if config.builder in KEYS:
        config = config.model_copy(update={"init": "random"})  # its weights are read by the stages
    with torch.random.fork_rng(devices=[]), without_parameters():
        trainable = build_trainable(config, sections=dict(model.sections), facts=dict(model.facts), initial=False)
    model.halve(trainable.module, untie=False)
    trainable.module.eval()
    return trainable


def stored_weights(model: InferenceModel) -> StoredWeights:
    """Where the weights are. Raises InputError: in no file."""
    path = model.model.init_from or model.model.keys.get("path")
    if not isinstance(path, str):
        raise InputError(
            KEY, got="a model without weights in files", expected="model.init_from, a run, or a folder of transformers"
        )
    return find_weights(path, key=KEY)


def load_stage(model: InferenceModel, split: StageSplit, stage: int, device: torch.device) -> ModelStage:
    module, stored = skeleton_of(model).module, stored_weights(model)
    check_weights(module, stored)
    reader = fill_stage(module, stored, split.plan, stage, device=device)
    model.halve(module)  # a head that is tied to an embedding
    autocast = replace(model, device=str(device)).autocast()
    made = ModelStage(module, split.plan, stage, device=device, autocast=autocast)
    made.bytes_read = reader.bytes_read
    return made


def local_pipeline(model: InferenceModel, split: StageSplit, *, threads: int | None) -> StagePipeline:
    count = split.plan.stages
    devices = split.devices or (model.device,) * count
    stages = [load_stage(model, split, stage, torch.device(devices[stage])) for stage in range(count)]
    return StagePipeline(stages, stages=count, threads=threads)


# ---------------------------------------------------------------- passes


@dataclass
class StageTimes:
    busy_s: list[float]  # seconds that each stage computed
    wall_s: float = 0.0  # seconds while at least one pass was on its way
    passes: int = 0  # how many
    rounds: int = 0  # how often the pipeline was filled and drained

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s) if self.wall_s else 0.0

    def expected_bubble(self, in_flight: int) -> float:
        """The bubble of stages of equal speed: (p - 1) / (m + p - 1) for m passes a round, and 1 - n / p where only n
        passes are in flight at a time."""
        p = len(self.busy_s)
        m = self.passes / max(self.rounds, 1)
        return max((p - 1) / (m + p - 1), 1 - in_flight / p)

    def add(self, other: StageTimes) -> None:
        self.busy_s = [own + more for own, more in zip(self.busy_s, other.busy_s, strict=True)]
        self.wall_s += other.wall_s
        self.passes += other.passes
        self.rounds += other.rounds


class StagePipeline:
    """Takes passes through the stages of a replica: the first ones `here`, the others `beyond`, in processes of their
    own. Any number of threads may call it: while one's pass is in a stage, those of others are in stages before and
    after it."""

    def __init__(
        self, here: Sequence[ModelStage], beyond: Callable[[StagePass], StagePass] | None = None, *, stages: int,
        threads: int | None, close: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.stages = stages
        self._here = [(stage, threading.Lock()) for stage in here]
        self._beyond, self._threads, self._close = beyond, threads, close
        self._cache_numbers = itertools.count()
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()  # of what follows
        self._times = StageTimes([0.0] * stages)
        self._in_flight, self._since = 0, 0.0

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], cache: CacheUse | None = None) -> Tensor:
        """The model's output, (B, ...) on the CPU, or on the device of the last stage where that is in this process.
        Raises RunError: a stage failed. OutOfMemory: for lack of memory. StateLost: a stage has ended."""
        with self._lock:
            ended = tuple(self._ended.popleft() for _ in range(len(self._ended)))
            if not self._in_flight:
                self._since = time.perf_counter()
                self._times.rounds += 1
            self._in_flight += 1
        result = StagePass(tuple(args), kwargs, cache, ended)
        try:
            for stage, lock in self._here:
                with lock:
                    if self._threads is not None:  # of the calling thread
                        torch.set_num_threads(self._threads)
                    result = stage.run(result)
            if self._beyond is not None:
                result = self._beyond(result)
        finally:
            with self._lock:  # `result` is without the seconds of later stages where one was lost
                times = self._times
                times.passes += 1
                times.busy_s = [own + more for own, more in zip_longest(times.busy_s, result.seconds, fillvalue=0.0)]
                self._in_flight -= 1
                if not self._in_flight:
                    times.wall_s += time.perf_counter() - self._since
        if result.error is not None:
            short, text = result.error
            raise OutOfMemory(text) if short else RunError(text)
        assert result.hidden is not None
        return result.hidden

    def new_cache(self) -> int:
        return next(self._cache_numbers)

    def end_cache(self, number: int) -> None:
        """Free a cache in all stages, with the next pass. No lock: a garbage collection may call it anywhere."""
        self._ended.append(number)

    def take_times(self) -> StageTimes:
        with self._lock:
            taken, self._times = self._times, StageTimes([0.0] * self.stages)
            if self._in_flight:  # a round goes on
                now = time.perf_counter()
                taken.wall_s += now - self._since
                self._since = now
            return taken

    def close(self) -> None:
        self._here = []
        if self._close is not None:
            self._close()


class RemoteCache:
    """The caller's side of a key/value cache: which rows go on, and how long they are; the stages hold the tensors.

    It has the verbs of `raytrain.models.attention.KeyValueCache` that a generator calls.
    """

    def __init__(self, pipeline: StagePipeline, lengths: Sequence[int], *, capacity: int) -> None:
        self._pipeline = pipeline
        self._use = CacheUse(pipeline.new_cache(), tuple(lengths), capacity)

    def keep(self, rows: list[int]) -> None:
        before = self._use.keep
        kept = tuple(rows) if before is None else tuple(before[row] for row in rows)
        self._use = replace(self._use, keep=kept)

    def use(self) -> CacheUse:
        use, self._use = self._use, replace(self._use, keep=None)
        return use

    def __del__(self) -> None:
        self._pipeline.end_cache(self._use.number)


# ---------------------------------------------------------------- the model as one module


class SplitModule(nn.Module):
    """Calls of this module go through the stages of a pipeline; outputs are {"logits": (B, ...)}.

    Attributes that the model has, such as `config`, are those of its skeleton. `skeleton`: the model without memory
    for its parameters. `inflight`: see `StageSplit`."""

    def __init__(self, skeleton: nn.Module, pipeline: StagePipeline, *, inflight: int) -> None:
        super().__init__()
        self.inflight = inflight
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)  # tells callers where inputs belong: the CPU
        self.__dict__["pipeline"], self.__dict__["skeleton"] = pipeline, skeleton

        def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            cache = kwargs.pop(CACHE, None)
            use = cache.use() if isinstance(cache, RemoteCache) else None
            return {"logits": pipeline.call(args, kwargs, use).cpu()}

        self.__dict__["forward"] = forward
        forward.__signature__ = inspect.signature(skeleton.forward)  # pyright: ignore[reportFunctionMemberAccess]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "generate" or "skeleton" not in self.__dict__:  # it would call the modules of the skeleton
                raise
            return getattr(self.__dict__["skeleton"], name)

    def new_cache(self, lengths: list[int], *, capacity: int) -> RemoteCache:
        return RemoteCache(self.pipeline, lengths, capacity=capacity)

    def own_generate(self, codec: Codec, sampling: Sampling) -> Any:
        """Greedy generation with the caches of transformers in the stages; None for other models and for draws."""
        if sampling.temperature or not hasattr(self.skeleton, "generation_config"):
            return None
        return partial(greedy_over_stages, self, codec)


@torch.no_grad()
def greedy_over_stages(
    module: SplitModule, codec: Codec, prompts: list[list[int]], *, sampling: Sampling, numbers: Sequence[int]
) -> list[list[int]]:
    """Continue prompts as `raytrain.infer.generate.greedy_answers` does: the same passes, padded on the left,
    with all rows until the last one has ended."""
    del numbers
    ids, mask, pad = padded_left(prompts, sampling)
    rows, longest = ids.shape
    takes = inspect.signature(module.forward).parameters
    cache = module.new_cache([longest] * rows, capacity=longest + sampling.max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [False] * rows
    for _ in range(sampling.max_new_tokens):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        given: dict[str, Any] = {"input_ids": ids, MASK: mask}
        if "position_ids" in takes:
            given["position_ids"] = positions[:, -ids.shape[1] :]
        if "logits_to_keep" in takes:
            given["logits_to_keep"] = 1
        tokens = module(**given, cache=cache)["logits"][:, -1].float().argmax(-1).tolist()
        for row, token in enumerate(tokens):
            if ended[row] or token in sampling.end_ids:
                ended[row], tokens[row] = True, pad
                continue
            answers[row].append(token)
            if sampling.stop:
                text = codec.decode(answers[row])
                ended[row] = any(stop in text for stop in sampling.stop)
        if all(ended):
            break
        ids = torch.tensor(tokens).unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
    return answers
