"""Exact sizes of a job: opens the data and builds the model, on the meta device if possible. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jobs.job.facts import resolved
from jobs.job.spec import JobSpec
from raytrain.config.user_code import resolve, users_errors
from raytrain.data.rows.contract import Batch, Source
from raytrain.data.rows.residency import tensors_of
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError, RaytrainError
from raytrain.models.blocks import blocks_of
from raytrain.models.registry import call_builder, check_keys, takes, to_trainable
from raytrain.models.sizes import FLOAT_BYTES, SizeError
from raytrain.plan.facts import ModelFacts
from raytrain.trainable import Trainable, parameters_of

RANDOM_FILLS = ("normal_", "uniform_", "trunc_normal_", "random_", "kaiming_uniform_", "kaiming_normal_",
                "xavier_uniform_", "xavier_normal_")  # fmt: skip


def opened(spec: JobSpec) -> Source:
    spec = resolved(spec)
    return open_source(spec.data, context=spec.model.keys.get("context"))


def counted(trainable: Trainable, where: str, found: PassSizes | None) -> ModelFacts:
    """The sizes of a built model, and of a pass if one was run."""
    parameters, blocks = list(trainable.module.parameters()), None  # tied parameters count once
    with contextlib.suppress(InputError):  # a model without blocks, which only some settings need
        blocks = tuple(parameters_of(block) for _, block in blocks_of(trainable, key="scale.strategy"))
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        activation_bytes_per_sample=None if found is None else found.activation_bytes,
        flops_per_sample=trainable.flops_per_sample or (None if found is None else found.flops),
        reason=f"built on {where}",
        blocks=blocks,
    )


@dataclass(frozen=True)
class PassSizes:
    """What one forward and backward needs for a row: bytes that backward keeps, in fp32, and FLOPs."""

    activation_bytes: int
    flops: float


def sizes_of_pass(trainable: Trainable, batch: Batch, *, rows: int, counts: Mapping[str, int]) -> PassSizes:
    """Run a batch of `rows` rows forward and backward in the format of the weights, and count. The loss takes `counts`
    besides the batch."""
    from torch.utils.flop_counter import FlopCounterMode  # not needed by most commands

    module = trainable.module
    outside = [*module.parameters(), *module.buffers(), *(value for _, value in tensors_of(batch, ""))]
    with FlopCounterMode(display=False) as counter:
        with kept_for_backward(outside) as kept:
            output = trainable.loss(module, batch, **counts)
        (output.loss if output.aux is None else output.loss + output.aux).backward()
    in_fp32 = 0
    for one in kept.values():
        size = one.untyped_storage().nbytes()
        in_fp32 += size * FLOAT_BYTES // one.element_size() if one.is_floating_point() else size
    return PassSizes(in_fp32 // rows, counter.get_total_flops() / rows)


@contextlib.contextmanager
def kept_for_backward(outside: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Collects what autograd keeps for backward of the passes inside: a tensor of each storage that none of `outside`
    has, by its address."""
    known = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in known:
            kept.setdefault(address, tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def build(spec: JobSpec, shapes: Mapping[str, Any]) -> tuple[Trainable, str]:
    """Build the job's model; return it and the device it was built on. torch's random state is unchanged."""
    if spec.model.module is not None:
        return to_trainable(spec.model.module, key="model.module"), "your object"
    assert spec.model.builder is not None  # jobs.job.spec refuses a job with neither
    function = resolve(spec.model.builder, "model.builder")
    sections = {"experts": spec.experts}
    check_keys(function, spec.model.keys, sections=sections, ours=spec.model.given)

    def call() -> Trainable:
        result = call_builder(function, spec.model.keys, sections=sections, source_facts=shapes)
        return to_trainable(result)

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"), NothingDrawn():
                return call(), "the meta device"
        except Exception as error:  # code that reads its weights cannot run on meta; the CPU shows real errors
            users = isinstance(error.__cause__, (ValueError, TypeError)) and not isinstance(error.__cause__, SizeError)
            if isinstance(error, RaytrainError) and not users:
                raise
            with users_errors("model.builder", "while the model was built"):
                return call(), "the CPU"


class Joins(RaytrainError):
    """Raised when a builder connects to the expert hosts, as it should."""


class Asked:
    """A connection without hosts, used to check whether a builder connects."""

    def join(self, *_about: Any) -> Any:
        raise Joins("a builder joins")


def check_experts(spec: JobSpec, shapes: Mapping[str, Any], *, remote: bool) -> None:
    """Check that a user's own model follows the `experts` section; with `remote` hosts hold the experts, or the workers
    share them."""
    builder, number = spec.model.builder, spec.experts.num_experts
    receives = builder is not None and takes(resolve(builder, "model.builder"), "experts")
    if number is not None and not receives:
        raise InputError(
            "experts.num_experts", got=f"{number} with {builder or 'a module'}, which does not accept it",
            expected="null, or a builder with a parameter `experts`",
            remedy="the section `experts` is passed to the builder's parameter of that name",
        )  # fmt: skip
    if remote:
        check_joins(spec, shapes)


def check_joins(spec: JobSpec, shapes: Mapping[str, Any]) -> None:
    """Check that a user's builder moves its experts to hosts; otherwise the workers would silently train them."""
    asking = spec.model_copy(update={"experts": spec.experts.connected(Asked())})
    trainable, _ = build(asking, shapes)
    if trainable.hand_over is not None:
        with contextlib.suppress(Joins):
            trainable.hand_over(trainable)
        return
    raise InputError(
        "experts.hosts", got=f"{spec.experts.hosts} with {spec.model.builder or 'a module'}, which keeps its experts",
        expected="auto or 0",
        remedy="to place them on expert hosts, call experts.distribute.distribute(trainable, experts) in the builder",
    )  # fmt: skip


class NothingDrawn(TorchFunctionMode):
    """Mode in which random fills of meta tensors do nothing.

    There is nothing to fill, and torch would import its compiler for it, which takes a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")
        fills = getattr(func, "__name__", "") in RANDOM_FILLS
        if fills and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))
