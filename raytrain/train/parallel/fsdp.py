"""The `fsdp` strategy: each worker holds shards of the model, by torch's FSDP2, wrapped block by block.

Gradients are summed into shards inside each backward; each worker writes its own rows of a checkpoint, and state saved
by any number of workers is loaded into the shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cluster.telemetry.processes import WORK
from raytrain.accelerator import on_gpu
from raytrain.checkpoint.safetensors import SHARD_BYTES, ShardPosition, WrittenFile, rows_of
from raytrain.checkpoint.snapshot import Staging, take_snapshot
from raytrain.checkpoint.writer import write_parts
from raytrain.errors import CheckpointError, OutOfMemory, RaytrainError, RunError, lost_in
from raytrain.models.blocks import blocks_of, outside
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store
from raytrain.train.job import differences, load_module, of_this_version, refuse_other_model
from raytrain.train.memory.device import Shortage, run_or_shortage
from raytrain.train.module_checks import SHARDS
from raytrain.train.parallel.collectives import Workers, WorkersGroup
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.parallel.fsdp_passes import (
    ShardedPasses,
    explained,
    is_of_a_collective,
    keep_parameters,
    kept_parameters,
    watch_first_step,
)
from raytrain.train.parallel.order import GATHER, SUM, BlockOrder
from raytrain.train.parallel.reduction import Passed, Reduction, Result, Summed, agreed_weight
from raytrain.train.parallel.strategy import Filler, ForStep, Replicated
from raytrain.train.placing import local, place
from raytrain.train.precision import PrecisionPolicy, parts_named
from raytrain.trainable import RemoteCheckpoint, Trainable

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader


#: The names since torch 2.13, or the older ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TimedCollective:
    """A custom FSDP2 collective (`torch.distributed.fsdp`, `set_custom_all_gather`).

    Calls `meet` (`raytrain.train.parallel.order`), and adds the seconds of each call to `Workers.wait_s`. On a CPU the
    collective has finished when the call returns; FSDP2 would wait for it immediately anyway, since nothing is
    prefetched. On a GPU the stream of the collective waits, and neither the host nor that of the computation.
    """

    def __init__(self, workers: Workers, collective: Callable[..., Any], meet: Callable[[], None]) -> None:
        self._workers, self.collective, self._meet = workers, collective, meet

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        start = time.perf_counter()
        self._meet()
        work = self.collective(output_tensor, input_tensor, **options)
        if work is not None and output_tensor.device.type == "cpu":
            work.wait()
        self._workers.wait_s += time.perf_counter() - start
        return work


# ---------------------------------------------------------------- reduction


class ShardGradients(GradientBuffers):
    """Flat buffers of this worker's rows of each gradient. FSDP2 adds into a `.grad` that exists already. `used`: ids
    of the parameters that got a gradient (`raytrain.train.parallel.fsdp_passes`)."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, used: set[int]) -> None:
        super().__init__(parameters)
        self._used = used

    def unused(self) -> list[bool]:
        """As in `GradientBuffers`; FSDP2 sums zeros for a parameter without a gradient."""
        return [id(parameter) not in self._used for parameter, *_ in self._views]

    def zero_(self) -> None:
        super().zero_()
        self._used.clear()

    def own(self, parameter: nn.Parameter) -> Tensor:
        return local(parameter)

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        return like(parameter, view)


