"""What one forward and backward of a model costs, counted on tensors without storage: memory, products, traffic.

torch's fake tensors run the real code of any module for any size of batch without computing or allocating anything, so
the counts hold for the module as it is: its number format, recomputed blocks and the kernels of its device included.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from raytrain.plan.facts import PassFacts
from raytrain.train.compute.activation_checkpointing import recompute
from raytrain.train.precision.policy import PrecisionPolicy, policy_for
from raytrain.trainable import Batch, Trainable, parameters_of

BUDGET_S = 5.0
"""CPU seconds of all passes of one model; a trace takes some 0.2 ms for each operation and is given up after them."""

REAL_PARAMETERS = 50_000_000
"""A model whose code reads values of its tensors is run for a few rows, unless it has more parameters than this."""

FEW, SEVERAL = 2, 6
"""Rows of the traced micro-batches: what they differ in is what a row adds."""


@dataclass(frozen=True)
class PassCost:
    """The cost of one forward and backward.

    Attributes:
        peak_bytes: most bytes of tensors that exist at the same time, besides parameters, gradients, buffers and batch.
        flops: of matrix products, convolutions and attention.
        moved_bytes: read and written by the other operations.
        operations: number of operations, without views.
    """

    peak_bytes: int
    flops: float
    moved_bytes: float
    operations: int


class TraceGivenUp(RuntimeError):
    """The trace takes too long."""


@dataclass(frozen=True)
class TracedModel:
    """What traces of a model found: `passes` for the plan's estimates, and FLOPs of forward and backward of one row."""

    passes: PassFacts
    flops_per_sample: float


def trace_model(
    trainable: Trainable, batch_of: Callable[[int], Batch], *, device: torch.device, recomputed: bool,
    budget_s: float = BUDGET_S,
) -> TracedModel | None:  # fmt: skip
    """Count forward and backward of a model in fp32 and in half precision.

    The module and torch's random state are unchanged.

    Args:
        batch_of: returns a batch of so many rows.
        recomputed: recompute blocks in backward (`loop.activation_checkpointing`).

    Returns:
        None if the model cannot be traced: it takes too long, or its code fails on tensors without storage, and it is
        too large to be run.
    """
    _import_tracing()
    until = time.process_time() + budget_s
    again = partial(trace_pass, trainable, device=device, recomputed=recomputed)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            costs = {
                (name, rows): again(batch_of(rows), policy=policy_for(name), budget_s=until - time.process_time())
                for name in ("fp32", "bf16")
                for rows in (FEW, SEVERAL)
            }
            scored = {
                (name, rows): again(
                    batch_of(rows), policy=policy_for(name), budget_s=until - time.process_time(), scored=True
                )
                for name in ("fp32", "bf16")
                for rows in (FEW, SEVERAL)
            }
    except Exception:  # any code of the user's may run; without a trace, the plan says that activations are unknown
        return None

    def slope(found: Mapping[tuple[str, int], PassCost], name: str, field: str) -> float:
        few, several = (getattr(found[name, rows], field) for rows in (FEW, SEVERAL))
        return max(0.0, (several - few) / (SEVERAL - FEW))

    full, half = (round(slope(costs, name, "peak_bytes")) for name in ("fp32", "bf16"))
    of_eval, half_of_eval = (round(slope(scored, name, "peak_bytes")) for name in ("fp32", "bf16"))
    few = costs["fp32", FEW]
    weights = sum(p.numel() for p in trainable.module.parameters() if p.ndim > 1)
    matrices = sum(1 for p in trainable.module.parameters() if p.ndim > 1)
    passes = PassFacts(
        full_bytes=full,
        half_bytes=half,
        recomputed_bytes=full if recomputed else None,
        half_recomputed_bytes=half if recomputed else None,
        moved_bytes=slope(costs, "fp32", "moved_bytes"),
        operations=few.operations,
        width=max(1, round(math.sqrt(weights / max(1, matrices)))),
        fixed_bytes=max(0, few.peak_bytes - FEW * full),
        eval_bytes=of_eval,
        half_eval_bytes=half_of_eval,
    )
    return TracedModel(passes, slope(costs, "fp32", "flops"))


