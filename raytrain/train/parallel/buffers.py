"""What a forward pass changes beside gradients, and the buffers of a module, kept equal on all workers.

A strategy asks for it where a model has such buffers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from raytrain.train.parallel.collectives import Workers
from raytrain.train.placing import is_sharded, limited_weights

SAMPLED = 16
"""Elements of a parameter that are compared to notice changes which do not advance its version (`.data`)."""

_WATCHED: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
"""The hook of each embedding with `max_norm`."""


class ForwardChanges:
    """Learns which parameters passes change, and makes `max_norm` the same on all workers."""

    def __init__(self, module: nn.Module, workers: Workers) -> None:
        self._workers = workers
        self._limited = limited_weights(module)
        self._watched = {name: one for name, one in module.named_parameters() if one not in self._limited}
        self._marks: dict[str, _Mark] = {}
        self._pairs: list[tuple[str, _Mark, _Mark]] = []  # before and after the first passes, not compared yet
        self.moved: dict[str, nn.Parameter] = {}  # the parameters that passes were seen to change, by name
        self.learnt = False  # whether a step has shown them; frozen ones are also noticed later
        # torch itself limits what one worker looks up, except in shards
        self._tables = [
            _Lookups(weight, layers)
            for weight, layers in self._limited.items()
            if workers.world_size > 1 or is_sharded(weight)
        ]

    def before_passes(self) -> None:
        if not self.learnt:
            self._marks = {name: _Mark(one) for name, one in self._watched.items()}
        self.before_lookups()

    def after_passes(self) -> None:
        """After them, and before the optimizer step; collective where there are embeddings with `max_norm`."""
        if not self.learnt:
            now = {name: _Mark(one) for name, one in self._watched.items()}
            self._pairs = [(name, mark, now[name]) for name, mark in self._marks.items()]
            self._marks = {name: mark for name, mark in now.items() if not self._watched[name].requires_grad}
            self.learnt = True
        self.after_lookups()

    def agreed(self) -> dict[str, nn.Parameter]:
        """`moved` of all workers, in the module's order. Collective; reads a few elements of each frozen parameter."""
        self._look()
        names = {name for found in self._workers.all_gather_object(list(self.moved)) for name in found}
        self.moved = {name: one for name, one in self._watched.items() if name in names}
        return self.moved

    def changed(self) -> list[nn.Parameter]:
        """What this worker's passes change, including embeddings; reads the device once, for frozen parameters."""
        if self._pairs and self._marks:
            self._look()
        for name, mark in self._marks.items():
            if self._watched[name]._version != mark.version:
                self.moved[name] = self._watched[name]
        return [*self.moved.values(), *(weight for weight in self._limited if not is_sharded(weight))]

    def _look(self) -> None:
        pairs = [*self._pairs, *((name, mark, _Mark(self._watched[name])) for name, mark in self._marks.items())]
        self.moved |= {name: self._watched[name] for name, before, now in pairs if now.differs(before)}
        self._pairs = []

    def before_lookups(self) -> None:
        """Forget the rows looked up so far: by measurements, and by passes that run again."""
        for table in self._tables:
            table.reset()

    def after_lookups(self) -> None:
        """Limit the norm of each row that any worker has looked up since `before_lookups`, on all workers, as one
        worker does that looks up all of them. Collective."""
        self._workers.all_reduce([table.seen for table in self._tables])
        for table in self._tables:
            table.renormalise()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Inside, lookups are those of a worker without rows."""
        seen = [table.seen.clone() for table in self._tables]
        yield
        for table, before in zip(self._tables, seen, strict=True):
            table.seen.copy_(before)


class _Lookups:
    """The rows of a weight that embeddings with `max_norm` look up; `seen` (layers, rows) is above zero for those."""

    def __init__(self, weight: nn.Parameter, layers: list[nn.Embedding | nn.EmbeddingBag]) -> None:
        self._weight, self._layers = weight, layers
        self._before: Tensor | None = None
        self.seen = torch.zeros(len(layers), len(weight), dtype=torch.int32, device=weight.device)
        for number, layer in enumerate(layers):
            if layer in _WATCHED:  # of another session of this module
                _WATCHED[layer].remove()
            _WATCHED[layer] = layer.register_forward_pre_hook(partial(self._note, number), with_kwargs=True)

    @torch.no_grad()
    def _note(self, number: int, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._before is None and not is_sharded(self._weight):
            self._before = self._weight.detach().clone()
        rows = inputs[0] if inputs else named["input"]
        self.seen[number].index_fill_(0, rows.reshape(-1).long(), 1)

    def reset(self) -> None:
        self.seen.zero_()
        self._before = None

    @torch.no_grad()
    def renormalise(self) -> None:
        """Limit the rows that were seen: once, from what they were, so that their last bits do not depend on which rows
        this worker's own passes have limited already."""
        own, seen = self._weight.detach(), self.seen
        if is_sharded(own):  # a pass limits a gathered copy
            from raytrain.train.parallel.fsdp import own_rows  # takes a second to import

            own, seen = own_rows(own, seen)
        elif self._before is not None:
            own.copy_(self._before)
        for layer, looked_up in zip(self._layers, seen, strict=True):
            rows = looked_up.nonzero().flatten()
            if len(rows):
                torch.embedding_renorm_(own, rows, float(layer.max_norm or 0.0), layer.norm_type)
        self.reset()