def like(whole: Tensor, own: Tensor) -> Tensor:
    """`own`, this worker's rows, as a tensor sharded like `whole`, sharing memory; `own` itself where `whole` is not
    sharded. No communication."""
    if not isinstance(whole, DTensor):
        return own
    return DTensor.from_local(
        own, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class ShardedReduction(Reduction):
    """Each backward reduce-scatters block by block, so that no worker ever holds the gradients of the whole model: kept
    unreduced until the last micro-batch of a step, they would take as much memory as sharding saved on the weights.

    An out-of-memory error inside a pass is fatal, since the other workers wait in a collective that this one has left.
    The attempt ends, and the next one has half the micro-batch size (`raytrain.execution.recovery`).
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device, passes: ShardedPasses) -> None:
        named = [(name, one) for name, one in trainable.module.named_parameters() if one.requires_grad]
        self.gradients: GradientBuffers = ShardGradients([parameter for _, parameter in named], used=passes.used)
        self._names = [name for name, _ in named]
        self.workers, self._trainable, self._device, self._passes = workers, trainable, device, passes
        self.order = passes.order
        self._bad = torch.zeros((), dtype=torch.bool, device=device)

    def passed(self, passes: Callable[[], Passed], *, flags: Callable[[], list[int]]) -> Summed:
        """As in `Reduction`; raises OutOfMemory and never StepDropped."""
        result = self.run_or_shortage(passes)
        self._passes.end()
        self._bad = ~torch.isfinite(result.loss + result.aux)
        unused = self.gradients.unused()
        *summed, absent, told = self.workers.all_reduce_ints([*flags(), int(any(unused)), int(result.told)])
        weight = agreed_weight(self.workers, self.gradients, result, unused, [absent > 0, told > 0])
        return Summed(result, summed, weight)

    def forward_pass(self, *, idle: bool = False) -> AbstractContextManager[None]:
        """As in `Reduction`. Raises RunError where another worker calls other blocks."""
        return self._passes.forward_pass(idle=idle)

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result:
        """Run passes of this worker.

        Raises:
            OutOfMemory: memory ran out.
            InputError: the model does something that shards do not allow.
            CollectiveFailed: a collective inside a pass failed, as where another worker has died.
        """
        try:
            with explained():
                result = run_or_shortage(passes, device=self._device, who=f"rank {self.workers.rank}")
        except RuntimeError as error:
            if not is_of_a_collective(error):
                raise
            raise lost_in(f"a collective of {self.workers.world_size} workers inside a pass", error) from error
        if isinstance(result, Shortage):
            raise OutOfMemory(str(result))
        return result

    def overlap(self, wanted: bool) -> None:
        """As in `Reduction`: each block is summed inside each backward."""

    def last_pass(self) -> None:
        """As in `Reduction`: all passes are alike."""

    def sum_of_squares(self) -> Tensor:
        """As in `Reduction`: over all shards; NaN where the loss of a worker was not finite."""
        squares = self.gradients.sum_of_squares()
        squares = torch.where(self._bad, torch.full_like(squares, torch.nan), squares)
        self.workers.all_reduce([squares])
        return squares

    def nonfinite(self) -> list[str]:
        """As in `Reduction`: in the shards of all workers. Collective."""
        bad = self.workers.all_reduce_ints([int(not good) for good in self.gradients.finite()])
        return [name for name, count in zip(self._names, bad, strict=True) if count]


# ---------------------------------------------------------------- wrap


def shard(
    trainable: Trainable, *, device: torch.device, policy: PrecisionPolicy, workers: Workers, order: BlockOrder,
    fp32_layers: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Shard the trainable's module in place over torch's default process group. Collective.

    Args:
        device: device of the shards; a module on another device is moved block by block.
        policy: blocks are gathered in its autocast format, and their gradients are summed in its master format.
            Parameters outside the blocks, norms and `fp32_layers` stay in the master format.

    Returns:
        for the record: the number of blocks; in bytes of weights in their master format the whole module, this worker's
        own shards, the largest block when gathered, and the parameters outside all blocks, gathered while the module
        runs; the names of the latter. Raises InputError: the model has no blocks.
    """
    module = trainable.module
    blocks = blocks_of(trainable, key=SHARDS)
    rest = outside(module, blocks)
    sizes = {
        "blocks": len(blocks),
        "whole": sum(parameter.nbytes for parameter in module.parameters()),
        "largest_block": max(sum(parameter.nbytes for parameter in block.parameters()) for _, block in blocks),
        "outside": sum(parameter.nbytes for _, parameter in rest),
        "outside_names": tuple(name for name, _ in rest),
    }
    if not dist.is_initialized():  # a single worker gets its own group, without a socket
        backend = dist.get_default_backend_for_device(device)
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
    # plain sums: the loss is normalised by the step's total weight. On a GPU torch's defaults: while a block computes,
    # the next one is gathered on a stream of its own, which takes the memory of one more block. On a CPU a collective
    # computes on the same cores: a block is gathered when it is needed, and at most one is
    overlap = on_gpu(device)
    if not overlap:
        # a separate stream would keep the gathered copy of a block until the next block is gathered
        cast(FSDPModule, module)._set_unshard_async_op(True)
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            gathers, sums = (partial(order.meet, order.call_of(name, verb)) for verb in (GATHER, SUM))
            # torch's annotations name private base classes, but any object with their methods works
            part.set_custom_all_gather(TimedCollective(workers, _gather, gathers))  # pyright: ignore[reportArgumentType]
            part.set_custom_reduce_scatter(TimedCollective(workers, _scatter, sums))  # pyright: ignore[reportArgumentType]
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # a parameter may receive a gradient on some workers only
            part.set_reduce_scatter_unused_params(True)
            if not overlap:
                # prefetching the block itself is a no-op: the next block is not gathered while this one is
                part.set_modules_to_backward_prefetch([part])
    return {**sizes, "own": sum(local(parameter).nbytes for parameter in module.parameters())}


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


# ---------------------------------------------------------------- checkpoint


class ShardSaver:
    """Writes one worker's part of each checkpoint. Collective: all workers create it at the same point.

    Workers other than rank 0 copy their rows into CPU buffers and write them in a background thread; finally, rank 0's
    writer gathers the results of those threads over a dedicated process group. Rank 0's own rows are part of the files
    that it writes anyway.
    """

    def __init__(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> None:
        self._parts, self._run = parts, run
        group = dist.new_group(backend="gloo")
        self._workers = Workers()
        self._workers.use(WorkersGroup(group, group, lambda: None))
        self._first = self._workers.rank == 0
        self._pending: Future[None] | None = None
        if not self._first:
            self._staging = Staging()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
            self._copied()  # allocates the buffers now: the first copy takes far longer than later ones

    def begin_save(self, step: int) -> None:
        """Copy this worker's rows after `step` and write them in the background. Raises RunError: the previous write
        failed."""
        if not self._first:
            self.wait()
            self._pending = self._thread.submit(self._write, self._copied(), self._run.checkpoint_dir(step))

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for the other workers and return their files, by name and by part. Called by rank 0's writer. Raises
        RunError: another worker could not write; the message is that worker's."""
        files: dict[str, WrittenFile] = {}
        parts: dict[str, list[str]] = {}
        for result in self._workers.all_gather_object({}):
            if "error" in result:
                raise RunError(result["error"])
            files |= {name: WrittenFile(**written) for name, written in result.get("files", {}).items()}
            for part, names in result.get("parts", {}).items():
                parts.setdefault(part, []).extend(names)
        return {"files": files, "parts": parts}

    def wait(self) -> None:
        """Wait until this worker's write has finished; raise its exception once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        if not self._first:
            try:
                self.wait()
            finally:
                self._thread.shutdown()

    def _copied(self) -> dict[str, dict[str, Tensor]]:
        snapshot = take_snapshot(self._parts(), {}, step=0)
        rows = {part: {name: snapshot.tensors[part][name] for name in names} for part, names in snapshot.split.items()}
        return self._staging.copy(rows)

    def _write(self, rows: dict[str, dict[str, Tensor]], folder: str) -> None:
        rank = self._workers.rank
        try:
            self._staging.wait()
            files, parts = write_parts(
                open_store(folder), rows, fence=lambda: None, shard_bytes=SHARD_BYTES, suffix=f".rank{rank:05d}"
            )
            result = {"files": {name: asdict(written) for name, written in files.items()}, "parts": parts}
        except (RaytrainError, OSError) as error:
            self._workers.all_gather_object({"error": f"rank {rank}: {error}"})
            raise
        self._workers.all_gather_object(result)


# ---------------------------------------------------------------- state


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


def own_rows(whole: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """This worker's rows of a sharded tensor, and the same columns of `values`, (n, all rows); both share memory."""
    own, mesh = local(whole), whole.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    start, end = rows_of(values.shape[1], ShardPosition(mesh.get_local_rank(), mesh.size()))
    return own, values[:, start:end]


# ---------------------------------------------------------------- strategy


class Sharded(Replicated):
    """Each worker has shards of the module, by torch's FSDP2."""

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        super().__init__(trainable, workers=workers, device=device)
        self._sizes: dict[str, Any] = {}
        self._master = torch.float32
        self._saver: ShardSaver | None = None

    def place(self, policy: PrecisionPolicy, *, fp32_layers: Sequence[str]) -> None:
        """The device holds shards and one gathered block at a time, never the whole module."""
        module = self._trainable.module
        place(module, device=None, master=policy.master_dtype)
        self._workers.broadcast([*module.parameters(), *module.buffers()])
        order = BlockOrder(self._workers, device=self._device)
        self._sizes = shard(
            self._trainable, device=self._device, policy=policy, workers=self._workers, order=order,
            fp32_layers=fp32_layers,
        )  # fmt: skip
        self.passes = ShardedPasses(module, order)
        self._master = policy.master_dtype

    def for_step(self, loader: BatchLoader) -> ForStep:
        reduction = ShardedReduction(self._trainable, workers=self._workers, device=self._device, passes=self.passes)
        return {"reduction": reduction, "filler": Filler(loader)}

    def watch(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            watch_first_step(optimizer)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load complete weights, or this worker's rows of them, without communication."""
        module = self._trainable.module
        own = module.state_dict()
        refuse_other_model(differences(own, state, shapes=lambda one: {one.shape, local(one).shape}))
        module.load_state_dict(of_this_version(own, {name: cut(own[name], value) for name, value in state.items()}))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Tensors of the shape of their parameter are sharded like it."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known, held = state["state"], {}
        if any(not 0 <= int(index) < len(parameters) for index in known):
            counts = f"the checkpoint's optimizer has {len(known)} parameters, this run's {len(parameters)}"
            raise CheckpointError(counts)
        for index, values in known.items():
            parameter = parameters[int(index)]
            shapes = {parameter.shape, local(parameter).shape}
            held[index] = {
                name: cut(parameter, value)
                if isinstance(value, Tensor) and value.ndim and value.shape in shapes
                else value
                for name, value in values.items()
            }
        optimizer.load_state_dict({**state, "state": held})

    def full_module(self, build: Callable[[], Trainable]) -> nn.Module | None:
        """Another module of the model on rank 0's CPU, with the weights of all shards."""
        first = self._workers.rank == 0
        state: dict[str, Any] = {}
        gathered: dict[int, Tensor] = {}  # tied weights stay the same tensor
        for name, value in self._trainable.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):  # of `get_extra_state`
                state[name] = value
                continue
            if id(value) not in gathered:
                with torch.no_grad():
                    full = value.full_tensor() if isinstance(value, DTensor) else value.detach()
                WORK.add()
                gathered[id(value)] = full.cpu() if first else full.new_empty(0)
            state[name] = gathered[id(value)]
        if not first:
            return None
        module = build().module
        place(module, device=None, master=self._master)
        load_module(module, state)
        return module

    def remote_checkpoint(self, parts: Callable[[], Mapping[str, Any]], run: RunFolder) -> RemoteCheckpoint | None:
        """Every worker writes its own rows."""
        self._saver = ShardSaver(parts, run) if self._workers.world_size > 1 else None
        return self._saver

    def close_saves(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def release(self) -> None:
        """Sharding has copied every parameter, so nothing else uses the storage. (FSDP2 keeps further references to it.
        Host memory that numpy has seen cannot be resized, and goes with the session.)"""
        for parameter in self._trainable.module.parameters():
            storage = local(parameter).untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def facts(self) -> dict[str, Any]:
        return {"sharded": self._sizes}
