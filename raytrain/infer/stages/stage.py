"""One stage: the parts of a model in the order of a pass, its own tensors, and its part of the forward.

`split.py` runs several of them; a stage reads no tensor of another one's parts.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from raytrain.accelerator import make_current, seconds_of
from raytrain.checkpoint.safetensors import DTYPE_NAMES
from raytrain.data.rows.residency import rebuild
from raytrain.errors import InputError, RunError, first_line
from raytrain.infer.stages.partition import KEY, ModelPart, StagePlan
from raytrain.models.attention import KeyValueCache
from raytrain.models.blocks import LISTS, blocks_of, repeated
from raytrain.models.weights.headers import StoredWeights, read_header
from raytrain.models.weights.stored import misfits
from raytrain.runs.storage import join, locate
from raytrain.train.memory.device import is_out_of_memory, let_go
from raytrain.trainable import Trainable

# ---------------------------------------------------------------- weights
# The parts of a model in the order of a forward pass, and filling one stage with its tensors: each is read from its
# safetensors file into the memory that it stays in, and no others are read.


DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PIECE_BYTES = 64 << 20


@contextlib.contextmanager
def without_parameters() -> Iterator[None]:
    """Inside, every new parameter is on the meta device; buffers, which no file may hold, are built as usual."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def parts_of(trainable: Trainable) -> list[ModelPart]:
    """The parts of a model: what comes before its repeated blocks, each block, and each module after them.

    A builder names the blocks (`Trainable.blocks`), else they are the modules that repeat
    (`raytrain.models.blocks`). The order is that in which the modules were defined. Raises InputError: the model has
    fewer than two parts."""
    module = trainable.module
    blocks = blocks_of(trainable, key=KEY) if trainable.blocks is not None else repeated(module)
    of_block = {id(block) for _, block in blocks}
    found = list(_walk("", module, of_block))
    first = next((at for at, (_, part) in enumerate(found) if id(part) in of_block), 0)
    groups = [found[:first]] if first else []
    groups += [[one] for one in found[first:]]
    if len(groups) < 2:
        raise InputError(
            KEY, got=f"a {type(module).__name__} of one part",
            expected="a model of several modules in order: a builder whose Trainable names its `blocks`, a Sequential,"
            " or a list of modules",
        )  # fmt: skip
    inside = {id(tensor) for group in groups for _, part in group for tensor in part.parameters()}
    loose = [tensor for tensor in module.parameters() if id(tensor) not in inside]
    parts = []
    for at, group in enumerate(groups):
        held = {id(tensor): tensor for _, part in group for tensor in part.parameters()}
        held |= {id(tensor): tensor for tensor in loose if at == 0}
        names = tuple(name for name, _ in group)
        size = sum(tensor.nbytes for tensor in held.values())
        parts.append(ModelPart(names[0], size, id(group[0][1]) in of_block, names if len(names) > 1 else ()))
    return parts


