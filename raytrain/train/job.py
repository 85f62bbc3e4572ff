"""The job that the driver sends to the workers: configuration sections, plan and run folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from cluster.config import ClusterConfig
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
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.train.state import LoopLimits


@dataclass(frozen=True)
class TrainJob:
    """The configuration sections, the plan and the run folder of a run, pickled to the workers.

    Attributes:
        found: the result of a search for this job (`tune.found`).
        builder_sections: sections that a builder may take by parameter name, such as {"experts": ...}.
        run_path: path of the run folder.
        import_path: working directory of the command, appended to the workers' `sys.path`.
        owner: the driver process, {host, pid, start}.
        first_attempt: number of this command's first attempt; faults of earlier attempts do not count.
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
    """The worker's position among the shards of a checkpoint; None if it loads the full checkpoint."""
    return ShardPosition(rank, world_size) if job.planned("strategy") == "fsdp" else None


def with_micro_batch(job: TrainJob, chosen: Resolved) -> TrainJob:
    """The job with another micro-batch size.

    A smaller size scales a token budget down in proportion, since for long rows only the budget limits a micro-batch.
    """
    planned, data = job.plan.micro_batch_size, job.data
    if data.tokens_per_batch is not None and isinstance(planned, Resolved) and chosen.value < planned.value:
        less = max(1, data.tokens_per_batch * chosen.value // planned.value)
        data = data.model_copy(update={"tokens_per_batch": less})
    return replace(job, data=data, plan=replace(job.plan, micro_batch_size=chosen))


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
