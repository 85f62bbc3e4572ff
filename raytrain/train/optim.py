"""Parameter groups, the built-in optimizers (also Muon), and the learning-rate schedule.

torch's optimizers are used without the import of its compiler, which takes a second.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.models.blocks import blocks_of
from raytrain.train.placing import is_sharded, local
from raytrain.trainable import Trainable

_sgd_step = inspect.unwrap(torch.optim.SGD.step)


class Eager:
    """Mixin before a torch optimizer in the bases: its methods without their compiler decorators."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Eager, torch.optim.SGD):
    """torch's SGD, whose first step can be skipped too: torch's fused kernel fills the momentum, which is uninitialised
    memory until then."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run one update. Momentum starts at zero, so the first step sets it to the gradient, as in torch."""
        for group in self.param_groups:
            if group["fused"] and group["momentum"] != 0:
                assert group["dampening"] == 0, "with dampening, a first step from zero momentum differs from torch's"
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if state.get("momentum_buffer") is None:
                            state["momentum_buffer"] = torch.zeros_like(parameter)
        return _sgd_step(self, closure)


# ---------------------------------------------------------------- muon


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz step: steepest at zero; singular values end in 0.7 to 1.2 (Jordan)."""
ITERATIONS = 5
RMS = 0.2
"""RMS of an AdamW update; an orthogonal A x B matrix scaled by this times sqrt(max(A, B)) matches it (Liu)."""
BATCH_ELEMENTS = 2**24
"""Maximum elements orthogonalised together; bounds the temporary memory."""


class Muon(Eager, torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay, at learning rates on the scale of AdamW's.

    Orthogonalises in bfloat16; float64 parameters in float64. If `found_inf` (a scalar on the device) is set and not
    zero, a step changes nothing. Each parameter is a matrix (A, B), or a stack (E, A, B) of E matrices that are
    orthogonalised separately, else ValueError. DTensors are supported: a sharded matrix is gathered, a stack sharded
    over E is not.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(f"Muon takes matrices and stacks of them, not a shape {tuple(parameter.shape)}")
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        assert closure is None, "closures are not supported: gradients are computed before"
        skip = None if self.found_inf is None else self.found_inf != 0
        for group in self.param_groups:
            for parameters in _batches(group["params"]):
                self._update(parameters, skip, **{name: group[name] for name in ("lr", "weight_decay", "momentum")})
        return None

    def _update(
        self, parameters: list[nn.Parameter], skip: Tensor | None, *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        # of parameters whose matrices have equal shapes
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
            moved = buffer.lerp(gradient, 1 - momentum)
            matrices = _matrices(gradient.lerp(moved, momentum), parameter)
            directions.append(_format_of_products(matrices))  # at once: it halves the bytes that are kept
            buffer.copy_(moved if skip is None else torch.where(skip, buffer, moved))
            del moved, matrices
        sizes = [len(matrices) for matrices in directions]
        found = orthogonal(_joined(directions)).split(sizes)
        rate, decay = RMS * math.sqrt(max(parameters[0].shape[-2:])) * lr, 1 - lr * weight_decay
        for parameter, update in zip(parameters, found, strict=True):
            own = local(parameter)
            changed = own.mul(decay).sub_(_own_part(update, parameter).to(own.dtype), alpha=rate)
            own.copy_(changed if skip is None else torch.where(skip, own, changed))


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix of each (N, A, B) -> (N, A, B), by five Newton-Schulz steps; a zero
    matrix stays zero. Returns bfloat16, or float64 for float64."""
    x = _format_of_products(matrices)
    del matrices  # the copy that an optimizer hands over is freed by the first iteration
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _format_of_products(matrices: Tensor) -> Tensor:
    return matrices if matrices.dtype == torch.float64 else matrices.bfloat16()


def _joined(parts: list[Tensor]) -> Tensor:
    """All matrices in one tensor; empties the list, so that they do not exist twice for longer than needed."""
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    parts.clear()
    return joined


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters with a gradient in batches of equal matrix shape, in the given order."""
    open_: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        batch = open_.setdefault((parameter.shape[-2:], parameter.dtype, parameter.device), [])
        if batch and sum(one.numel() for one in batch) + parameter.numel() > BATCH_ELEMENTS:
            yield list(batch)
            batch.clear()
        batch.append(parameter)
    yield from open_.values()


def _matrices(own: Tensor, parameter: Tensor) -> Tensor:
    """Return (N, A, B): the full matrix of which `own` is a part, or this process's matrices of a stack."""
    if parameter.ndim == 3:
        return own
    if is_sharded(parameter):
        from raytrain.train.parallel.fsdp import like  # imported already where there are shards

        own = like(parameter, own).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    return own[None]


