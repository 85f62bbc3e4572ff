"""The job that the driver sends to the workers: configuration sections, plan and run folder; the settings of a step."""

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
from raytrain.plan.shares import Shares, shares_of
from raytrain.train.state import LoopLimits


@dataclass(frozen=True)
class TrainJob:
    """The configuration sections, the plan and the run folder of a run, pickled to the workers.

    Attributes:
        found: the result of a search for this job (`tune.found`).
        telemetry_every: seconds between two samples of a node; 0: none.
        log_memory: print the memory in use with each train row.
        builder_sections: sections that a builder may take by parameter name, such as {"experts": ...}.
        run_path: path of the run folder.
        import_path: working directory of the command, appended to the workers' `sys.path`.
        owner: the driver process, {host, pid, start}.
        first_attempt: number of this command's first attempt; faults of earlier attempts do not count.
        claimed_attempt: the number that the driver took for these workers' first attempt. It is larger than
            `first_attempt` if the driver lost Ray and connected again.
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
    claimed_attempt: int = 1
    builder_sections: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    found: TuneFound | None = None
    telemetry_every: float = 0.0
    log_memory: bool = False

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


@dataclass(frozen=True)
class StepSettings:
    """What the steps use now: the planned values, replaced by what is measured at the start of an attempt and by what
    the failure rules decide. The plan itself stays as it was decided.

    Attributes:
        micro_batch: most rows of a forward pass; None until it is measured.
        tokens_per_batch: most tokens of a forward pass; None without a token budget.
        fp32_layers: names of the layers that compute in fp32 under autocast.
        shares: of a global batch, by measured speed; None if they are equal or not measured yet.
        inflight: micro-batches in flight between workers and expert hosts.
        overlap: whether all-reduces overlap with the last backward pass.
        compiled: whether the model is compiled; False until `loop.compile: auto` is measured.
    """

    micro_batch: int | None
    tokens_per_batch: int | None = None
    fp32_layers: tuple[str, ...] = ()
    shares: Shares | None = None
    inflight: int = 1
    overlap: bool = False
    compiled: bool = False

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
        clear_every=job.loop.clear_every,
    )
