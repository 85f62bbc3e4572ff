"""The job as a worker receives it: sections, plan, run folder and step settings; and its model, built and loaded.

`jobs.driver.check_job` makes the `TrainJob` on the driver, Ray sends it, and `raytrain.train.session` builds from it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from cluster.config import ClusterConfig
from raytrain.checkpoint.reader import STATE, LoadedCheckpoint
from raytrain.checkpoint.safetensors import ShardPosition
from raytrain.config.messages import abbreviated
from raytrain.config.sections import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RetryConfig,
    SaveConfig,
)
from raytrain.config.user_code import resolve
from raytrain.data.rows.contract import Source
from raytrain.data.rows.map_style import first_row
from raytrain.errors import CheckpointError
from raytrain.models.registry import call_builder, to_trainable
from raytrain.models.weights.stored import StartingWeights, is_extra
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.shares import Shares, shares_of
from raytrain.trainable import Trainable


@dataclass(frozen=True)
class TrainJob:
    """The configuration sections, the plan and the run folder of a run, pickled to the workers."""

    seed: int
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    precision: PrecisionConfig
    loop: LoopConfig
    save: SaveConfig
    retry: RetryConfig
    observers: list[str]
    tensorboard: bool
    plan: Plan
    run_path: str  # of the run folder
    import_path: str  # working directory of the command, appended to the workers' `sys.path`
    owner: dict[str, Any] = field(default_factory=dict)  # the driver process, {host, pid, start}
    first_attempt: int = 1  # of this command; faults of earlier attempts do not count
    claimed_attempt: int = 1  # by the driver for these workers: a later one if it lost Ray and connected again
    builder_sections: dict[str, Any] = field(default_factory=dict)  # that a builder may take by parameter name
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    telemetry_every: float = 0.0  # seconds between two samples of a node; 0: none
    log_memory: bool = False  # print the memory in use with each train row

    def planned(self, name: str) -> Any:
        """The value of a resolved choice. Raises TypeError: the choice is deferred to a measurement."""
        choice = getattr(self.plan, name)
        if not isinstance(choice, Resolved):
            raise TypeError(f"{name} is deferred: {choice.reason}")
        return choice.value


def place_of(job: TrainJob, *, rank: int, world_size: int) -> ShardPosition | None:
    """The worker's position among the shards of a checkpoint; None if it loads the full checkpoint."""
    return ShardPosition(rank, world_size) if job.planned("strategy") == "fsdp" else None


@dataclass(frozen=True)
class StepSettings:
    """What the steps use now: the planned values, replaced by what is measured at the start of an attempt and by what
    the failure rules decide. The plan itself stays as it was decided."""

    micro_batch: int | None  # most rows of a forward pass; None until it is measured
    tokens_per_batch: int | None = None  # most tokens of a forward pass; None without a token budget
    fp32_layers: tuple[str, ...] = ()  # names of the layers that compute in fp32 under autocast
    shares: Shares | None = None  # of a global batch, by measured speed; None if they are equal or not measured yet
    inflight: int = 1  # micro-batches between workers and expert hosts
    overlap: bool = False  # all-reduces, with the last backward pass
    compiled: bool = False  # also until `loop.compile: auto` is measured

    @classmethod
    def planned(cls, job: TrainJob) -> StepSettings:
        """The plan's values; the defaults for what it leaves to a measurement, and for what does not apply."""
        plan = job.plan
        return cls(
            micro_batch=plan.value("micro_batch_size", None),
            tokens_per_batch=job.data.tokens_per_batch,
            fp32_layers=tuple(plan.value("fp32_layers", ())),
            shares=shares_of(plan.value("shares", "equal")),
            inflight=plan.value("inflight", 1),
            overlap=plan.value("overlap", False),
            compiled=job.loop.compile not in ("off", "auto"),
        )

    def reduced_to(self, rows: int) -> StepSettings:
        """Another micro-batch size after an out-of-memory error. A smaller one scales a token budget down in
        proportion, since for long rows only the budget limits a micro-batch."""
        tokens, before = self.tokens_per_batch, self.micro_batch
        if tokens is not None and before is not None and rows < before:
            tokens = max(1, tokens * rows // before)
        return replace(self, micro_batch=rows, tokens_per_batch=tokens)


# ---------------------------------------------------------------- build


def source_facts(source: Source) -> dict[str, Any]:
    """Facts about the data that a builder may take by parameter name if the YAML does not set them, and
    `feature_dtypes`: name of an input -> the format of its numbers, for inference."""
    facts: dict[str, Any] = {
        "vocab_size": source.vocab_size, "num_classes": source.classes, "class_names": source.class_names
    }  # fmt: skip
    sample = first_row(source.train)
    x = sample.get("x")
    if isinstance(x, torch.Tensor):
        facts["num_features"] = int(x[0].numel())
        facts["image_shape"] = tuple(x.shape[1:]) if x.ndim in (3, 4) else None
    inputs = {name: one for name, one in sample.items() if isinstance(one, torch.Tensor) and name != "labels"}
    facts["feature_dtypes"] = {name: str(one.dtype).removeprefix("torch.") for name, one in inputs.items()}
    return {name: value for name, value in facts.items() if value is not None}


def build_trainable(
    job_model: ModelConfig, *, sections: dict[str, Any], facts: dict[str, Any], initial: bool = True
) -> Trainable:
    """Call the builder, or take the module given in Python, as a `Trainable`; `initial`: load the weights of
    `init_from`. Raises InputError: the builder cannot be imported, does not accept the keys or does not return a
    module, or the weights do not fit."""
    weights = StartingWeights(job_model.init_from) if initial and job_model.init_from is not None else None
    if job_model.module is not None:
        trainable = to_trainable(job_model.module, key="model.module")
    else:
        builder = resolve(job_model.builder or "", key="model.builder")
        trainable = to_trainable(call_builder(builder, job_model.keys, sections=sections, source_facts=facts))
    if weights is not None:
        weights.fill(trainable.module, trainable.translate)
    if trainable.hand_over is not None:
        trainable.hand_over(trainable)
    return trainable


def build_of(job: TrainJob, *, facts: dict[str, Any], initial: bool) -> Trainable:
    """Build the job's model with `build_trainable`; a module given as an object is copied first."""
    model = job.model
    if model.module is not None:
        model = model.model_copy(update={"module": copy_of(model.module)})
    return build_trainable(model, sections=job.builder_sections, facts=facts, initial=initial)


def copy_of(given: Any, copies: dict[int, Any] | None = None) -> Any:
    """Deep-copy a module or a Trainable, also what `copy.deepcopy` leaves out: hooks and attributes of parameters, and
    functions and hooks that close over parts of it. `copies`: id of an object -> what stands for it in the copy."""
    copies = {} if copies is None else copies
    module = given.module if isinstance(given, Trainable) else given
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    for value in (value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)):
        if not value.is_leaf:  # of an earlier pass, or of torch's old weight_norm, which computes it in each
            copies[id(value)] = value.detach().clone()
    made = copy.deepcopy(given, copies)
    for tensor in (tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values())):
        if id(tensor) in copies:  # a part may define how it is copied
            _carry_over(tensor, copies[id(tensor)], copies)
    for held in (vars(copies[id(part)]) for part in parts if id(part) in copies):
        for name, value in held.items():
            if isinstance(value, dict) and name.endswith("_hooks"):
                value.update({key: _rebound(hook, copies) for key, hook in value.items()})
            elif isinstance(value, FunctionType):
                held[name] = _rebound(value, copies)
    if isinstance(made, Trainable):
        for each in fields(made):
            setattr(made, each.name, _rebound(getattr(made, each.name), copies))
    return made


