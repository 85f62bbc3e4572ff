"""What a search over batch size and precision may try on the machines of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cluster.devices.inventory import Inventory
from jobs.driver.checks.job import Checked
from jobs.driver.plan import plan_job
from jobs.job.paths import resolved
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.batch.device_kinds import Kind, find_kinds
from jobs.tuning.batch.loaders import LoaderSearch, find_loaders
from raytrain.autotune.search.space import BatchSpace, sizes_dividing, sizes_free
from raytrain.config.messages import render
from raytrain.errors import InputError
from raytrain.plan.plan import Plan
from raytrain.plan.rules.memory import check_limit

PLANNED_BATCH = 4096
"""Global batch to plan with at most if the search chooses the batch; large enough to keep every worker busy."""


@dataclass(frozen=True)
class BatchSearch:
    """What is searched, and for which run.

    Attributes:
        space: the candidates, for the kind of device with the least memory.
        kinds: the kinds of devices, each of which is searched separately.
        plan: the plan of the run itself.
        alone_spec: the job of a trial: one worker, experts in-process.
        alone_plan: its plan.
        loaders: how many processes may read the data.
        goodput: whether to maximise goodput instead of throughput.
    """

    space: BatchSpace
    kinds: tuple[Kind, ...]
    plan: Plan
    alone_spec: JobSpec
    alone_plan: Plan
    loaders: LoaderSearch
    goodput: bool

    @property
    def on_gpu(self) -> bool:
        return self.plan.device.value == "cuda"  # type: ignore[union-attr]

    @property
    def workers(self) -> int:
        return self.space.workers

    @property
    def devices(self) -> int:
        """The number of concurrent measurements."""
        return sum(one.devices for one in self.kinds)

    def space_of(self, kind: Kind) -> BatchSpace:
        """The candidates on one kind of device."""
        return replace(self.space, budget_bytes=kind.budget_bytes, devices=kind.devices)


def find_search(loaded: LoadedSpec, checked: Checked, inventory: Inventory) -> BatchSearch:
    """What a search without `tune.space` may try on these machines.

    Raises:
        InputError: nothing is left to search, or the model alone needs more memory than a process may use.
    """
    spec = loaded.spec
    free = spec.loop.global_batch_size == "auto"
    dtype, micro = spec.precision.dtype, spec.loop.micro_batch_size
    items = spec.data.loader_workers == "auto" and checked.data_facts.kind == "items"
    if dtype != "auto" and micro != "auto" and not free and not items:
        raise InputError(
            "tune",
            got=f"fixed values for precision.dtype ({dtype}) and loop.micro_batch_size ({micro})",
            expected="auto for one of them, or keys to search in tune.space",
        )
    if spec.tune.objective == "goodput" and not free:
        raise InputError(
            "tune.objective",
            got="goodput with a fixed loop.global_batch_size",
            expected="throughput, or loop.global_batch_size: auto",
        )
    facts: dict[str, Any] = {"model_facts": checked.model_facts, "data_facts": checked.data_facts}
    planned = min(PLANNED_BATCH, checked.data_facts.train_rows)
    given = {"loop.global_batch_size": planned} if free and planned else {}
    plan = plan_job(_with(loaded, given), inventory=inventory, **facts)
    loaders = find_loaders(spec, plan, inventory, checked.data_facts)
    workers, threads = int(plan.workers.value), int(plan.threads.value)  # type: ignore[union-attr]
    pinned = {"scale.workers": 1, "scale.threads": threads, "scale.strategy": "auto", "experts.hosts": 0,
              "experts.replicas": 0, "loop.global_batch_size": min(2, planned), "loop.micro_batch_size": 1,
              "tune.space": None, "tune.found": None, **loaders.kept}  # fmt: skip
    if plan.mode.value == "multi_gpu":  # type: ignore[union-attr]
        pinned["scale.mode"] = "single_gpu"
    alone = _with(loaded, pinned)
    precisions = plan.precision.candidates
    reference = "fp32" if "fp32" in precisions else precisions[0]
    if micro == "whole" and free:
        raise InputError(
            "loop.micro_batch_size", got="whole with loop.global_batch_size auto",
            expected="auto, or a number for loop.global_batch_size",
            remedy="another global batch is another loss for a model that compares its rows; tune.space compares them",
        )  # fmt: skip
    if micro != "auto":
        sizes: tuple[int, ...] = (int(spec.loop.global_batch_size if micro == "whole" else micro),)
    elif free:
        sizes = sizes_free(checked.data_facts.train_rows, workers)
    else:
        sizes = sizes_dividing(int(spec.loop.global_batch_size), workers)
    kinds = find_kinds(spec, inventory, workers=workers, on_gpu=plan.device.value == "cuda")  # type: ignore[union-attr]
    budget = min((one.budget_bytes for one in kinds if one.budget_bytes is not None), default=None)
    _check_budget(plan, spec, budget)
    space = BatchSpace(
        precisions=precisions,
        sizes=sizes,
        rows_per_step=None if free else math.ceil(int(spec.loop.global_batch_size) / workers),
        budget_bytes=budget,
        reference=reference,
        devices=1,
        workers=workers,
    )
    alone_spec = resolved(alone.spec)
    alone_plan, goodput = plan_job(alone, inventory=inventory, **facts), spec.tune.objective == "goodput"
    return BatchSearch(space, kinds, plan, alone_spec, alone_plan, loaders, goodput)


def _with(loaded: LoadedSpec, values: dict[str, Any]) -> LoadedSpec:
    return load_spec(mapping=loaded.mapping, overrides=[f"{key}={render(value)}" for key, value in values.items()])


def _check_budget(plan: Plan, spec: JobSpec, budget: int | None) -> None:
    """Refuse a model of which not even one row fits into the memory of a process."""
    if plan.model_facts is not None:
        limit = spec.cluster.memory_limit
        key = "cluster.memory_limit" if limit is not None and budget == limit else "cluster.memory_fraction"
        check_limit(
            budget, plan.model_facts, spec.optim, on_gpu=plan.device.value == "cuda",  # type: ignore[union-attr]
            recomputed=bool(spec.loop.activation_checkpointing), key=key,
        )  # fmt: skip
