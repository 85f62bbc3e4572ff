"""A module as this worker's shards (torch's FSDP2, `torch.distributed.fsdp.fully_shard`), block by block.

Every parameter is cut into rows, one piece for each worker. A block's are brought together before its forward and again
before its backward, and let go after each; those outside the blocks (embeddings, the head) while the whole module runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from raytrain.errors import InputError
from raytrain.models.blocks import Block, blocks_of, outside
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.fsdp.reduction import local
from raytrain.train.parallel.fsdp.timed_collectives import TimedAllGather, TimedReduceScatter
from raytrain.train.precision.layers import parts_named
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import Trainable

KEY = "scale.strategy"


@dataclass(frozen=True)
class ShardingSizes:
    """What sharding made of a module, in bytes of weights in their master format.

    Attributes:
        blocks: how many.
        whole, own: of the module, and of this worker's share of it.
        largest_block: what one block takes while it is together.
        outside: what no block owns, together while the module runs; `outside_names` says which.
    """

    blocks: int
    whole: int
    own: int
    largest_block: int
    outside: int
    outside_names: tuple[str, ...]


def shard(
    trainable: Trainable, *, device: torch.device, policy: PrecisionPolicy, workers: Workers,
    fp32_layers: Sequence[str] = (),
) -> ShardingSizes:  # fmt: skip
    """Shard the trainable's module in place over torch's default process group. Collective.

    Args:
        device: where the shards go; the module may be elsewhere, and is moved block by block.
        policy: its autocast format is what blocks are brought together in, and their gradients are summed in the master
            format. What is outside the blocks stays in the master format, and norms and `fp32_layers` inside them.
        workers: whose waiting time the meetings inside the passes are added to.
        fp32_layers: names of layers that compute in the master format.

    Raises:
        InputError: no blocks, or parameters that cannot be sharded, by name.
    """
    module = trainable.module
    blocks = blocks_of(trainable, key=KEY)
    check(module, blocks)
    rest = outside(module, blocks)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    largest = max(sum(parameter.nbytes for parameter in block.parameters()) for _, block in blocks)
    if not dist.is_initialized():  # one worker: a group of its own, without a socket
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(policy.autocast_dtype, policy.master_dtype, cast_forward_inputs=False)
    master = MixedPrecisionPolicy(None, policy.master_dtype, cast_forward_inputs=False)
    kept = {id(inner) for part in parts_named(module, fp32_layers) for inner in part.modules()}
    for _, block in blocks:
        for layer in _in_master(block, kept) if policy.autocast_dtype is not None else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=master)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=master if id(block) in kept else half)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=master)
    _configure(cast(FSDPModule, module), workers)
    own = sum(local(parameter).nbytes for parameter in module.parameters())
    size = sum(parameter.nbytes for _, parameter in rest)
    return ShardingSizes(len(blocks), whole, own, largest, size, tuple(name for name, _ in rest))


def _in_master(part: nn.Module, kept: set[int]) -> Iterator[nn.Module]:
    """The outermost layers inside a block that stay in the master format: those of `kept`, and those whose parameters
    are vectors alone (norms), which autocast does not cast on a CPU."""
    for child in part.children() if id(part) not in kept else ():
        parameters = list(child.parameters())
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if parameters and called and (id(child) in kept or all(one.ndim == 1 for one in parameters)):
            yield child
        else:
            yield from _in_master(child, kept)


def check(module: nn.Module, blocks: list[Block]) -> None:
    """Raises InputError naming parameters that cannot be sharded: scalars, and those that several blocks share."""
    scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise InputError(
            KEY, seen=f"fsdp with scalar parameters ({', '.join(scalars[:5])})", expected="parameters with rows",
            remedy="give them the shape (1,), or scale.strategy data_parallel",
        )  # fmt: skip
    owners: dict[int, set[str]] = defaultdict(set)
    for name, block in blocks:
        for parameter in block.parameters():
            owners[id(parameter)].add(name)
    inside = {id(part) for _, block in blocks for part in block.modules()}
    for part in module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                owners[id(parameter)].add("")
    several = {key for key, names in owners.items() if len(names) > 1}
    shared = [name for name, parameter in module.named_parameters() if id(parameter) in several]
    if shared:
        raise InputError(
            KEY, seen=f"fsdp with weights that a block shares with something outside it ({', '.join(shared[:5])})",
            expected="weights that are tied within one block, or outside the blocks",
            remedy="scale.strategy data_parallel",
        )  # fmt: skip


def _configure(module: FSDPModule, workers: Workers) -> None:
    """Plain sums, since the loss is normalised by the weight of the whole step; and never two blocks together."""
    # its own stream would keep the gathered copy of a block until the next one is gathered
    module._set_unshard_async_op(True)
    for part in cast(nn.Module, module).modules():
        if isinstance(part, FSDPModule):
            # torch asks for its own base classes, which are private: it takes whatever has their verbs
            part.set_custom_all_gather(TimedAllGather(workers))  # pyright: ignore[reportArgumentType]
            part.set_custom_reduce_scatter(TimedReduceScatter(workers))  # pyright: ignore[reportArgumentType]
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # a parameter may get no gradient on one worker and one on another
            part.set_reduce_scatter_unused_params(True)
            # itself is there already: the next block is not fetched while this one is together
            part.set_modules_to_backward_prefetch([part])