def _carry_over(tensor: Any, made: Any, copies: dict[int, Any]) -> None:
    """Give the copy of a parameter or buffer its attributes and hooks, once if it is tied."""
    vars(made).update(copy.deepcopy(vars(tensor), copies))
    for kind, register in (
        ("_backward_hooks", made.register_hook),
        ("_post_accumulate_grad_hooks", made.register_post_accumulate_grad_hook),
    ):
        for hook in () if getattr(made, kind) else (getattr(tensor, kind) or {}).values():
            # Methods and partial functions are copied with what they hold.
            register(_rebound(hook, copies) if isinstance(hook, FunctionType) else copy.deepcopy(hook, copies))


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """The copy of an object; for a function, one whose closure and defaults refer to the copies."""
    if not isinstance(value, FunctionType):
        return copies.get(id(value), value)
    copies[id(value)] = value  # for a function that refers to itself
    closed = [cell.cell_contents for cell in value.__closure__ or ()]
    held = [*closed, *(value.__defaults__ or ())]
    found = [_rebound(one, copies) for one in held]
    if all(new is old for new, old in zip(found, held, strict=True)):
        return value
    cells, defaults = tuple(map(CellType, found[: len(closed)])), tuple(found[len(closed) :])
    made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def restore_remote(trainable: Trainable, loaded: LoadedCheckpoint) -> None:
    """Restore the state held by remote processes, such as expert hosts. Raises CheckpointError: only one of the
    checkpoint and the run has remote state."""
    own = {STATE}.union(*loaded.manifest["parts"].values())
    others = sorted(set(loaded.manifest["files"]) - own)
    trainable.remote.restore(loaded.path, step=loaded.step, files=others)


def load_module(module: nn.Module, state: dict[str, Any]) -> None:
    """Load weights into a module. Raises CheckpointError: names or shapes differ; the message lists the first five."""
    own = module.state_dict()
    refuse_other_model(differences(own, state, shapes=lambda one: {one.shape}))
    module.load_state_dict(of_this_version(own, state))


def of_this_version(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the versions of modules in `own`: without them a module takes it for an old one, and converts it."""
    found = OrderedDict(state)
    found._metadata = getattr(own, "_metadata", {})  # pyright: ignore[reportAttributeAccessIssue]
    return found


def differences(
    own: Mapping[str, Any], state: Mapping[str, Any], *, shapes: Callable[[torch.Tensor], set[torch.Size]]
) -> list[str]:
    """Differences between a saved `state` and a module's `own` state, one line each; `shapes` returns allowed shapes
    of the saved tensor for a tensor of `own`."""
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in the model" for name in state if name not in own]
    return wrong + [
        f"{name} has shape {tuple(state[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in state and not is_extra(name, own[name]) and state[name].shape not in shapes(own[name])
    ]


def refuse_other_model(wrong: list[str]) -> None:
    """Raise CheckpointError with the first five differences, if there are any."""
    if wrong:
        raise CheckpointError(f"the checkpoint belongs to another model: {abbreviated(wrong, 5, separator='; ')}")