def _walk(path: str, module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules with state that are called as a whole."""
    for leaf, child in module.named_children():
        name = f"{path}.{leaf}" if path else leaf
        holds_blocks = any(id(inner) in blocks for inner in child.modules())
        if id(child) in blocks:
            yield name, child
        elif holds_blocks or isinstance(child, LISTS):
            yield from _walk(name, child, blocks)
        elif child.state_dict():
            yield name, child


def tensors_of_part(module: nn.Module, parts: list[ModelPart] | tuple[ModelPart, ...], place: int) -> list[str]:
    """Names of the parameters and saved buffers of a part, as in the module's state."""
    every = list(module.state_dict(keep_vars=True))
    own = [name for name in every if name.startswith(tuple(f"{one}." for one in parts[place].names))]
    if place:
        return own
    prefixes = tuple(f"{one}." for part in parts for one in part.names)
    return own + [name for name in every if not name.startswith(prefixes)]


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def poisoned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, without memory for it, whose values are not finite where the dtype allows that.

    It stands for what a stage does not hold: a value that reaches an output by another way than the cut is noticed."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=device).expand(tensor.shape)


@dataclass
class RangedTensors:
    """Tensors of stored weights, each read as one range of its file."""

    stored: StoredWeights
    bytes_read: int = 0  # of tensors so far, without headers
    _headers: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> Tensor:
        name = self.stored.aliases.get(name, name)
        files = [self.stored.file_of[name]]
        if name in self.stored.split:  # each file has some of its rows
            files = [file for file in self.stored.files if name in self._header(file)[1]]
        entries = [self._header(file)[1][name] for file in files]
        shape = self.stored.shapes[name]
        dtype = DTYPES[entries[0]["dtype"]]
        flat = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        at = 0
        for file, entry in zip(files, entries, strict=True):
            begin, end = entry["data_offsets"]
            self._into(file, self._header(file)[0] + begin, flat[at : at + end - begin])
            at += end - begin
        self.bytes_read += at
        return flat.view(dtype).reshape(shape)

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """(where the data begins, the entries) of a file."""
        if file not in self._headers:
            store = self.stored.store
            size = int.from_bytes(store.read_head(file, 8), "little")
            self._headers[file] = 8 + size, read_header(store, file, key=KEY)
        return self._headers[file]

    def _into(self, file: str, begin: int, target: Tensor) -> None:
        filesystem, inner = locate(join(self.stored.store.uri, file), key=KEY)
        view = target.numpy().data
        with filesystem.open_input_file(inner) as opened:
            opened.seek(begin)
            while view:
                got = opened.readinto(view[:PIECE_BYTES])
                if not got:
                    raise InputError(KEY, got=f"{file} of {self.stored.origin}, which ends early", expected="all of it")
                view = view[got:]


def check_weights(module: nn.Module, stored: StoredWeights) -> None:
    """Check, from headers alone, that stored weights have the names and shapes of a module's. Raises InputError:
    they have not, so that no stage could read its own part of them."""
    found = misfits(module, stored.shapes)
    found.pop("unexpected", None)
    if found:
        kind, names = next(iter(found.items()))
        raise InputError(
            KEY, got=f"{stored.origin} with {len(names)} {kind} tensors, the first {names[0]}",
            expected="tensors with the names and shapes of this model, so that each stage reads its own",
            remedy="load the model whole once and export it: `raytrain export`, or its save_pretrained",
        )  # fmt: skip


def fill_stage(
    module: nn.Module, stored: StoredWeights, plan: StagePlan, stage: int, *, device: torch.device
) -> RangedTensors:
    """Read the tensors of a stage into a module that was built without parameters.

    What other stages hold and no module is called for (parameters of the model itself) is poisoned.
    """
    reader, own = RangedTensors(stored), _names_of(module, plan, range(plan.bounds[stage], plan.bounds[stage + 1]))
    state = module.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    made: dict[int, Tensor] = {}
    for name in own:
        tensor = state[name]
        if id(tensor) not in made:
            known = next((one for one in names_of[id(tensor)] if one in stored.shapes), name)
            made[id(tensor)] = reader.read(known).to(tensor.dtype).to(device)
        set_tensor(module, name, made[id(tensor)])
    first: dict[int, nn.Parameter] = {}  # names of one parameter share it again, as far as this stage holds them
    for name in own:
        path, _, leaf = name.rpartition(".")
        parameters = module.get_submodule(path)._parameters
        parameter = parameters.get(leaf)
        if parameter is not None:
            parameters[leaf] = first.setdefault(id(state[name]), parameter)
    prefixes = tuple(f"{one}." for part in plan.parts for one in part.names)
    for name in _names_of(module, plan, [0]) if stage else ():
        if not name.startswith(prefixes):
            set_tensor(module, name, poisoned(state[name], device))
    for part in module.modules():
        for leaf, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[leaf] = buffer.to(device)
    return reader


def _names_of(module: nn.Module, plan: StagePlan, places: Iterable[int] | Sequence[int]) -> list[str]:
    return [name for place in places for name in tensors_of_part(module, plan.parts, place)]


# ---------------------------------------------------------------- stage
# One stage: runs the model's own forward, of which it computes only the parts that it holds.


CACHE, CACHE_OF_TRANSFORMERS = "cache", "past_key_values"

Structure = Any
"""What a module returned, without values: {"shape", "dtype"} for a tensor, lists of such, and None for the rest."""


@dataclass(frozen=True)
class CacheUse:
    """The key/value cache that a pass uses; each stage holds its own layers' part."""

    number: int  # of the cache
    lengths: tuple[int, ...]  # tokens of each prompt
    capacity: int  # tokens of the longest row at the end
    keep: tuple[int, ...] | None = None  # rows that continue since the pass before, None for all


@dataclass(frozen=True)
class StagePass:
    # args, kwargs: of the model's forward; every stage gets them, since masks and positions are made of them
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    cache: CacheUse | None = None  # None for a pass without one
    ended: tuple[int, ...] = ()  # numbers of caches that are not used any more
    hidden: Tensor | None = None  # what crosses the cut before the next stage; after the last stage the model's output
    # name of a part, or class of a repeated one -> the structure of its output, for stages without it
    outputs: dict[str, Structure] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()  # that each stage so far took to compute it
    # (whether memory ran out, message) of the stage that failed; later stages only pass it on
    error: tuple[bool, str] | None = None


def to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else rebuild(value, lambda part: to_device(part, device))


class _CutReached(Exception):
    """The forward has arrived at the first part of the next stage, whose input is `hidden`."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class ModelStage:
    """The parts of one stage of `module`, the whole model, in which only this stage's tensors have memory
    (`fill_stage`). `autocast`: a context for each pass. Only one thread may call `run`."""

    def __init__(
        self, module: nn.Module, plan: StagePlan, stage: int, *, device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.module, self.plan, self.stage, self.device, self.autocast = module, plan, stage, device, autocast
        self.bytes_read = 0
        self._now = StagePass()
        self._noted: dict[str, Structure] = {}
        self._caches: dict[int, Any] = {}
        names = inspect.signature(module.forward).parameters
        self._cache_name = CACHE if CACHE in names else CACHE_OF_TRANSFORMERS
        first, end = plan.bounds[stage], plan.bounds[stage + 1]
        noted: dict[str, nn.Module] = {}
        for place, part in enumerate(plan.parts):
            for name in part.names:
                inner = module.get_submodule(name)
                kind = type(inner)  # blocks return the same, other parts each their own
                key = f"{kind.__module__}.{kind.__qualname__}" if part.repeated else name
                if place < first:
                    leaf = name.rpartition(".")[2]
                    inner.forward = partial(self._skipped, key, int(leaf) if leaf.isdigit() else None)
                elif place >= end:
                    inner.forward = _cut
                else:
                    noted[key] = inner
        if first:
            entry = module.get_submodule(plan.parts[first].name)
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        for key, inner in noted.items():
            inner.register_forward_hook(partial(self._note, key))

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
            make_current(self.device)
            made = self._forward(message)
            return replace(made, seconds=(*message.seconds, seconds_of(self.device) - began))
        except Exception as error:  # of the model or of a row: it belongs to the caller
            short = is_out_of_memory(error, device=self.device)
            if isinstance(error, torch.AcceleratorError) and not short:
                raise  # the context is lost: this stage ends, and with it the replica
            text = f"{type(error).__name__}: {first_line(error)}"
            let_go(error, self.device)
            if message.cache is not None:
                self._caches.pop(message.cache.number, None)
            seconds = (*message.seconds, seconds_of(self.device) - began)
            return StagePass(ended=message.ended, seconds=seconds, error=(short, text))
        finally:
            self._now = StagePass()

    def _forward(self, message: StagePass) -> StagePass:
        self._now = to_device(message, self.device)
        args, kwargs = self._now.args, self._now.kwargs
        cache = None
        if message.cache is not None:
            cache = self._caches.get(message.cache.number)
            if cache is None and self._cache_name == CACHE:
                cache = KeyValueCache(list(message.cache.lengths), capacity=message.cache.capacity)
            elif cache is None:
                from transformers import DynamicCache

                config: Any = self.module.config
                cache = DynamicCache(config=config)
            elif message.cache.keep is not None:
                cache.keep(list(message.cache.keep))
            self._caches[message.cache.number] = cache
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
        value = output[0] if isinstance(output, tuple) else output
        value = value.get("logits") if isinstance(value, dict) else getattr(value, "logits", value)
        if not isinstance(value, Tensor):
            raise RunError(f"{type(self.module).__name__} returned no tensor and no logits")
        if not torch.isfinite(value).all():
            raise RunError(
                "the outputs are not finite; if they are without stages, a value reaches them past the input of "
                "the first part of a stage, and this model cannot be split there"
            )
        return replace(message, args=(), kwargs={}, outputs={}, hidden=value)

    # ---------------------------------------------------------------- caches

    @property
    def caches(self) -> int:
        return len(self._caches)

    def _note(self, key: str, module: nn.Module, args: Any, output: Any) -> None:
        self._noted[key] = _structure(output)

    def _skipped(self, key: str, layer: int | None, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a part that an earlier stage holds: the right structure, with values that are poison."""
        outputs = self._now.outputs
        structure = outputs.get(key)
        if structure is None:
            structure = next((one for one in map(_first_tensor, outputs.values()) if one is not None), None)
        cache = next((one for one in (*args, *kwargs.values()) if hasattr(one, "get_seq_length")), None)
        if cache is not None and layer is not None:
            shape = _first_tensor(structure)
            if shape is not None and len(shape["shape"]) == 3:  # its length counts the tokens: one value each
                rows, tokens, _ = shape["shape"]
                stand_in = torch.zeros(rows, 1, tokens, 1, device=self.device)
                cache.update(stand_in, stand_in, layer)
        return _made(structure, self.device)


def _cut(*args: Any, **kwargs: Any) -> NoReturn:
    raise _CutReached(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))


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
