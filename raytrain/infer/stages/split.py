"""A model over stages as one module: `SplitModule` has the forward of the whole model, and none of its weights."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.infer.stages.links import Link, LocalLink
from raytrain.infer.stages.pipeline import RemoteCache, StagePipeline, serve
from raytrain.infer.stages.plan import KEY, StagePlan
from raytrain.infer.stages.sequence import without_parameters
from raytrain.infer.stages.stage import CACHE, ModelStage
from raytrain.infer.stages.weights import check_weights, fill_stage
from raytrain.infer.text.generate import Sampling
from raytrain.infer.text.transformers import padded_left
from raytrain.models.huggingface.folder import KEYS
from raytrain.models.weights.headers import StoredWeights, find_weights
from raytrain.train.build import build_trainable
from raytrain.trainable import MASK, Trainable

if TYPE_CHECKING:
    from raytrain.infer.model import InferenceModel
    from raytrain.infer.predictor import Codec


@dataclass(frozen=True)
class StageSplit:
    """How every replica of a model is divided; can be pickled.

    Attributes:
        inflight: batches of a replica that are computed at the same time.
        devices: of the stages in one process; () where each stage is an actor, which sees its own device only.
        balance: what the stages were balanced by, and why.
        seconds: measured, of each part for a batch; () where the stages are not balanced by them.
    """

    plan: StagePlan
    inflight: int
    devices: tuple[str, ...] = ()
    balance: str = "bytes"
    seconds: tuple[float, ...] = ()

    @property
    def stage_seconds(self) -> list[float]:
        """Measured seconds of each stage for a batch; empty where they are not known."""
        bounds = pairwise(self.plan.bounds) if self.seconds else ()
        return [sum(self.seconds[begin:end]) for begin, end in bounds]


def skeleton_of(model: InferenceModel) -> Trainable:
    """The model without memory for its parameters, which have the formats that they are held in.

    Raises:
        InputError: the builder refuses its keys, or the model has no weights in files.
    """
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
    """One stage with its tensors, of which no others are read."""
    module, stored = skeleton_of(model).module, stored_weights(model)
    check_weights(module, stored)
    reader = fill_stage(module, stored, split.plan, stage, device=device)
    model.halve(module)  # a head that is tied to an embedding
    made = ModelStage(module, split.plan, stage, device=device, autocast=model.on(str(device)).autocast())
    made.bytes_read = reader.bytes_read
    return made


def local_pipeline(model: InferenceModel, split: StageSplit, *, threads: int | None) -> StagePipeline:
    """All stages in this process, each in a thread of its own."""
    count = split.plan.stages
    devices = split.devices or (model.device,) * count
    stages = [load_stage(model, split, stage, torch.device(devices[stage])) for stage in range(count)]
    links: list[Link] = [LocalLink() for _ in range(count + 1)]
    start_stages(stages, links, threads=threads)
    return StagePipeline(links[0], links[-1], stages=count)


def start_stages(stages: Sequence[ModelStage], links: Sequence[Link], *, threads: int | None) -> None:
    """Start a thread for each stage, from `links[k]` to `links[k + 1]`."""
    for number, stage in enumerate(stages):
        given = (stage, links[number], links[number + 1])
        threading.Thread(
            target=serve, args=given, kwargs={"threads": threads}, name=f"stage {stage.stage}", daemon=True
        ).start()


class SplitModule(nn.Module):
    """Calls of this module go through the stages of a pipeline; outputs are {"logits": (B, ...)}.

    Attributes that the model has, such as `config`, are those of its skeleton.

    Args:
        skeleton: the model without memory for its parameters.
        inflight: see `StageSplit`.
    """

    def __init__(self, skeleton: nn.Module, pipeline: StagePipeline, *, inflight: int) -> None:
        super().__init__()
        self.inflight = inflight
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)  # tells callers where inputs belong: the CPU
        self.__dict__["pipeline"], self.__dict__["skeleton"] = pipeline, skeleton
        self.__dict__["forward"] = _Forward(pipeline, skeleton)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "generate" or "skeleton" not in self.__dict__:  # it would call the modules of the skeleton
                raise
            return getattr(self.__dict__["skeleton"], name)

    def new_cache(self, lengths: list[int], *, capacity: int) -> RemoteCache:
        """The key/value cache of some rows, for `forward(cache=...)`."""
        return RemoteCache(self.pipeline, lengths, capacity=capacity)

    def own_generate(self, codec: Codec, sampling: Sampling) -> Any:
        """Greedy generation with the caches of transformers in the stages; None for other models and for draws."""
        if sampling.temperature or not hasattr(self.skeleton, "generation_config"):
            return None
        return partial(greedy_over_stages, self, codec)


class _Forward:
    """The forward of a `SplitModule`, with the signature of the model's."""

    def __init__(self, pipeline: StagePipeline, skeleton: nn.Module) -> None:
        self._pipeline = pipeline
        self.__signature__ = inspect.signature(skeleton.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        cache = kwargs.pop(CACHE, None)
        use = cache.use() if isinstance(cache, RemoteCache) else None
        return {"logits": self._pipeline.call(args, kwargs, use).cpu()}


@torch.no_grad()
def greedy_over_stages(
    module: SplitModule, codec: Codec, prompts: list[list[int]], *, sampling: Sampling, numbers: Sequence[int]
) -> list[list[int]]:
    """Continue prompts as `raytrain.infer.text.transformers.greedy_answers` does: the same passes, padded on the left,
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