def _own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `_matrices`, without communication."""
    if parameter.ndim == 3:
        return update
    if is_sharded(parameter):
        from raytrain.train.parallel.fsdp import cut

        return local(cut(parameter, update[0]))
    return update[0]


# ---------------------------------------------------------------- build


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, vectors: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Group parameters by weight decay: matrices (two or more dimensions) decay, vectors and scalars do not, nor those
    of the ids `vectors`, with one independent vector per row. Frozen ones are left out, and tied ones in one group."""
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for _, parameter in named:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            (decay if parameter.dim() >= 2 and id(parameter) not in vectors else plain).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizers(
    module: nn.Module, optim: OptimConfig, *, lr: float, blocks: Sequence[nn.Module] = ()
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of `optim.name` for `module`'s trainable parameters.

    Uses fused kernels where the device has them: they need one pass over memory and take the "skip this step" flag as a
    tensor, so that a non-finite gradient costs no device read. torch has no fused SGD for sharded parameters.

    Muon optimizes the matrices of `blocks`, parts of `module`; AdamW takes the rest, with the same learning rate.
    Raises InputError: `muon` for a module without such matrices.
    """
    named, vectors = list(module.named_parameters()), _stacked(module, "stacked_vectors")
    hidden: set[int] = set()
    found: list[torch.optim.Optimizer] = []
    if optim.name == "muon":
        hidden = hidden_matrices(module, blocks)
        matrices = [parameter for _, parameter in named if id(parameter) in hidden]
        found = [Muon(matrices, lr=lr, weight_decay=optim.weight_decay, momentum=optim.momentum)]
    rest = [(name, parameter) for name, parameter in named if id(parameter) not in hidden]
    groups = parameter_groups(rest, weight_decay=optim.weight_decay, vectors=vectors)
    if not groups:
        return found
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    able = all(one.device.type in ("cpu", "cuda") and one.is_floating_point() for one in trained)
    fused = optim.fused is not False and bool(trained) and able
    if optim.name == "sgd":
        sharded = any(is_sharded(parameter) for _, parameter in rest)
        return [SGD(groups, lr=lr, momentum=optim.momentum, fused=fused and not sharded)]
    return [*found, AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=fused)]


def muons_blocks(trainable: Trainable, optim: OptimConfig) -> list[nn.Module]:
    """The `blocks` argument of `build_optimizers` for a trainable; empty unless the optimizer is Muon. Raises
    InputError: `muon` for a model without repeated blocks."""
    return [block for _, block in blocks_of(trainable, key="optim.name")] if optim.name == "muon" else []


def hidden_matrices(module: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that Muon optimizes: trainable matrices and stacks of matrices only in `blocks`, except
    embedding tables, whose rows are looked up one by one. Raises InputError: there are none."""
    inside = {id(part) for block in blocks for part in block.modules()}
    tables = [part for part in module.modules() if id(part) not in inside or isinstance(part, nn.Embedding)]
    others = {id(parameter) for part in tables for parameter in part.parameters(recurse=False)}
    vectors, stacks = (_stacked(module, kind) for kind in ("stacked_vectors", "stacked_matrices"))
    found = {
        id(parameter)
        for block in blocks
        for parameter in block.parameters()
        if parameter.requires_grad and (parameter.ndim == 2 or id(parameter) in stacks)
    } - (others | vectors)
    if not found:
        raise InputError(
            "optim.name", got="muon for a model without a trainable matrix inside repeated blocks",
            expected="adamw or sgd", remedy="a builder that returns a Trainable names its `blocks`",
        )  # fmt: skip
    return found


def _stacked(module: nn.Module, kind: str) -> set[int]:
    """Ids of the parameters that their modules list in a tuple attribute `kind`: "stacked_vectors" hold one vector per
    row and are no matrices; "stacked_matrices" (E, A, B) hold E matrices."""
    found = [
        getattr(part, name)
        for part in module.modules()
        if isinstance(names := getattr(part, kind, None), tuple)
        for name in names
    ]
    return {id(parameter) for parameter in found if parameter is not None}


def takes_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` can skip a step through a `found_inf` tensor, like torch's fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class Schedule:
    """Learning rate as a pure function of the step: linear warm-up, then cosine, linear or constant.

    Step numbers count from 1. With warm-up w, steps 1..w use peak * step / (w + 1): the rate of the first step is not
    zero, and step w + 1 is the first at the peak. The last step uses `final_lr_fraction` of the peak.
    """

    def __init__(self, optim: OptimConfig, *, lr: float, warmup_steps: int, max_steps: int) -> None:
        self.kind = optim.schedule
        self.peak = lr
        self.final_fraction = optim.final_lr_fraction
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps

    def factor(self, step: int) -> float:
        """Fraction of the peak learning rate at `step` (1-based)."""
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        if self.kind == "constant":
            return 1.0
        span = max(1, self.max_steps - self.warmup_steps - 1)
        done = min(1.0, (step - self.warmup_steps - 1) / span)
        if self.kind == "linear":
            return 1.0 - done * (1.0 - self.final_fraction)
        return self.final_fraction + 0.5 * (1.0 - self.final_fraction) * (1.0 + math.cos(math.pi * done))

    def at(self, step: int) -> float:
        return self.peak * self.factor(step)

    def apply(self, optimizers: list[torch.optim.Optimizer], step: int) -> float:
        """Set every group's learning rate for `step`, keeping the ratios between groups, and return the main one."""
        factor = self.factor(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * factor
        return self.peak * factor