class _Mark:
    """A parameter at some time: its version, its storage, and a few elements. Reads no device value."""

    @torch.no_grad()
    def __init__(self, parameter: nn.Parameter) -> None:
        self.version, self._storage = parameter._version, parameter.untyped_storage()._cdata
        own: Tensor = getattr(parameter, "to_local", parameter.detach)().detach().reshape(-1)
        self._sample = own[:: max(1, len(own) // SAMPLED)].clone()

    def differs(self, other: _Mark) -> bool:
        """Whether the parameter was changed in between. Reads the device where version and storage are the same."""
        if (self.version, self._storage) != (other.version, other._storage):
            return True
        return not torch.equal(self._sample, other._sample)


# ---------------------------------------------------------------- buffer sync


class BufferSync:
    """Sends rank 0's buffers, and the parameters that forward changes, to the other workers before each evaluation and
    each save, so that the state that is evaluated, saved, exported and resumed is the same one.

    Those that differ between workers after the first step, and are not statistics that a norm layer only records
    while it trains, also influence the training: they are sent after every step, as DDP does before every forward pass.

    A single worker costs nothing. Others compare checksums, and only what differs is sent. Both methods are
    collectives.
    """

    def __init__(self, module: nn.Module, workers: Workers, changes: ForwardChanges) -> None:
        self._module, self._workers, self._changes = module, workers, changes
        self._active = workers.world_size > 1
        self._first = True
        self.each_step: list[str] = []  # names of what is sent after every step

    def after_step(self) -> list[str]:
        """Send what influences training; returns the names that are new among them."""
        if not self._active:
            return []
        if self._first:
            self._first = False
            return self.synchronize()
        if self.each_step:
            held = self._held(self._changes.moved)
            self._workers.broadcast([held[name] for name in self.each_step])
        return []

    def synchronize(self) -> list[str]:
        """Send everything that differs; returns the names that are sent after every step from now on."""
        if not self._active:
            return []
        held = self._held(self._changes.agreed())
        if not held:
            return []
        data = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in held.values())
        rows = self._workers.all_gather_object([zlib.crc32(one.numpy().tobytes()) for one in data])
        different = [name for name, sums in zip(held, zip(*rows, strict=True), strict=True) if len(set(sums)) > 1]
        self._workers.broadcast([held[name] for name in different])
        found = [name for name in different if not self._is_recorded(name) and name not in self.each_step]
        self.each_step += found
        return found

    def _held(self, moved: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {**dict(self._module.named_buffers()), **moved}

    def _is_recorded(self, name: str) -> bool:
        """Whether it is a statistic that training does not read."""
        owner, _, leaf = name.rpartition(".")
        part = self._module.get_submodule(owner)
        return isinstance(part, _NormBase) and part.track_running_stats and leaf in part._buffers