def _import_tracing() -> None:
    """Run one operation, for which torch imports a second's worth of modules; the budget is for the model alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), _Counter([], budget_s=BUDGET_S + 60.0):
        torch.ones(1, requires_grad=True).sum().backward()


def trace_pass(
    trainable: Trainable, batch: Batch, *, policy: PrecisionPolicy, device: torch.device, recomputed: bool,
    budget_s: float, scored: bool = False,
) -> PassCost:  # fmt: skip
    """Count one forward and backward, on fake tensors if the model's code allows that, else on real ones.

    Args:
        scored: count a forward as in an evaluation instead.

    Raises:
        TraceGivenUp: it takes longer than `budget_s`.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    options: dict[str, Any] = {"policy": policy, "recomputed": recomputed, "budget_s": budget_s, "scored": scored}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _counted(trainable, batch, device=device, **options)
    except (DataDependentOutputException, DynamicOutputShapeException):  # its code reads values, such as a router's
        if parameters_of(trainable.module) > REAL_PARAMETERS:
            raise
    return _counted(trainable, batch, device=torch.device("cpu"), drawn=True, **options)


def _counted(
    trainable: Trainable, batch: Batch, *, policy: PrecisionPolicy, device: torch.device, recomputed: bool,
    budget_s: float, drawn: bool = False, scored: bool = False,
) -> PassCost:  # fmt: skip
    module = without_state(trainable.module, dtype=policy.master_dtype, device=device).train(not scored)
    if drawn:
        _fill(module, like=trainable.module)
    copied = replace(trainable, module=module)
    if recomputed:
        recompute(copied)
    batch = tree_map(partial(_moved, policy=policy, device=device), batch)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    outside = [*module.parameters(), *gradients, *module.buffers(), *inputs]
    with torch.set_grad_enabled(not scored), _Counter(outside, budget_s=budget_s) as counter:
        with policy.autocast(device):
            more = {"num_items_in_batch": 1} if trainable.takes_global_count else {}
            output = copied.loss(module, batch, **more)
        if not scored:
            total = output.loss if output.aux is None else output.loss + output.aux
            total.backward()
    return PassCost(counter.peak, counter.flops, counter.moved, counter.operations)


def _fill(module: nn.Module, *, like: nn.Module) -> None:
    """Give a copy the buffers of its original, zeros where that has no storage, and drawn weights.

    They are the same in every pass: weights and buffers may decide how many rows each expert gets.
    """
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter.data, std=0.02, generator=draw)
    for buffer, original in zip(module.buffers(), like.buffers(), strict=True):
        buffer.zero_() if original.is_meta else buffer.copy_(original)


class _Counter(TorchDispatchMode):
    """Counts each operation and tracks the storages that exist.

    Args:
        outside: tensors that exist before and afterwards, which do not count.
    """

    def __init__(self, outside: list[Tensor], *, budget_s: float) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # imports what only a trace needs

        self._flops: Mapping[Any, Callable[..., int]] = flop_registry
        self._known = weakref.WeakKeyDictionary[Any, int]()
        for tensor in outside:
            self._known[tensor.untyped_storage()] = 0
        self._until = time.process_time() + budget_s
        self.now = self.peak = self.operations = 0
        self.flops = self.moved = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.prim.device.default:  # autograd asks each fake tensor: most calls are this one
            return func(*args, **named)
        result = func(*args, **named)
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        fresh = sum(self._track(tensor) for tensor in written)
        if not fresh and not func._schema.is_mutable:  # a view
            return result
        if time.process_time() > self._until:
            raise TraceGivenUp
        self.operations += 1
        products = self._flops.get(func.overloadpacket)
        if products is not None:
            self.flops += products(*args, **named, out_val=result)
        else:
            self.moved += sum(map(_bytes, written)) + sum(map(_bytes, read))
        return result

    def _track(self, tensor: Tensor) -> int:
        """Count the storage of a tensor if it is new; returns whether it was."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return 0
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)
        return 1

    def _freed(self, size: int) -> None:
        self.now -= size


def _bytes(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor; an expanded one is as large as what it repeats."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def without_state(module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of a module whose parameters, gradients and buffers are new, and without storage in a `FakeTensorMode`.

    The module itself may be on any device, also on meta. Floating-point weights get `dtype`.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                empty = nn.Parameter(_like(parameter, dtype, device), requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    empty.grad = torch.empty_like(empty)
                memo[id(parameter)] = empty
        for buffer in part._buffers.values():
            if buffer is not None:
                memo.setdefault(id(buffer), _like(buffer, dtype, device))
    return copy.deepcopy(module, memo)


def _moved(leaf: Any, *, policy: PrecisionPolicy, device: torch.device) -> Any:
    """A leaf of a batch as the loader gives it to the model."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, policy.master_dtype if leaf.is_floating_point() else leaf.dtype)


def _like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=device)
