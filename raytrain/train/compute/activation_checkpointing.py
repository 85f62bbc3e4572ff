"""Activation checkpointing: recompute the forward of blocks in backward instead of keeping its activations.

Side effects of a forward (counters, messages, random draws) must distinguish the original pass from the recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raytrain.models.blocks import blocks_of
from raytrain.trainable import Trainable

_RESERVED: ContextVar[bool] = ContextVar("forward_will_be_recomputed", default=False)
_AGAIN: WeakSet[nn.Module] = WeakSet()
"""All modules inside recomputed blocks."""


def will_be_recomputed() -> bool:
    """Whether this forward runs inside a block that backward will recompute."""
    return _RESERVED.get()


def inside_backward() -> bool:
    """Whether this runs inside a backward pass, where blocks are recomputed."""
    return torch._C._current_graph_task_id() != -1


def recompute(trainable: Trainable, *, every: int = 1) -> None:
    """Make blocks keep only their inputs for backward; the recomputation repeats their random draws.

    Uses torch's non-reentrant checkpointing. Blocks that are recomputed already are left unchanged.

    Args:
        every: recompute every n-th block; the others keep their activations.

    Raises:
        InputError: the model neither names its blocks nor repeats any.
    """
    for _, block in blocks_of(trainable, key="loop.activation_checkpointing")[every - 1 :: every]:
        if not isinstance(block.forward, _Recomputed):
            block.forward = _Recomputed(block)  # type: ignore[method-assign]
        _AGAIN.update(block.modules())


@contextlib.contextmanager
def as_with_rows(part: nn.Module) -> Iterator[None]:
    """Context of a forward without rows through `part`, while other workers have rows: `will_be_recomputed` returns the
    same as for theirs."""
    with _reserved() if part in _AGAIN else contextlib.nullcontext():
        yield


class _Recomputed:
    """A block's forward, checkpointed if gradients are enabled.

    This includes eval mode: under `fsdp`, a worker without rows runs its blocks in eval mode, and must gather weights
    in the same order as the others, which recompute the forward inside backward.
    """

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._state = _BlockState(block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **named)
        before = self._state.before_pass()
        contexts = partial(_contexts, before)
        output = checkpoint(self._forward, *inputs, use_reentrant=False, context_fn=contexts, **named)
        self._state.learn(before)
        return output


def _contexts(before: list[_Slot]) -> tuple[contextlib.AbstractContextManager[None], _AsBefore]:
    return _reserved(), _AsBefore(before)


@dataclass
class _Slot:
    """A buffer or a frozen parameter of a block before a pass.

    Attributes:
        part, table, name: where it is: one of the module's own mappings.
        held: the tensor that is there, which the pass may change.
        copy: its values; None where the block is known to leave it as it is.
        version: of `held`.
    """

    part: nn.Module
    table: dict[str, Any]
    name: str
    held: Tensor | None
    copy: Tensor | None = None
    version: int = 0

    @property
    def key(self) -> tuple[int, str, bool]:
        """It may be changed in one mode and not in the other."""
        return id(self.table), self.name, self.part.training

    def fresh(self) -> Tensor | None:
        """A tensor as it was before the pass. What a pass saves for backward may be the tensor itself, so each
        recomputation has its own, and the first pass keeps the one that is there."""
        if self.copy is None:
            return self.held
        made = self.copy.clone()
        return nn.Parameter(made, requires_grad=False) if isinstance(self.held, nn.Parameter) else made

    def changed(self) -> bool:
        """Whether the pass has changed it. Reads the device."""
        now = self.table.get(self.name)
        if now is not self.held or now is None or self.copy is None:
            return True
        without_values = now.is_meta or type(now) not in (Tensor, nn.Parameter)  # of a trace
        return without_values or not torch.equal(now, self.copy)  # not its version, which `.data` does not advance


class _BlockState:
    """The buffers and frozen parameters of a block, some of which its forward changes: statistics, codebooks, teachers.

    A recomputation reads what the first pass read, and its own changes do not count. Parameters, and buffers of more
    than `SMALL` bytes, that the first pass of a mode leaves as they are (masks, tables of positions) are not copied any
    more.
    """

    SMALL = 2**16

    def __init__(self, block: nn.Module) -> None:
        self._block, self._parts = block, list(block.modules())
        frozen, trained = (sum(p.nbytes for p in block.parameters() if p.requires_grad is how) for how in (False, True))
        # a teacher is no larger than what it learns from; a frozen base is larger than its adapters, and never copied
        self._teachers = 0 < frozen <= trained
        self._changes: dict[tuple[int, str, bool], bool] = {}

    @torch.no_grad()
    def before_pass(self) -> list[_Slot]:
        """What the block holds, with copies of what the pass may change."""
        slots = [_Slot(part, part._buffers, name, one) for part in self._parts for name, one in part._buffers.items()]
        if self._teachers and not hasattr(self._block, "unshard"):  # FSDP2 moves the parameters of its blocks itself
            slots += [
                _Slot(part, part._parameters, name, one)
                for part in self._parts
                for name, one in part._parameters.items()
                if one is not None and not one.requires_grad
            ]
        for slot in slots:
            held = slot.held
            # one that requires a gradient belongs to the graph of an earlier block
            if held is None or held.requires_grad:
                continue
            if self._is_small(held) or self._changes.get(slot.key, True):
                slot.copy = held.detach().clone()
            slot.version = held._version
        return slots

    def learn(self, before: list[_Slot]) -> None:
        """After a pass: find out what it leaves as it is; what begins to change later is copied from then on."""
        for slot in before:
            if slot.held is None or self._is_small(slot.held):
                continue
            if slot.key not in self._changes:
                self._changes[slot.key] = slot.changed()
            elif slot.held._version != slot.version:
                self._changes[slot.key] = True

    def _is_small(self, held: Tensor) -> bool:
        return held.nbytes <= self.SMALL and not isinstance(held, nn.Parameter)


class _AsBefore:
    """Context of a recomputation, inside which a block holds what it held before the pass; may be entered again."""

    def __init__(self, before: list[_Slot]) -> None:
        self._before = before
        self._after: list[list[Any]] = []

    def __enter__(self) -> None:
        self._after.append([slot.table.get(slot.name) for slot in self._before])
        for slot in self._before:
            slot.table[slot.name] = slot.fresh()

    def __exit__(self, *_: object) -> None:
        for slot, tensor in zip(self._before, self._after.pop(), strict=True):
            slot.table[slot.name] = tensor


@contextlib.contextmanager
def _reserved() -> Iterator[None]:
    token = _RESERVED.set(True)
    try:
        yield
    finally:
        _RESERVED.reset(token)
