"""What the workers are told, and the model that the orders name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from cluster.config import ClusterConfig
from raytrain.checkpoint.reader import STATE, LoadedCheckpoint
from raytrain.checkpoint.sharded import ShardPosition
from raytrain.config.sections import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RetryConfig,
    SaveConfig,
    TuneFound,
)
from raytrain.config.user_code import resolve
from raytrain.data.sources.open import Source
from raytrain.errors import CheckpointError
from raytrain.models.registry import call_builder, to_trainable
from raytrain.models.weights.initial import StartingWeights, offered
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.train.state import LoopLimits
from raytrain.trainable import Trainable


@dataclass(frozen=True)
class TrainJob:
    """What a worker is told: the sections it obeys, the plan, and where the run folder is. Pickled to the workers.

    Attributes:
        found: what a search had found for this job (`tune.found`).
        builder_sections: sections a builder may ask for by parameter name, such as {"experts": ...}.
        run_path: the run folder.
        import_path: the directory of the command, importable on workers (appended, never first).
        owner: the driver process, {host, pid, start}.
        first_attempt: the first attempt number of this command; older faults are history.
    """

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
    run_path: str
    import_path: str
    owner: dict[str, Any] = field(default_factory=dict)
    first_attempt: int = 1
    builder_sections: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    found: TuneFound | None = None

    def planned(self, name: str) -> Any:
        """The value of a resolved choice.

        Raises:
            TypeError: the choice is deferred to a measurement.
        """
        choice = getattr(self.plan, name)
        if not isinstance(choice, Resolved):
            raise TypeError(f"{name} is deferred: {choice.reason}")
        return choice.value


def place_of(job: TrainJob, *, rank: int, world_size: int) -> ShardPosition | None:
    """Whose rows of a checkpoint a worker wants; None where it wants all of them."""
    return ShardPosition(rank, world_size) if job.planned("strategy") == "fsdp" else None


def with_micro_batch(job: TrainJob, chosen: Resolved) -> TrainJob:
    """The same orders with micro-batches of another size, and as much less of a budget of tokens where it is smaller:
    of long rows that alone decides how many are together."""
    planned, data = job.plan.micro_batch_size, job.data
    if data.tokens_per_batch is not None and isinstance(planned, Resolved) and chosen.value < planned.value:
        less = max(1, data.tokens_per_batch * chosen.value // planned.value)
        data = data.model_copy(update={"tokens_per_batch": less})
    return replace(job, data=data, plan=replace(job.plan, micro_batch_size=chosen))


def source_facts(source: Source) -> dict[str, Any]:
    """What a builder may take from the data by parameter name, where the YAML does not give it."""
    facts: dict[str, Any] = {
        "vocab_size": source.vocab_size, "num_classes": source.classes, "class_names": source.class_names
    }  # fmt: skip
    sample = source.train.gather(source.train.eval_order()[:1])
    x = sample.get("x")
    if isinstance(x, torch.Tensor):
        facts["num_features"] = int(x[0].numel())
        facts["image_shape"] = tuple(x.shape[1:]) if x.ndim in (3, 4) else None
    return {name: value for name, value in facts.items() if value is not None}


def build_trainable(
    job_model: ModelConfig, *, sections: dict[str, Any], facts: dict[str, Any], initial: bool = True
) -> Trainable:
    """Call the builder (or take the module given in Python) and wrap the result; with the weights of `init_from`.

    Args:
        initial: False where a checkpoint's weights will take their place.

    Raises:
        InputError: a builder that cannot be imported, keys it does not take, a result that is no module, weights that
            do not fit.
    """
    weights = StartingWeights.at(job_model.init_from) if initial and job_model.init_from is not None else None
    with offered(weights):
        if job_model.module is not None:
            trainable = to_trainable(job_model.module)
        else:
            builder = resolve(job_model.builder or "", key="model.builder")
            trainable = to_trainable(call_builder(builder, job_model.keys, sections=sections, source_facts=facts))
    if weights is not None:
        weights.fill(trainable.module, trainable.translate)
    return trainable


def build_of(job: TrainJob, *, facts: dict[str, Any], initial: bool) -> Trainable:
    """The job's model as `build_trainable` builds it; of an object that was given a copy, which training may change."""
    model = job.model
    if model.module is not None:
        model = model.model_copy(update={"module": copy_of(model.module)})
    return build_trainable(model, sections=job.builder_sections, facts=facts, initial=initial)


def copy_of(given: Any) -> Any:
    """A deep copy of a module or a Trainable; functions of a Trainable that close over parts of it (which
    `copy.deepcopy` leaves alone) close over the copies."""
    copies: dict[int, Any] = {}
    made = copy.deepcopy(given, copies)
    if isinstance(made, Trainable):
        for each in fields(made):
            setattr(made, each.name, _rebound(getattr(made, each.name), copies))
    return made


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """What stands in `copies` for an object; a function with what it closes over, or has as defaults, replaced so."""
    if not isinstance(value, FunctionType):
        return copies.get(id(value), value)
    copies[id(value)] = value  # where it refers to itself
    closed = [cell.cell_contents for cell in value.__closure__ or ()]
    held = [*closed, *(value.__defaults__ or ())]
    found = [_rebound(one, copies) for one in held]
    if all(new is old for new, old in zip(found, held, strict=True)):
        return value
    cells, defaults = tuple(map(CellType, found[: len(closed)])), tuple(found[len(closed) :])
    made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def limits_of(job: TrainJob) -> LoopLimits:
    """The resolved numbers of the loop."""
    every = job.planned("eval_every")
    return LoopLimits(
        max_steps=int(job.planned("max_steps")),
        log_every=job.loop.log_every,
        eval_every=int(every) if every else None,
        eval_batches=job.loop.eval_batches,
        patience=job.loop.patience,
        min_delta=job.loop.min_delta,
        nonfinite_steps=job.retry.nonfinite_steps,
    )


def restore_remote(trainable: Trainable, loaded: LoadedCheckpoint) -> None:
    """Have state in other processes loaded, or say that the checkpoint has some and this run no place for it.

    Raises:
        CheckpointError: the one holds such state and the other does not.
    """
    if trainable.remote is not None:
        trainable.remote.restore(loaded.path, step=loaded.step)
        return
    own = {STATE}.union(*loaded.manifest["parts"].values())
    others = sorted(set(loaded.manifest["files"]) - own)
    if others:
        raise CheckpointError(
            f"{loaded.path} holds {', '.join(others)}, state of processes beside the workers: resume it with such "
            "processes (experts.hosts a number, or colocated)"
        )


def load_module(module: nn.Module, state: dict[str, Any]) -> None:
    """Load weights, or say which names and shapes do not fit.

    Raises:
        CheckpointError: first five differences, by name.
    """
    refuse_other_model(differences(module.state_dict(), state, shapes=lambda one: {one.shape}))
    module.load_state_dict(state)


def differences(
    own: Mapping[str, Any], state: Mapping[str, Any], *, shapes: Callable[[torch.Tensor], set[torch.Size]]
) -> list[str]:
    """What of a module's saved state does not fit `own`, by name; `shapes` says which a tensor of `own` may have."""
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in the model" for name in state if name not in own]
    return wrong + [
        f"{name} has shape {tuple(state[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if name in state and hasattr(own[name], "shape") and state[name].shape not in shapes(own[name])
    ]


def refuse_other_model(wrong: list[str]) -> None:
    """Raises CheckpointError with the first five differences; nothing where there are none."""
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError("the checkpoint belongs to another model: " + "; ".join(wrong[:5]) + more)
