"""What the passes of a sharded model do, as seen from torch's FSDP2: which parameters get a gradient, and what it would
lose or compute wrong without an error.

A gathered block is a copy: what a forward writes into its parameters is gone when the copy is freed, and a gradient
taken inside a forward frees blocks that the rest of it needs.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from raytrain.errors import InputError, RaytrainError, first_line, message_of
from raytrain.train.module_checks import DATA_PARALLEL, SHARDS
from raytrain.train.parallel.order import BlockOrder

SEEN_AT_MOST = 160
"""Characters of torch's own words in a message."""
_OF_SHARDS = tuple(os.path.join("torch", "distributed", part, "") for part in ("fsdp", "tensor"))
_OTHERS: tuple[type, ...] = (RaytrainError, MemoryError, getattr(torch, "AcceleratorError", MemoryError))
_WORDS = ("DTensor", "storage of size 0")


class ShardedPasses:
    """Watches the passes of a sharded module.

    Attributes:
        used: ids of the parameters that got a gradient since they were last cleared, on this worker; those that only
            passes without rows reached are not among them.
        first: whether the values of gathered parameters are checked in each pass, rather than their version counters.
    """

    def __init__(self, module: nn.Module, order: BlockOrder) -> None:
        self.used: set[int] = set()
        self.first = True
        self.order = order
        self._in_forward = self._idle = False
        self._versions: dict[int, int] = {}
        # a compiler would compile another variant for a mode that is on in one pass only
        self._compiled = any(type(vars(part).get("forward")).__name__ == "_Compiled" for part in module.modules())
        for _, group in groups_of(module):
            group.post_backward = partial(self._post_backward, group, group.post_backward)
            group.reshard = partial(self._reshard, group, group.reshard)

    @contextlib.contextmanager
    def forward_pass(self, *, idle: bool) -> Iterator[None]:
        self.order.begin()
        self._in_forward, self._idle = True, idle
        try:
            with ShardsRefused() if self.first and not self._compiled else contextlib.nullcontext():
                yield
        finally:
            self._in_forward = False
        if not torch.is_grad_enabled():
            self.order.end()

    def end(self) -> None:
        """End the passes of a step. Raises RunError where other workers have more."""
        self.order.end()
        self.first = False

    def _post_backward(self, group: Any, inner: Callable[[], None], *_unused: Any) -> None:
        if self._in_forward:
            raise InputError(
                SHARDS, got="fsdp with a gradient that is taken inside forward or the loss, as by a gradient penalty",
                expected="gradients only in the backward of the step", remedy=DATA_PARALLEL,
            )  # fmt: skip
        if not self._idle:
            for one in group.fsdp_params:
                whole = getattr(one, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    self.used.add(id(one.sharded_param))
        inner()

    def _reshard(self, group: Any, inner: Callable[[], None]) -> None:
        for one in group.fsdp_params if group.is_unsharded else ():
            version = one._unsharded_param._version
            limited = getattr(one._module_info.module, "max_norm", None) is not None  # ForwardChanges sees to its rows
            if not limited and (self.first or self._versions.get(id(one)) != version):
                self._versions[id(one)] = version
                _check_kept(one)
        inner()


class ShardsRefused(TorchFunctionMode):
    """Inside, computing with a sharded parameter is an error. In a forward it is one of another block, or of one that
    was not called; some operations, such as `norm().item()`, would return what this worker's rows alone give.
    `numbers`: refuse only reading numbers."""

    NUMBERS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")

    def __init__(self, *, numbers: bool = False) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        counts = name in self.NUMBERS if self._numbers else name not in ("__get__", "__set__")
        if counts and any(isinstance(one, DTensor) for one in (*args, *(kwargs or {}).values())):
            what = "an optimizer of its own that reads numbers" if self._numbers else f"{name} of a weight"
            raise unfit(f"{what} outside its block sees the rows of one worker")
        return func(*args, **(kwargs or {}))


def watch_first_step(optimizer: Any) -> None:
    """Explain what fails in the first step of a user's own optimizer because its parameters are sharded."""
    step = optimizer.step

    def first(*inputs: Any, **named: Any) -> Any:
        optimizer.step = step
        with explained(), ShardsRefused(numbers=True):
            return step(*inputs, **named)

    optimizer.step = first


def groups_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each part that FSDP2 gathers as one, and torch's object for it."""
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one
            for group in [state._fsdp_param_group] if several is None else several:
                if group is not None:
                    yield name, group


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Explain what torch raises inside because parameters are sharded, or their gathered copy is freed. Raises
    InputError."""
    try:
        yield
    except Exception as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        in_torch = any(part in name for name in files for part in _OF_SHARDS)
        other = isinstance(error, _OTHERS) or "allocate memory" in message_of(error) or is_of_a_collective(error)
        if other or not (in_torch or any(word in message_of(error) for word in _WORDS)):
            raise
        raise unfit(first_line(error)) from error


def is_of_a_collective(error: BaseException) -> bool:
    """NCCL's errors have a type; gloo's are plain RuntimeErrors that name the source file in gloo."""
    return isinstance(error, dist.DistError) or "gloo/transport" in message_of(error)


def unfit(seen: str) -> InputError:
    """The error about a model that cannot be trained in shards, by what was seen of it."""
    return InputError(
        SHARDS, got=f"fsdp with a model that does not work in shards ({seen[:SEEN_AT_MOST]})",
        expected="parameters that are used only inside the forward of their own block, of the whole module,"
        " called as module(...): no penalties on parameters, other methods, or weights of another block",
        remedy=DATA_PARALLEL,
    )  # fmt: skip


@torch.no_grad()
def _check_kept(one: Any) -> None:
    """Check that this worker's rows of a gathered parameter are what it holds, before the copy is freed."""
    if len(one.all_gather_outputs) != 1:
        return
    copy, own = one.all_gather_outputs[0], one._sharded_param_data
    size = own.numel()
    rows = copy.narrow(0, size * one.mesh_info.shard_mesh_rank, size)
    same = torch.equal(rows.view(torch.uint8), own.to(rows.dtype).view(torch.uint8))
    if not same or one._unsharded_param.data_ptr() != copy.data_ptr():
        raise InputError(
            SHARDS, got=f"fsdp with a forward that changes the parameter {one._param_fqn}",
            expected="parameters that only the optimizer changes: a change to the gathered copy of a block is lost",
            remedy=f"make it a buffer, or {DATA_PARALLEL}",
        )  # fmt: skip


def keep_parameters(module: nn.Module, originals: Mapping[tuple[int, str], nn.Parameter]) -> None:
    """Keep what users attached to parameters, after a module was sharded: attributes and tensor hooks.

    The parameter that the user knows becomes the gathered copy, so that a hook, and what it closes over, see whole
    values, and the gradient of each micro-batch before it is summed, as without shards. The sharded parameter, which
    optimizers see, has the same attributes. `originals`: `kept_parameters` from before.
    """
    for _, group in groups_of(module):
        for one in group.fsdp_params:
            info = one._module_info
            original = originals.get((id(info.module), info.param_name))
            if original is None:
                continue
            one.sharded_param.__dict__.update(vars(original))
            one.init_dtype_attrs(group.mp_policy)
            held = one._sharded_param_data
            one.init_all_gather_outputs(
                [held.numel()], [one.param_dtype or held.dtype], group._all_gather_process_group.size(), held.device
            )
            one.init_unsharded_param()
            original.grad = None
            original.data = one._unsharded_param.data
            one._unsharded_param = original
            one.free_unsharded_param()


def kept_parameters(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The parameters with attributes or hooks, by the id of their module and their name in it."""
    return {
        (id(part), name): parameter
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if vars(parameter) or parameter._backward_hooks
    }
