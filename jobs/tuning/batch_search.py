"""What a search over batch size and precision may try on the machines of a run: sizes, precisions, kinds of devices,
and loader processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.devices.inventory import Inventory, Node
from jobs.driver.check_job import Checked
from jobs.driver.planning import plan_job
from jobs.job.facts import resolved
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from raytrain.autotune.batch_space import BatchSpace, sizes_dividing, sizes_free
from raytrain.config.messages import render
from raytrain.errors import InputError
from raytrain.plan.facts import DataFacts
from raytrain.plan.machines import allowed_bytes, choose_devices, spread
from raytrain.plan.memory import check_limit
from raytrain.plan.plan import Plan

PLANNED_BATCH = 4096
"""Global batch to plan with at most if the search chooses the batch; large enough to keep every worker busy."""
SLIVER = 0.001
"""Fraction of Ray's `accelerator_type:*` resource that a trial reserves: it selects the node, and limits nothing."""


@dataclass(frozen=True)
class Kind:
    """Devices of one type. Each kind is searched separately, and Ray runs its trials on its devices.

    Attributes:
        name: Ray's accelerator type; "" if there is one kind only, or if Ray cannot tell the kinds apart.
        devices: concurrent measurements: one on each GPU, or on each node without GPUs.
        workers: the run's workers on this kind, possibly fewer than its devices.
        cores: CPU cores that a measurement on CPUs reserves: those of its node, so that no other one runs there.
        budget_bytes: memory budget of one process; None if unknown.
        device, device_bytes: name and memory of the device, for the cache key.
        required: Ray's accelerator type where `scale.accelerator` names one of several in the cluster; else "".
    """

    name: str
    devices: int
    workers: int
    cores: int
    budget_bytes: int | None
    device: str
    device_bytes: int
    required: str = ""

    def resources(self, *, on_gpu: bool, local: bool) -> dict[str, float]:
        """What Ray reserves for one trial."""
        own: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1 if local else self.cores}
        kind = self.name or self.required
        return own | ({f"accelerator_type:{kind}": SLIVER} if kind else {})


def find_kinds(spec: JobSpec, inventory: Inventory, *, workers: int, on_gpu: bool) -> tuple[Kind, ...]:
    """The kinds of devices that the workers of this job use, sorted by name. A single kind has no name, and so have
    kinds that Ray cannot tell apart.

    Raises:
        InputError: a machine has GPUs of different types, of which Ray would assign any to a trial.
    """
    machines = choose_devices(spec.scale, inventory, [])
    nodes = [node for node, _ in machines.pool] if on_gpu else [node for node in inventory.nodes if node.cpus > 0]
    names = sorted({node.accelerator for node in nodes})
    if len(names) < 2 or "" in names:
        return (_kind("", spec, inventory, nodes, workers=workers, on_gpu=on_gpu),)
    counts = spread(workers, machines, inventory)
    found = []
    for name in names:
        own = [node for node in nodes if node.accelerator == name]
        part = replace(inventory, nodes=tuple(own))
        there = sum(counts.get(host, 0) for host in {node.host for node in own})
        if there:  # a kind that the run does not use must not decide
            found.append(_kind(name, spec, part, own, workers=there, on_gpu=on_gpu))
    return tuple(found)


def _kind(name: str, spec: JobSpec, inventory: Inventory, nodes: Sequence[Node], *, workers: int, on_gpu: bool) -> Kind:
    machines = choose_devices(spec.scale, inventory, [])
    for node, devices in machines.pool:
        names = sorted({device.name for device in devices})
        if len(names) > 1:
            raise InputError(
                "scale.accelerator", got=f"{' and '.join(names)} on the machine {node.host}",
                expected="GPUs of one type per machine",
                remedy="Ray cannot tell GPUs of one machine apart; set scale.accelerator to the type to search on",
            )  # fmt: skip
    memory = min(((gpu.name, gpu.memory_bytes) for gpu in machines.gpus), key=lambda one: one[1], default=("", 0))
    asked = machines.accelerator.value
    device, size = memory if on_gpu else (" ".join(filter(None, (inventory.cpu_model, name))), 0)
    return Kind(
        name=name,
        devices=max(1, len(machines.gpus) if on_gpu else len(nodes)),
        workers=workers,
        cores=min((node.cpus for node in nodes), default=1),
        budget_bytes=allowed_bytes(spec.cluster, machines, inventory, workers=workers),
        device=device,
        device_bytes=size,
        required=asked if on_gpu and any(asked in node.accelerators for node in nodes) else "",
    )


@dataclass(frozen=True)
class LoaderSearch:
    """The counts of loader processes to try: 0 to `most` for each worker. If it is None, nothing is searched; `reason`
    says why.

    Attributes:
        job: keys of the trials' job: a single worker has more memory, and might cache rows that a run streams.
    """

    most: int | None
    reason: str = ""
    job: dict[str, str] = field(default_factory=dict)


