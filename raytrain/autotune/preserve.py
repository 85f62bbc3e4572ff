"""Context managers that restore what a measurement changes. A test compares hashes of the state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.train.memory.retry import SavedState
from raytrain.train.optim import takes_skip_on_device
from raytrain.trainable import Trainable


@contextlib.contextmanager
def preserve_model(trainable: Trainable, device: torch.device, *, worst: bool = False) -> Iterator[None]:
    """Restores the model's buffers, extra state, generators, gradients (to zero) and train modes. `worst`: inside, what
    depends on the data (the routing of a mixture of experts) needs the most memory it can."""
    module = trainable.module
    saved = SavedState(module, device)
    saved.take()
    modes = [(part, part.training) for part in module.modules()]
    extra = [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]
    routing = trainable.worst_case() if worst and trainable.worst_case is not None else contextlib.nullcontext()
    try:
        with routing:
            yield
    finally:
        saved.restore()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for part, training in modes:  # not module.train(): a user may keep frozen parts in eval mode
            part.training = training
        for part, state in extra:
            part.set_extra_state(state)
    if trainable.interval_log is not None:
        trainable.interval_log.forget()
    trainable.remote.discard()  # not after a failure: the hosts may be in the middle of an exchange


@contextlib.contextmanager
def preserve_skipped(optimizers: list[Any]) -> Iterator[None]:
    """Restores the optimizers after steps that a flag on the device skips: what they have allocated is deleted. An
    optimizer that cannot skip on the device is copied and restored with its weights."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            skips = takes_skip_on_device(optimizer)
            stack.enter_context(_same_entries(optimizer) if skips else preserve_optimizers([optimizer]))
        yield


@contextlib.contextmanager
def preserve_optimizers(optimizers: list[Any]) -> Iterator[None]:
    """Restores the optimizers and their weights after real steps; both are copied to host memory."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    weights = [_copy(parameter) for parameter in parameters]
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    users = [(one, copy.deepcopy(one.state_dict())) for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    try:
        with contextlib.ExitStack() as stack:
            for optimizer in ours:
                stack.enter_context(_same_entries(optimizer, values=True))
            yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, weights, strict=True):
                parameter.copy_(kept)
        for optimizer, record in users:
            optimizer.load_state_dict(record)


@contextlib.contextmanager
def _same_entries(optimizer: torch.optim.Optimizer, *, values: bool = False) -> Iterator[None]:
    """Restores which entries of state and group settings there are, and with `values` what they hold; without it the
    values of tensors are not copied."""
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    held = {} if not values else {
        parameter: {name: _copy(value) for name, value in entries.items()} for parameter, entries in state.items()
    }  # fmt: skip
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    flags = {name: getattr(optimizer, name) for name in ("found_inf", "grad_scale") if hasattr(optimizer, name)}
    try:
        yield
    finally:
        for parameter in [parameter for parameter in optimizer.state if parameter not in state]:
            del optimizer.state[parameter]
        optimizer.state.update(state)
        for parameter, entries in held.items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    state[parameter][name].copy_(value)  # in place: compiled code may hold the tensor
                else:
                    state[parameter][name] = value
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **settings})
        for name in ("found_inf", "grad_scale"):
            if name in flags:
                setattr(optimizer, name, flags[name])
            elif hasattr(optimizer, name):
                delattr(optimizer, name)


def _copy(value: Any) -> Any:
    """A copy of a value, of a tensor in host memory."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
