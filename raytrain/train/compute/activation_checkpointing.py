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
from torch import nn
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

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **named)
        return checkpoint(self._forward, *inputs, use_reentrant=False, context_fn=_contexts, **named)


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return _reserved(), contextlib.nullcontext()


@contextlib.contextmanager
def _reserved() -> Iterator[None]:
    token = _RESERVED.set(True)
    try:
        yield
    finally:
        _RESERVED.reset(token)
