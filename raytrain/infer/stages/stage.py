"""One stage: runs the model's own forward, of which it computes only the parts that it holds.

What comes before is skipped, what comes after is not reached. Masks, positions and everything else without parameters
are computed in every stage by the model's own code, so that any model whose parts are called one after another can be
split without code of its own.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from raytrain.errors import RunError, first_line
from raytrain.infer.stages.plan import StagePlan
from raytrain.infer.stages.weights import poisoned
from raytrain.models.cache import KeyValueCache
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.memory.oom import let_go

CACHE, CACHE_OF_TRANSFORMERS = "cache", "past_key_values"

Structure = Any
"""What a module returned, without values: {"shape", "dtype"} for a tensor, lists of such, and None for the rest."""


@dataclass(frozen=True)
class CacheUse:
    """The key/value cache that a pass uses; each stage holds its own layers' part.

    Attributes:
        number: of the cache.
        lengths: tokens of each prompt.
        capacity: tokens of the longest row at the end.
        keep: rows that continue since the pass before, None for all.
    """

    number: int
    lengths: tuple[int, ...]
    capacity: int
    keep: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StagePass:
    """One forward pass on its way through the stages.

    Attributes:
        args, kwargs: of the model's forward; every stage gets them, since masks and positions are made of them.
        cache: None for a pass without one.
        ended: numbers of caches that are not used any more.
        hidden: what crosses the cut before the next stage; after the last stage the model's output.
        outputs: name of a part, or class of a repeated one -> the structure of its output, for stages without it.
        seconds: that each stage so far took to compute it.
        error: (whether memory ran out, message) of the stage that failed; later stages only pass it on.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    cache: CacheUse | None = None
    ended: tuple[int, ...] = ()
    hidden: Tensor | None = None
    outputs: dict[str, Structure] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    error: tuple[bool, str] | None = None


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or a list, mapping or pass of such, on a device."""
    if isinstance(value, StagePass):
        return replace(
            value, **{name: to_device(getattr(value, name), device) for name in ("args", "kwargs", "hidden")}
        )
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(one, device) for one in value)
    if isinstance(value, dict):
        return {name: to_device(one, device) for name, one in value.items()}
    return value


class _CutReached(Exception):
    """The forward has arrived at the first part of the next stage, whose input is `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class ModelStage:
    """The parts of one stage. Only one thread may call `run`.

    Args:
        module: the whole model, in which only this stage's tensors have memory (`fill_stage`).
        plan, stage: what it holds.
        autocast: a context for each pass.

    Attributes:
        busy_s: seconds in `run` so far.
        bytes_read: from the files of its weights.
    """

    def __init__(
        self, module: nn.Module, plan: StagePlan, stage: int, *, device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.module, self.plan, self.stage, self.device, self.autocast = module, plan, stage, device, autocast
        self.busy_s, self.bytes_read = 0.0, 0
        self._now = StagePass()
        self._noted: dict[str, Structure] = {}
        self._caches: dict[int, Any] = {}
        names = inspect.signature(module.forward).parameters
        self._cache_name = CACHE if CACHE in names else CACHE_OF_TRANSFORMERS
        self._install()

    def _install(self) -> None:
        first, end = self.plan.bounds[self.stage], self.plan.bounds[self.stage + 1]
        noted: dict[str, nn.Module] = {}
        for place, part in enumerate(self.plan.parts):
            for name in part.names:
                module = self.module.get_submodule(name)
                key = _kind(module) if part.repeated else name  # blocks return the same, other parts each their own
                if place < first:
                    module.forward = _Skipped(self, key, _layer_number(name))
                elif place >= end:
                    module.forward = _cut
                else:
                    noted[key] = module
        if first:
            entry = self.module.get_submodule(self.plan.parts[first].name)
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        for key, module in noted.items():
            module.register_forward_hook(_Noted(self._noted, key))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Put what the stage before sent in place of the input of the first part."""
        hidden = self._now.hidden
        if args:
            return (hidden, *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: hidden}

    @torch.no_grad()
    def run(self, message: StagePass) -> StagePass:
        """Compute a pass up to the next cut, or to the output; an error becomes part of the message."""
        for number in message.ended:
            self._caches.pop(number, None)
        if message.error is not None:
            return replace(message, seconds=(*message.seconds, 0.0))
        began = time.perf_counter()
        try:
            if self.device.type == "cuda":  # kernels of a model's own may use the current device
                torch.cuda.set_device(self.device)
            made = self._forward(message)
            return replace(made, seconds=(*message.seconds, self._seconds_since(began)))
        except Exception as error:  # of the model or of a row: it belongs to the caller
            short = is_out_of_memory(error, device=self.device)
            if isinstance(error, torch.AcceleratorError) and not short:
                raise  # the context is lost: this stage ends, and with it the replica
            text = f"{type(error).__name__}: {first_line(error)}"
            let_go(error, self.device)
            if message.cache is not None:
                self._caches.pop(message.cache.number, None)
            seconds = (*message.seconds, self._seconds_since(began))
            return StagePass(ended=message.ended, seconds=seconds, error=(short, text))
        finally:
            self._now = StagePass()

    def _seconds_since(self, began: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        self.busy_s += seconds
        return seconds

    def _forward(self, message: StagePass) -> StagePass:
        self._now = to_device(message, self.device)
        args, kwargs = self._now.args, self._now.kwargs
        cache = None
        if message.cache is not None:
            cache = self._cache(message.cache)
            kwargs = {**kwargs, self._cache_name: cache}
            if self._cache_name == CACHE_OF_TRANSFORMERS:
                kwargs["use_cache"] = True
        before = list(cache.lengths) if isinstance(cache, KeyValueCache) else []
        last = self.stage == self.plan.stages - 1
        try:
            with self.autocast():
                output = self.module(*args, **kwargs)
        except _CutReached as reached:
            if isinstance(cache, KeyValueCache) and cache.lengths == before:  # the count comes after the cut
                cache.advance()
            return replace(message, hidden=reached.hidden, outputs={**message.outputs, **self._noted})
        if not last:
            part = self.plan.parts[self.plan.bounds[self.stage + 1]].name
            raise RunError(f"the model ended without calling {part}: it cannot be split there")
        return replace(message, args=(), kwargs={}, outputs={}, hidden=self._output(output))

    def _output(self, output: Any) -> Tensor:
        value = output[0] if isinstance(output, tuple) else output
        value = value.get("logits") if isinstance(value, dict) else getattr(value, "logits", value)
        if not isinstance(value, Tensor):
            raise RunError(f"{type(self.module).__name__} returned no tensor and no logits")
        if not torch.isfinite(value).all():
            raise RunError(
                "the outputs are not finite; if they are without stages, a value reaches them past the input of "
                "the first part of a stage, and this model cannot be split there"
            )
        return value

    # ---------------------------------------------------------------- caches

    def _cache(self, use: CacheUse) -> Any:
        cache = self._caches.get(use.number)
        if cache is None:
            cache = self._new_cache(use)
            self._caches[use.number] = cache
        elif use.keep is not None:
            cache.keep(list(use.keep))
        return cache

    def _new_cache(self, use: CacheUse) -> Any:
        if self._cache_name == CACHE:
            return KeyValueCache(list(use.lengths), capacity=use.capacity)
        from transformers import DynamicCache

        config: Any = self.module.config
        return DynamicCache(config=config)

    @property
    def caches(self) -> int:
        """Caches that it holds."""
        return len(self._caches)

    def skipped_output(self, key: str, layer: int | None, given: Sequence[Any]) -> Any:
        """What a part that another stage holds returns here: the right structure, with values that are poison."""
        outputs = self._now.outputs
        structure = outputs.get(key)
        if structure is None:
            structure = next((one for one in map(_first_tensor, outputs.values()) if one is not None), None)
        made = _made(structure, self.device)
        cache = next((one for one in given if hasattr(one, "get_seq_length")), None)
        if cache is not None and layer is not None:
            shape = _first_tensor(structure)
            if shape is not None and len(shape["shape"]) == 3:  # its length counts the tokens: one value each
                rows, tokens, _ = shape["shape"]
                stand_in = torch.zeros(rows, 1, tokens, 1, device=self.device)
                cache.update(stand_in, stand_in, layer)
        return made


class _Skipped:
    """The forward of a part that an earlier stage holds."""

    def __init__(self, stage: ModelStage, key: str, layer: int | None) -> None:
        self._stage, self._key, self._layer = stage, key, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage.skipped_output(self._key, self._layer, (*args, *kwargs.values()))


class _Noted:
    """A hook that notes the structure of a part's output."""

    def __init__(self, noted: dict[str, Structure], key: str) -> None:
        self._noted, self._key = noted, key

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._noted[self._key] = _structure(output)


def _cut(*args: Any, **kwargs: Any) -> NoReturn:
    """The forward of a part that a later stage holds."""
    raise _CutReached(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _layer_number(name: str) -> int | None:
    leaf = name.rpartition(".")[2]
    return int(leaf) if leaf.isdigit() else None


def _structure(output: Any) -> Structure:
    if isinstance(output, Tensor):
        return {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
    if isinstance(output, (list, tuple)):
        return [_structure(one) for one in output]
    return None


def _first_tensor(structure: Structure) -> Any:
    if isinstance(structure, list):
        return next((found for found in map(_first_tensor, structure) if found is not None), None)
    return structure


def _made(structure: Structure, device: torch.device) -> Any:
    if isinstance(structure, list):
        return tuple(_made(one, device) for one in structure)
    if structure is None:
        return None
    like = torch.empty(structure["shape"], dtype=getattr(torch, structure["dtype"]), device="meta")
    return poisoned(like, device)
