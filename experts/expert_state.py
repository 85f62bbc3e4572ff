"""The state of one expert by name: its part of stacked weights, and of the optimizers' state of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from experts.grouped import GroupedExperts

Optimizers = Sequence[torch.optim.Optimizer]
State = Mapping[str, Tensor]
"""Weights by name, such as "w1", and the optimizer's tensors of them, such as "w1.exp_avg"."""


def state_of(stack: GroupedExperts, place: int, optimizers: Optimizers) -> dict[str, Tensor]:
    """Weights and optimizer state of the expert at this position of a stack; mostly views, so clone what you keep."""
    state: dict[str, Tensor] = {}
    for name in stack.names:
        state |= {f"{name}{part}": value for part, value in row_of(getattr(stack, name), place, optimizers).items()}
    return state


def load_state(stack: GroupedExperts, place: int, optimizers: Optimizers, state: State) -> None:
    """The inverse of `state_of`."""
    for name in stack.names:
        own = {key.removeprefix(name): value for key, value in state.items() if key.partition(".")[0] == name}
        load_row(getattr(stack, name), place, optimizers, own)


def row_of(parameter: nn.Parameter, place: int, optimizers: Optimizers) -> dict[str, Tensor]:
    """One row of a parameter as "", and the optimizer state of it as ".exp_avg" and so on; mostly views."""
    state = {"": parameter.detach()[place]}
    for optimizer in optimizers:
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f".{name}"] = value[place] if value.shape == parameter.shape else value
    return state


def load_row(parameter: nn.Parameter, place: int, optimizers: Optimizers, state: State) -> None:
    """The inverse of `row_of`; a parameter that is not trained has no optimizer state."""
    parameter.detach()[place].copy_(state[""])
    for key, value in state.items() if parameter.requires_grad else ():
        if not key:
            continue
        name = key.removeprefix(".")
        groups = ((own, group) for own in optimizers for group in own.param_groups)
        optimizer, group = next(pair for pair in groups if any(parameter is one for one in pair[1]["params"]))
        held = optimizer.state[parameter]
        if value.ndim:
            if name not in held:
                held[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            held[name][place].copy_(value)
        elif group.get("fused") or group.get("capturable"):
            # A scalar such as the step count comes from a checkpoint or another host, whose device may differ. Fused
            # kernels read it on the parameter's device, always in float32; other kernels read it on the CPU.
            # `load_state_dict` of torch has the same rule.
            held[name] = value.detach().to(dtype=torch.float32, device=parameter.device, copy=True)
        else:
            held[name] = value.detach().to(device="cpu", copy=True)
