"""Exact sizes of a job: imports torch, opens the data and builds the model, without memory if it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jobs.job.paths import resolved
from jobs.job.spec import JobSpec
from raytrain.config.user_code import resolve
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import open_source
from raytrain.errors import InputError, RaytrainError
from raytrain.models.blocks import blocks_of
from raytrain.models.registry import call_builder, takes, to_trainable
from raytrain.plan.facts import ModelFacts
from raytrain.trainable import Trainable, parameters_of

RANDOM_FILLS = ("normal_", "uniform_", "trunc_normal_", "random_", "kaiming_uniform_", "kaiming_normal_",
                "xavier_uniform_", "xavier_normal_")  # fmt: skip


def opened(spec: JobSpec) -> Source:
    """The job's data, opened on this machine.

    Raises:
        InputError: whatever is wrong with the section, its files or their contents.
    """
    settled = resolved(spec)
    return open_source(settled.data, context=settled.model.keys.get("context"), seed=settled.seed)


def counted(spec: JobSpec, trainable: Trainable, where: str) -> ModelFacts:
    """The sizes of a model that was built."""
    parameters = list(trainable.module.parameters())  # tied ones stand once
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        activation_bytes_per_sample=None,
        flops_per_sample=trainable.flops_per_sample,
        reason=f"built on {where}",
        blocks=_blocks(trainable),
    )


def _blocks(trainable: Trainable) -> tuple[int, ...] | None:
    """Parameters of each block; None where there are none, which only some settings need."""
    try:
        found = blocks_of(trainable, key="scale.strategy")
    except InputError:
        return None
    return tuple(parameters_of(block) for _, block in found)


def check_shards(trainable: Trainable) -> None:
    """That a model has blocks, and that all its parameters can be sharded.

    Raises:
        InputError: it names what is missing, or the parameters.
    """
    from raytrain.train.parallel.fsdp.wrap import KEY, check  # torch's part of it takes a second to import

    check(trainable.module, blocks_of(trainable, key=KEY))


def build(spec: JobSpec, shapes: Mapping[str, Any]) -> tuple[Trainable, str]:
    """(the job's model, the device it was built on), leaving torch's random state as it was."""
    if spec.model.module is not None:
        return to_trainable(spec.model.module), "your object"
    assert spec.model.builder is not None  # jobs.job.spec lets neither through
    function = resolve(spec.model.builder, "model.builder")
    sections = {name: getattr(spec, name) for name in type(spec).model_fields if name not in ("model", "data")}

    def call() -> Trainable:
        result = call_builder(function, spec.model.keys, sections=sections, source_facts=shapes)
        return to_trainable(result)

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"), NothingDrawn():
                return call(), "the meta device"
        except RaytrainError:
            raise
        except Exception:  # code that reads its own weights cannot run on meta; the CPU tells what is wrong
            return _on_cpu(call, spec.model.builder), "the CPU"


class Joins(RaytrainError):
    """Raised where a builder connects to the expert hosts, as it should."""


class Asked:
    """A connection to no hosts, for the check whether a builder uses it."""

    def join(self, *_about: Any) -> Any:
        """A builder that calls this hands its experts over in a run."""
        raise Joins("a builder joins")


def check_experts(spec: JobSpec, shapes: Mapping[str, Any], *, remote: bool) -> None:
    """That a model of the user's own makes of the `experts` section what was asked for.

    Args:
        remote: its experts are to be held by hosts, or shared out over the workers.

    Raises:
        InputError: it is never told the number of experts, or keeps them all.
    """
    builder, number = spec.model.builder, spec.experts.num_experts
    told = builder is not None and takes(resolve(builder, "model.builder"), "experts")
    if number is not None and not told:
        raise InputError(
            "experts.num_experts", seen=f"{number} with {builder or 'a module'}, which is not told of it",
            expected="null, or a builder with a parameter `experts`",
            remedy="the section is handed to a builder's parameter of that name",
        )  # fmt: skip
    if remote:
        check_joins(spec, shapes)


def check_joins(spec: JobSpec, shapes: Mapping[str, Any]) -> None:
    """That a user's builder, given a connection, hands its experts over; it would train them in the workers silently.

    Raises:
        InputError: it does not, or its experts cannot be.
    """
    asking = spec.model_copy(update={"experts": spec.experts.connected(Asked())})
    try:
        build(asking, shapes)
    except Joins:
        return
    raise InputError(
        "experts.hosts", seen=f"{spec.experts.hosts} with {spec.model.builder or 'a module'}, which keeps its experts",
        expected="auto or 0, which leave them in every worker",
        remedy="a builder hands them over with experts.distribute.distribute(trainable, experts)",
    )  # fmt: skip


class NothingDrawn(TorchFunctionMode):
    """Inside, filling a tensor on the meta device with random numbers does nothing, as there is nothing to fill.

    torch would import its compiler for it, which takes a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only the in-place fills of `torch.nn.init` and of tensors are left out."""
        target = args[0] if args else (kwargs or {}).get("tensor")
        fills = getattr(func, "__name__", "") in RANDOM_FILLS
        if fills and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))


def _on_cpu(call: Any, name: str) -> Trainable:
    try:
        return call()
    except RaytrainError:
        raise
    except Exception as error:  # whatever a user's builder raises is its input being wrong
        raise InputError(
            "model.builder",
            seen=f"{type(error).__name__} from {name}: {error}",
            expected="a builder that builds",
        ) from error
