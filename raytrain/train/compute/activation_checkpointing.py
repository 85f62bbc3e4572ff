"""Activation checkpointing: blocks whose forward is computed again in backward instead of being kept.

Whatever a forward does beside computing (count, send, draw) has to know which of the two passes it is in.
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
"""Everything inside blocks that are computed again."""


def will_be_recomputed() -> bool:
    """Whether this forward runs inside a block that backward will compute again."""
    return _RESERVED.get()


def inside_backward() -> bool:
    """Whether this runs inside a backward pass, which is where a block is computed again."""
    return torch._C._current_graph_task_id() != -1


def recompute(trainable: Trainable, *, every: int = 1) -> None:
    """From now on blocks keep only their inputs for backward; what they draw is drawn alike the second time.

    Uses torch's non-reentrant checkpointing. Blocks that are computed again already stay as they are.

    Args:
        every: of so many blocks the last; the others keep what they compute.

    Raises:
        InputError: the model neither names its blocks nor repeats any.
    """
    for _, block in blocks_of(trainable, key="loop.activation_checkpointing")[every - 1 :: every]:
        if not isinstance(block.forward, _Recomputed):
            block.forward = _Recomputed(block)  # type: ignore[method-assign]
        _AGAIN.update(block.modules())


@contextlib.contextmanager
def as_with_rows(part: nn.Module) -> Iterator[None]:
    """Around a forward without rows through `part`, beside those of the others: it will be computed again where theirs
    will."""
    with _reserved() if part in _AGAIN else contextlib.nullcontext():
        yield


class _Recomputed:
    """A block's forward, checkpointed where there will be a backward.

    In training and in eval mode alike: under `fsdp` a worker without rows goes through its blocks in eval mode, and has
    to bring weights together in the order of the others, whose second forward is inside their backward.
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