def find_loaders(spec: JobSpec, plan: Plan, inventory: Inventory, facts: DataFacts) -> LoaderSearch:
    """The search space of `data.loader_workers: auto`: up to one process for each core of a worker."""
    storage, asked = str(plan.value("storage", "")), spec.data.loader_workers
    if asked != "auto":
        return LoaderSearch(None, f"{asked}, set by the job")
    if facts.kind != "items" or storage not in ("stream", "pinned"):
        why = "part of the rows is cached" if storage == "partial" else plan.loader_workers.reason  # type: ignore[union-attr]
        return LoaderSearch(None, f"not searched, {why}")
    counts = spread(int(plan.value("workers", 1)), choose_devices(spec.scale, inventory, []), inventory)
    shares = [node.cpus // counts[node.host] for node in inventory.nodes if counts.get(node.host)]
    if min(shares, default=1) < 1:
        return LoaderSearch(None, "not searched, since there are fewer cores than workers")
    return LoaderSearch(min(shares, default=1), job={"data.storage": storage})


@dataclass(frozen=True)
class BatchSearch:
    """What is searched, and for which run.

    Attributes:
        space: the candidates, for the kind of device with the least memory.
        kinds: the kinds of devices, each of which is searched separately.
        on_gpu: whether the run computes on GPUs.
        alone_spec: the job of a trial: one worker, experts in-process.
        alone_plan: its plan.
        loaders: how many processes may read the data.
    """

    space: BatchSpace
    kinds: tuple[Kind, ...]
    on_gpu: bool
    alone_spec: JobSpec
    alone_plan: Plan
    loaders: LoaderSearch

    @property
    def workers(self) -> int:
        """Of the run."""
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
    if micro == "whole" and free:
        raise InputError(
            "loop.micro_batch_size", got="whole with loop.global_batch_size auto",
            expected="auto, or a number for loop.global_batch_size",
            remedy="another global batch is another loss for a model that compares its rows; tune.space compares them",
        )  # fmt: skip
    facts: dict[str, Any] = {"model_facts": checked.model_facts, "data_facts": checked.data_facts}
    rows = checked.data_facts.train_rows
    planned = min(PLANNED_BATCH, rows)
    plan = plan_job(
        _with(loaded, {"loop.global_batch_size": planned} if free and planned else {}), inventory=inventory, **facts
    )
    on_gpu, workers = plan.value("device", "") == "cuda", int(plan.value("workers", 1))
    loaders = find_loaders(spec, plan, inventory, checked.data_facts)
    pinned = {"scale.workers": 1, "scale.threads": int(plan.value("threads", 0)), "scale.strategy": "auto",
              "experts.hosts": 0, "experts.replicas": 0, "loop.global_batch_size": min(2, planned),
              "loop.micro_batch_size": 1, "tune.space": None, "tune.found": None, **loaders.job}  # fmt: skip
    if plan.value("mode", "") == "multi_gpu":
        pinned["scale.mode"] = "single_gpu"
    alone = _with(loaded, pinned)
    if micro != "auto":
        sizes: tuple[int, ...] = (int(spec.loop.global_batch_size if micro == "whole" else micro),)
    else:
        sizes = sizes_free(rows, workers) if free else sizes_dividing(int(spec.loop.global_batch_size), workers)
    kinds = find_kinds(spec, inventory, workers=workers, on_gpu=on_gpu)
    budget = min((one.budget_bytes for one in kinds if one.budget_bytes is not None), default=None)
    if plan.model_facts is not None:  # refuse a model of which not even one row fits
        limit = spec.cluster.memory_limit
        key = "cluster.memory_limit" if limit is not None and budget == limit else "cluster.memory_fraction"
        recomputed = bool(spec.loop.activation_checkpointing)
        check_limit(budget, plan.model_facts, spec.optim, on_gpu=on_gpu, recomputed=recomputed, key=key)
    precisions = plan.precision.candidates
    space = BatchSpace(
        precisions=precisions,
        sizes=sizes,
        rows_per_step=None if free else math.ceil(int(spec.loop.global_batch_size) / workers),
        budget_bytes=budget,
        reference="fp32" if "fp32" in precisions else precisions[0],
        workers=workers,
        loaders=loaders.most,
    )
    return BatchSearch(
        space, kinds, on_gpu, resolved(alone.spec), plan_job(alone, inventory=inventory, **facts), loaders
    )


def _with(loaded: LoadedSpec, values: dict[str, Any]) -> LoadedSpec:
    return load_spec(mapping=loaded.mapping, overrides=[f"{key}={render(value)}" for key, value in values.items()])
