"""Activation checkpointing: recompute the forward of blocks in backward instead of keeping its activations.

Side effects of a forward (counters, messages, random draws) must distinguish the original pass from the recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raytrain.models.blocks import blocks_of
from raytrain.train.placing import may_change
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
    """Make `every` n-th block keep only its inputs for backward; the recomputation repeats its random draws. Raises
    InputError where the model neither names its blocks nor repeats any."""
    for _, block in blocks_of(trainable, key="loop.activation_checkpointing")[every - 1 :: every]:
        if not isinstance(block.forward, Recomputed):
            block.forward = Recomputed(block)  # type: ignore[method-assign]
        _AGAIN.update(block.modules())


@contextlib.contextmanager
def as_with_rows(part: nn.Module) -> Iterator[None]:
    """Context of a forward without rows through `part`, while other workers have rows: `will_be_recomputed` returns the
    same as for theirs."""
    with _reserved() if part in _AGAIN else contextlib.nullcontext():
        yield


Held = tuple[nn.Module, dict[str, Any], str, Tensor | None]
"""(module, its buffers or parameters, name, the one of this name)."""
Key = tuple[int, str, bool]
"""(id of a module's buffers or parameters, name, whether the module trains)."""


class Recomputed:
    """A block's forward, checkpointed if gradients are enabled.

    This includes eval mode: under `fsdp`, a worker without rows runs its blocks in eval mode, and must gather weights
    in the same order as the others, which recompute the forward inside backward.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self.forward = block, block.forward
        self._parts, self._teachers = list(block.modules()), may_change(block)
        self._constant: set[Key] = set()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        before = _StateBefore(self._held(), self._constant)
        contexts = lambda: (_reserved(), before)  # noqa: E731
        output = checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=contexts, **named)
        before.learn()
        return output

    def _held(self) -> list[Held]:
        tables: list[tuple[nn.Module, dict[str, Any]]] = [(part, part._buffers) for part in self._parts]
        if self._teachers and not hasattr(self._block, "unshard"):  # FSDP2 moves the parameters of a block itself
            tables += [(part, part._parameters) for part in self._parts]
        return [(part, table, name, one) for part, table in tables for name, one in table.items()]


class _StateBefore:
    """Context of the recomputations of one pass: inside, a block has the buffers and frozen parameters that it had
    before the pass, so that statistics, codebooks and teachers are read as the pass read them, and updated once.

    Each recomputation gets copies of its own: tensors that are saved for backward may be the buffers themselves. Those
    of more than `SMALL` bytes that passes leave as they are (masks, position tables) are `constant`, and not copied.
    """

    SMALL = 2**16

    @torch.no_grad()
    def __init__(self, held: list[Held], constant: set[Key]) -> None:
        self._held, self._constant = held, constant
        self._versions = [0 if one is None else one._version for *_, one in held]
        # weights are not changed; a buffer that requires a gradient belongs to the graph of an earlier block
        self._copies = [
            None if one is None or one.requires_grad or (id(table), name, part.training) in constant
            else one.detach().clone()
            for part, table, name, one in held
        ]  # fmt: skip
        self._after: list[list[Tensor | None]] = []

    def learn(self) -> None:
        """After the pass: what it has left as it was. Reads the device after the first pass of a mode."""
        for (part, table, name, one), version, copy in zip(self._held, self._versions, self._copies, strict=True):
            key = id(table), name, part.training
            if one is None or one.nbytes <= self.SMALL:
                continue
            if copy is None and one._version != version:  # from now on it is copied
                self._constant.discard(key)
            elif copy is not None and table[name] is one and one._version == version:
                traced = one.is_meta or type(one) not in (Tensor, nn.Parameter)  # without values
                if not traced and torch.equal(one, copy):  # `.data` changes no version
                    self._constant.add(key)

    def __enter__(self) -> None:
        self._after.append([table[name] for _, table, name, _ in self._held])
        for (_, table, name, one), copy in zip(self._held, self._copies, strict=True):
            table[name] = one if copy is None else copy.clone()

    def __exit__(self, *error: object) -> None:
        for (_, table, name, _), after in zip(self._held, self._after.pop(), strict=True):
            table[name] = after


@contextlib.contextmanager
def _reserved() -> Iterator[None]:
    token = _RESERVED.set(True)
    try:
        yield
    finally:
        _RESERVED.reset(token)
