"""Shards a module over the workers, block by block, with torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every parameter is split by rows into one shard per worker. The parameters of a block are gathered before its forward
and again before its backward, and freed after each; those outside the blocks (embeddings, the head) stay gathered while
the module runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from raytrain.models.blocks import blocks_of, outside
from raytrain.train.module_checks import SHARDS
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.fsdp.passes import keep_parameters, kept_parameters
from raytrain.train.parallel.fsdp.reduction import local
from raytrain.train.parallel.fsdp.timed_collectives import TimedAllGather, TimedReduceScatter
from raytrain.train.parallel.order import GATHER, SUM, BlockOrder
from raytrain.train.precision.layers import parts_named
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import Trainable


@dataclass(frozen=True)
class ShardingSizes:
    """Sizes of a sharded module, in bytes of weights in their master format.

    Attributes:
        blocks: number of blocks.
        whole, own: the full module, and this worker's shards.
        largest_block: the largest block when gathered.
        outside: parameters outside all blocks, gathered while the module runs.
        outside_names: their names.
    """

    blocks: int
    whole: int
    own: int
    largest_block: int
    outside: int
    outside_names: tuple[str, ...]


def shard(
    trainable: Trainable, *, device: torch.device, policy: PrecisionPolicy, workers: Workers,
    fp32_layers: Sequence[str] = (), order: BlockOrder | None = None,
) -> ShardingSizes:  # fmt: skip
    """Shard the trainable's module in place over torch's default process group. Collective.

    Args:
        device: device of the shards; a module on another device is moved block by block.
        policy: blocks are gathered in its autocast format, and their gradients are summed in its master format.
            Parameters outside the blocks, norms and `fp32_layers` stay in the master format.
        workers: the seconds spent in collectives inside the passes are added to its `wait_s`.
        fp32_layers: names of layers that compute in the master format.
        order: compares the collectives of the workers.

    Raises:
        InputError: the model has no blocks.
    """
    module = trainable.module
    blocks = blocks_of(trainable, key=SHARDS)
    rest = outside(module, blocks)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    largest = max(sum(parameter.nbytes for parameter in block.parameters()) for _, block in blocks)
    if not dist.is_initialized():  # a single worker gets its own group, without a socket
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(policy.autocast_dtype, policy.master_dtype, cast_forward_inputs=False)
    master = MixedPrecisionPolicy(None, policy.master_dtype, cast_forward_inputs=False)
    kept = {id(inner) for part in parts_named(module, fp32_layers) for inner in part.modules()}
    originals = kept_parameters(module)
    for _, block in blocks:
        for layer in _in_master(block, kept) if policy.autocast_dtype is not None else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=master)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=master if id(block) in kept else half)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=master)
    keep_parameters(module, originals)
    configure(cast(FSDPModule, module), workers, overlap=device.type == "cuda", order=order)
    own = sum(local(parameter).nbytes for parameter in module.parameters())
    size = sum(parameter.nbytes for _, parameter in rest)
    return ShardingSizes(len(blocks), whole, own, largest, size, tuple(name for name, _ in rest))


def _in_master(part: nn.Module, kept: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost layers of a block that stay in the master format: those in `kept`, and those with only vector
    parameters (norms), which autocast does not cast on a CPU."""
    for child in part.children() if id(part) not in kept else ():
        parameters = list(child.parameters())
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if parameters and called and (id(child) in kept or all(one.ndim == 1 for one in parameters)):
            yield child
        else:
            yield from _in_master(child, kept)


def configure(module: FSDPModule, workers: Workers, *, overlap: bool, order: BlockOrder | None = None) -> None:
    """Configure plain sums (the loss is normalised by the step's total weight), and when blocks are gathered.

    Args:
        overlap: torch's defaults: while a block computes, the next one is gathered on a stream of its own, which takes
            the memory of one more block. Else a block is gathered when it is needed, and at most one is: on a CPU a
            collective computes on the same cores, so that nothing would be gained.
    """
    if not overlap:
        # a separate stream would keep the gathered copy of a block until the next block is gathered
        module._set_unshard_async_op(True)
    order = order or BlockOrder(workers, device=torch.device("cpu"))
    for name, part in cast(nn.Module, module).named_modules():
        if isinstance(part, FSDPModule):
            gathers, sums = (partial(order.meet, order.call_of(name, verb)) for verb in (GATHER, SUM))
            # torch's annotations name private base classes, but any object with their methods works
            part.set_custom_all_gather(TimedAllGather(workers, gathers))  # pyright: ignore[reportArgumentType]
            part.set_custom_reduce_scatter(TimedReduceScatter(workers, sums))  # pyright: ignore[reportArgumentType]
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # a parameter may receive a gradient on some workers only
            part.set_reduce_scatter_unused_params(True)
            if not overlap:
                # prefetching the block itself is a no-op: the next block is not gathered while this one is
                part.set_modules_to_backward_prefetch([part])
