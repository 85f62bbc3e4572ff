"""Parameter groups, the built-in optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.models.blocks import blocks_of
from raytrain.train.optim.eager import SGD, AdamW
from raytrain.train.optim.muon import Muon
from raytrain.trainable import Trainable


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, vectors: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Group parameters by weight decay: matrices (two or more dimensions) decay, vectors and scalars do not.

    Frozen parameters are left out. A parameter with two names (tied weights) is in one group only.

    Args:
        vectors: ids of parameters with one independent vector per row, which do not decay.
    """
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

    Args:
        blocks: parts of `module` whose matrices Muon optimizes; AdamW takes the rest, with the same learning rate.

    Raises:
        InputError: `muon` for a module without such matrices.
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
    fused = optim.fused is not False and fused_available(module)
    if optim.name == "sgd":
        sharded = any(hasattr(parameter, "to_local") for _, parameter in rest)
        return [SGD(groups, lr=lr, momentum=optim.momentum, fused=fused and not sharded)]
    return [*found, AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=fused)]


def muons_blocks(trainable: Trainable, optim: OptimConfig) -> list[nn.Module]:
    """The `blocks` argument of `build_optimizers` for a trainable; empty unless the optimizer is Muon.

    Raises:
        InputError: `muon` for a model without repeated blocks.
    """
    return [block for _, block in blocks_of(trainable, key="optim.name")] if optim.name == "muon" else []


def hidden_matrices(module: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that Muon optimizes: trainable matrices and stacks of matrices only in `blocks`.

    Embedding tables are excluded, since their rows are looked up one by one.

    Raises:
        InputError: there are no such parameters.
    """
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
    """Ids of the parameters that their modules list in a tuple attribute `kind`.

    "stacked_vectors" hold one vector per row and are no matrices; "stacked_matrices" (E, A, B) hold E matrices.
    """
    found = [
        getattr(part, name)
        for part in module.modules()
        if isinstance(names := getattr(part, kind, None), tuple)
        for name in names
    ]
    return {id(parameter) for parameter in found if parameter is not None}


def fused_available(module: nn.Module) -> bool:
    """Whether torch has fused optimizer kernels for all trainable parameters: floating, on a CPU or a CUDA device."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return bool(parameters) and all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


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
        """The main learning rate at `step`."""
        return self.peak * self.factor(step)

    def apply(self, optimizers: list[torch.optim.Optimizer], step: int) -> float:
        """Set every group's learning rate for `step`, keeping the ratios between groups, and return the main one."""
        factor = self.factor(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * factor
        return self.peak * factor
