"""Loads state saved by any number of workers into shards, and gathers sharded weights for an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cluster.telemetry.work import WORK
from raytrain.checkpoint.sharded import ShardPosition, rows_of
from raytrain.errors import CheckpointError
from raytrain.train.build import differences, refuse_other_model
from raytrain.train.parallel.fsdp.reduction import like, local


def cut(whole: Tensor, value: Tensor) -> Tensor:
    """`value`, complete or this worker's rows, as a tensor sharded like `whole`; a view, or a copy on its device."""
    if not isinstance(whole, DTensor):
        return value
    own = local(whole)
    if value.shape == whole.shape:
        start, end = rows_of(len(value), ShardPosition(whole.device_mesh.get_local_rank(), whole.device_mesh.size()))
        value = value[start:end]
    assert value.shape == own.shape, f"{tuple(value.shape)} are neither {tuple(whole.shape)} nor {tuple(own.shape)}"
    return like(whole, value.to(device=own.device, dtype=own.dtype).contiguous())


def load_sharded(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load weights, complete or this worker's rows, without communication.

    Raises:
        CheckpointError: they belong to another model.
    """
    own = module.state_dict()
    refuse_other_model(differences(own, state, shapes=lambda one: {one.shape, local(one).shape}))
    module.load_state_dict({name: cut(own[name], value) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state; tensors of the shape of their parameter are sharded like it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = state["state"]
    unknown = [index for index in known if not 0 <= int(index) < len(parameters)]
    if unknown:
        raise CheckpointError(f"the checkpoint's optimizer has {len(known)} parameters, this run's {len(parameters)}")
    held = {index: _as(parameters[int(index)], values) for index, values in known.items()}
    optimizer.load_state_dict({**state, "state": held})


def _as(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {parameter.shape, local(parameter).shape}
    return {
        name: cut(parameter, value) if isinstance(value, Tensor) and value.ndim and value.shape in shapes else value
        for name, value in values.items()
    }


def full_state(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Complete values by name, on the CPU, tied ones the same tensor; {} on workers without `keep`. Collective."""
    found: dict[str, Any] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # of `get_extra_state`
            found[name] = value
            continue
        if id(value) not in gathered:
            full = _whole(value)
            WORK.add()
            gathered[id(value)] = full.cpu() if keep else full.new_empty(0)
        found[name] = gathered[id(value)]
    return found if keep else {}


@torch.no_grad()
def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()
