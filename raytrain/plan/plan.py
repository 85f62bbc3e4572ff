"""The plan: every `auto` of a job becomes one value with its reason, before anything is started.

`make_plan` is pure: sections, machines and facts in, a frozen `Plan` out. It imports neither torch nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from cluster.config import ClusterConfig
from cluster.devices.calibration import MachineRates
from cluster.devices.inventory import Inventory
from raytrain.config.sections import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    SaveConfig,
    ScaleConfig,
)
from raytrain.plan.choice import Choice, Deferred, Resolved, choice_from_json
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.rules.batch import (
    choose_batches,
    choose_global_batch,
    choose_length,
    choose_lr,
    choose_saving,
    choose_warmup,
    defer_micro_batch,
    one_worker_for_whole,
    rows_read,
)
from raytrain.plan.rules.devices import (
    DevicePool,
    choose_devices,
    choose_fp32_layers,
    choose_precision,
    share_gpus,
    warn_of_lesser_devices,
    warn_of_mixed_gpus,
)
from raytrain.plan.rules.fsdp import micro_batch_under_fsdp, precision_under_fsdp, refuse_unmeasured
from raytrain.plan.rules.hosts import (
    choose_hosts,
    choose_inflight,
    choose_overlap,
    choose_strategy,
    choose_sync_batchnorm,
    gpus_of_hosts,
    hosts_by_node,
    leave_gpus_to_hosts,
)
from raytrain.plan.rules.layouts import choose_layout
from raytrain.plan.rules.memory import (
    ShareOut,
    advise_activation_checkpointing,
    check_limit,
    estimate_bytes,
    reason_to_measure,
    warn_over_budget,
)
from raytrain.plan.rules.shares import choose_shares, splits
from raytrain.plan.rules.speed import choose_speed
from raytrain.plan.rules.step_time import predict_step
from raytrain.plan.rules.storage import DataRoom, choose_loaders, choose_storage, resident_bytes
from raytrain.plan.rules.workers import allowed_bytes, choose_placement, choose_threads, cores_of, count_workers, spread
from raytrain.plan.strategies import Strategy, StrategyInputs, strategies_of
from raytrain.plan.text import reason_of, value_text
from raytrain.runs.storage import join


@dataclass(frozen=True)
class Plan:
    """What a run will do; written to the run folder as plan.json and passed to the workers.

    Every choice is a `Resolved` or a `Deferred`, or None where it does not apply: `inflight` without remote experts,
    `overlap` where nothing can overlap, `best_saves` without evaluations, `compile`, `cudnn_benchmark` and
    `sync_batchnorm` where they are off, `processes_per_gpu` where each has a whole GPU, `shares` where equal shares are
    configured, `fp32_layers` where none is configured, `resident_rows` unless only a part of the rows is kept on the
    device. `warnings` lists each fall-back and each doubtful setting; `config` is the full configuration with its
    defaults, `sources` says where each dotted key of it came from (default, recipe, file, python or command line).
    `strategies` are the ways to distribute the job with their predicted times, the fastest first; empty where the sizes
    of the model are unknown.
    """

    mode: Choice
    device: Choice
    accelerator: Choice
    workers: Choice
    placement: Choice
    strategy: Choice
    backend: Choice
    processes_per_gpu: Choice | None = field(default=None, kw_only=True)
    overlap: Choice | None = field(default=None, kw_only=True)
    threads: Choice
    precision: Choice
    fp32_layers: Choice | None = field(default=None, kw_only=True)
    global_batch_size: Choice
    micro_batch_size: Choice
    accumulation: Choice
    effective_batch: Choice
    shares: Choice | None = field(default=None, kw_only=True)
    sync_batchnorm: Choice | None = field(default=None, kw_only=True)
    steps_per_epoch: Choice
    max_steps: Choice
    warmup_steps: Choice
    lr: Choice
    optimizer_impl: Choice
    compile: Choice | None = field(default=None, kw_only=True)
    cudnn_benchmark: Choice | None = field(default=None, kw_only=True)
    eval_every: Choice
    checkpoint_every: Choice
    best_saves: Choice | None = field(default=None, kw_only=True)
    export: Choice | None = field(default=None, kw_only=True)
    storage: Choice
    resident_rows: Choice | None = field(default=None, kw_only=True)
    loader_workers: Choice | None = field(default=None, kw_only=True)
    hosts: Choice
    inflight: Choice | None = field(default=None, kw_only=True)
    experts: Choice
    deterministic: Choice
    parameters: Choice
    memory: Choice
    host_memory: Choice
    step_time: Choice
    checkpoint_bytes: Choice
    files: Choice
    warnings: list[str] = field(default_factory=list)
    strategies: tuple[Strategy, ...] = ()
    model_facts: ModelFacts | None = None
    data_facts: DataFacts | None = None
    inventory: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def choices(self) -> dict[str, Choice]:
        """The decisions by name, in the order of the table."""
        named = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in named if isinstance(value, Resolved | Deferred)}

    def value(self, name: str, default: Any) -> Any:
        """The value of a choice; `default` where it is deferred to a measurement or does not apply to this job."""
        choice = self.choices().get(name)
        return default if choice is None else choice.value_or(default)

    @property
    def per_gpu(self) -> int:
        """The number of processes that share each GPU."""
        return self.value("processes_per_gpu", 1)

    @property
    def gpu_share(self) -> float:
        """The part of a GPU that Ray reserves for a worker or an expert host."""
        return 1 if self.per_gpu == 1 else math.floor(1e4 / self.per_gpu) / 1e4  # Ray counts in ten-thousandths

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, reason) of each decision, as text for a table; decisions that do not apply are left out."""
        known = ((n, c) for n, c in self.choices().items() if c.value_or(True) is not None)
        return [(name, value_text(name, choice), reason_of(choice)) for name, choice in known]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; `Plan.from_json` of it equals this plan."""
        return {
            "choices": {name: choice.to_json() for name, choice in self.choices().items()},
            "warnings": list(self.warnings),
            "strategies": [one.to_json() for one in self.strategies],
            "model_facts": self.model_facts.to_json() if self.model_facts else None,
            "data_facts": self.data_facts.to_json() if self.data_facts else None,
            "inventory": self.inventory,
            "config": self.config,
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        model, data = record["model_facts"], record["data_facts"]
        return cls(
            **{name: choice_from_json(row) for name, row in record["choices"].items()},
            warnings=list(record["warnings"]),
            strategies=tuple(map(Strategy.from_json, record.get("strategies", ()))),  # older runs have none
            model_facts=ModelFacts.from_json(model) if model else None,
            data_facts=DataFacts(**data) if data else None,
            inventory=dict(record["inventory"]),
            config=dict(record["config"]),
            sources=dict(record["sources"]),
        )


def make_plan(
    *, model: ModelConfig, data: DataConfig, optim: OptimConfig, precision: PrecisionConfig, loop: LoopConfig,
    save: SaveConfig, scale: ScaleConfig, experts_hosts: Any, experts_inflight: Any, cluster: ClusterConfig, seed: int,
    inventory: Inventory, model_facts: ModelFacts | None, data_facts: DataFacts | None, name: str = "run",
    share_out: ShareOut | None = None, compile_missing: str | None = None, measured: MachineRates | None = None,
) -> Plan:  # fmt: skip
    """Decides everything that can be decided before the start. Pure: the same arguments give the same plan.

    `experts_hosts` is None for a dense model, facts where only the run knows them, `measured` (the machines' rates)
    where they are assumed. Raises InputError, naming the key, for what these machines or this data cannot provide.
    """
    warnings, total = list[str](), choose_global_batch(loop, data_facts)
    scale, why_one = one_worker_for_whole(scale, loop)
    machines = share_gpus(scale, choose_devices(scale, inventory, warnings), experts_hosts, warnings)
    alone = count_workers(scale, machines, inventory, global_batch=total, warnings=warnings)
    alone = replace(alone, reason=why_one or alone.reason)
    inputs = StrategyInputs(
        model_facts, data_facts, optim, precision, loop, scale, cluster, machines, inventory, rows=total,
        measured=measured, share_out=share_out,
    )  # fmt: skip
    auto = partial(_auto_hosts, inputs, workers=alone.value)
    workers, hosts = _workers_and_hosts(experts_hosts, scale, machines, inventory, alone=alone, auto=auto)
    left = machines.without(gpus_of_hosts(hosts.value, machines, inventory))
    choices = _machine_choices(scale, precision, cluster, machines, left, inventory, workers, hosts, warnings)
    length = choose_length(loop, global_batch=total, data_facts=data_facts, drop_last=data.drop_last)
    parts = splits(scale, workers=workers.value, hosts=hosts)
    batches = choose_batches(loop, workers=workers.value, warnings=warnings, splits=parts)
    inflight = choose_inflight(experts_inflight, loop, hosts=hosts, batches=batches, warnings=warnings)
    sharded, allowed = scale.strategy == "fsdp", allowed_bytes(cluster, left, inventory, workers=workers.value)
    again, rows = bool(loop.activation_checkpointing), _rows_kept(batches, inflight)
    estimate = partial(
        estimate_bytes, model_facts, optim, precision=choices["precision"], micro=rows, on_gpu=machines.on_gpu,
        workers=workers.value, hosts=hosts, share_out=share_out, sharded=sharded, recomputed=again, data=data_facts,
    )  # fmt: skip
    one_row, shards = estimate(resident=0, micro=1)["memory"], workers.value if sharded else 1
    limited = {"on_gpu": machines.on_gpu, "hosts": hosts, "one_row": one_row, "recomputed": again, "shards": shards}
    check_limit(cluster.memory_limit, model_facts, optim, **limited)
    kept, estimates = _data_choices(
        data, data_facts, model_facts, allowed, estimate, (spread(workers.value, left, inventory), cores_of(inventory)),
        warnings, on_gpu=machines.on_gpu, reads=rows_read(loop),
    )  # fmt: skip
    doubt = reason_to_measure(model_facts, estimates["memory"], allowed, on_gpu=machines.on_gpu)
    fixed = sharded or "sync_batchnorm" in choices
    updated = micro_batch_under_fsdp(loop, batches) if fixed else defer_micro_batch(loop, batches, doubt=doubt)
    warnings += warn_over_budget(allowed, estimates["memory"], one_row, measured=not fixed and updated is not batches)
    warnings += advise_activation_checkpointing(model_facts, estimates["memory"], allowed, loop, rows=rows)
    known: dict[str, Choice] = {**choices, **batches, **estimates}
    fraction = cluster.memory_fraction
    shares = choose_shares(scale, loop, left, inventory, known, hosts=hosts, facts=model_facts, fraction=fraction)
    known |= {} if shares is None else {"shares": shares}
    return Plan(
        **choices, **updated, **length, **estimates, shares=shares,
        fp32_layers=choose_fp32_layers(precision, choices["precision"], warnings),
        global_batch_size=Resolved(total, "loop.global_batch_size"),
        warmup_steps=choose_warmup(optim, length["max_steps"], warnings), lr=choose_lr(optim, global_batch=total),
        **choose_speed(
            loop, optim, machines, choices["strategy"], max_steps=length["max_steps"], missing=compile_missing,
            warnings=warnings,
        ),
        **choose_saving(save, loop, length, data_facts=data_facts, hosts=hosts, shards=shards),
        **kept, hosts=hosts, inflight=inflight, warnings=warnings, model_facts=model_facts, data_facts=data_facts,
        deterministic=Resolved(loop.deterministic, f"loop.deterministic; seed {seed}"), inventory=inventory.to_json(),
        files=Resolved(join(save.dir, f"{name}-<UTC stamp>"), "save.dir and name"), sources={}, config={},
        **_predictions(inputs, known, workers, hosts, asked_hosts=experts_hosts, kept=kept),
    )  # fmt: skip


def _predictions(
    inputs: StrategyInputs, choices: Mapping[str, Choice], workers: Resolved, hosts: Resolved, *, asked_hosts: Any,
    kept: Mapping[str, Choice],
) -> dict[str, Any]:  # fmt: skip
    """step_time as planned, and the strategies; `kept` is the choice of data storage."""
    loop, scale = inputs.loop, inputs.scale
    spent = predict_step(
        inputs.facts, inputs.machines, inputs.inventory, choices, hosts=hosts, measured=inputs.measured,
        recomputed=bool(loop.activation_checkpointing), threads=scale.threads,
    )  # fmt: skip
    found = strategies_of(
        inputs, planned=(hosts.value, workers.value, scale.strategy == "fsdp"), workers=workers,
        asked_hosts=asked_hosts, step_time=spent, resident=resident_bytes(inputs.data, kept),
    )  # fmt: skip
    return {"step_time": spent, "strategies": found}


def _workers_and_hosts(
    requested: Any, scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, alone: Resolved,
    auto: Callable[[], Resolved],
) -> tuple[Resolved, Resolved]:  # fmt: skip
    """The numbers of workers and of expert hosts; `alone` are the workers without hosts, `auto` what `auto` means."""
    chosen = auto() if requested == "auto" and scale.strategy not in ("data_parallel", "fsdp") else None
    requested = requested if chosen is None else chosen.value
    workers = leave_gpus_to_hosts(alone, requested, scale, machines, inventory)
    hosts = choose_hosts(requested, scale, machines, inventory, workers=workers.value)
    return workers, hosts if chosen is None else Resolved(hosts.value, chosen.reason)


def _auto_hosts(inputs: StrategyInputs, *, workers: int) -> Resolved:
    """What `experts.hosts: auto` means: a value of the key, with its reason."""
    return choose_layout(
        inputs.facts, inputs.scale, inputs.loop, inputs.precision_of(sharded=False), inputs.machines, inputs.inventory,
        workers=workers, rows=inputs.rows, measured=inputs.measured,
        fits=lambda hosts, processes: inputs.memory(hosts, processes)[2] is not False,
    )  # fmt: skip


def _machine_choices(
    scale: ScaleConfig, precision: PrecisionConfig, cluster: ClusterConfig, machines: DevicePool, left: DevicePool,
    inventory: Inventory, workers: Resolved, hosts: Resolved, warnings: list[str],
) -> dict[str, Choice]:  # fmt: skip
    """Choices that depend only on the machines and the number of workers; `left` excludes the GPUs of expert hosts."""
    warnings += warn_of_lesser_devices(cluster, machines, inventory)
    if scale.shares == "equal":
        warn_of_mixed_gpus(left, warnings)
    refuse_unmeasured(scale, precision)
    by_device = choose_precision(precision, machines, inventory, warnings)
    counts = spread(workers.value, left, inventory)
    other_processes = hosts_by_node(hosts, counts, machines, inventory)
    overlap = choose_overlap(scale, hosts, workers=workers.value, warnings=warnings)
    synced = choose_sync_batchnorm(scale, hosts, workers=workers.value, warnings=warnings)
    why_gloo = "through the host, as NCCL refuses two processes on one GPU" if machines.on_gpu else "CPU tensors"
    shared = f"scale.gpus_per_worker: {machines.per_gpu} processes share each GPU, for development; slower than one"
    whole = machines.per_gpu == 1
    return {
        "mode": machines.mode,
        "device": machines.device,
        "accelerator": machines.accelerator,
        "workers": workers,
        "placement": choose_placement(counts, machines),
        "strategy": choose_strategy(scale, hosts, workers=workers.value),
        "backend": Resolved("nccl", "GPUs") if whole and machines.on_gpu else Resolved("gloo", why_gloo),
        **({} if whole else {"processes_per_gpu": Resolved(machines.per_gpu, shared)}),
        **({} if overlap is None else {"overlap": overlap}),
        **({} if synced is None else {"sync_batchnorm": synced}),
        "threads": choose_threads(scale, counts, machines, inventory, warnings, other_processes=other_processes),
        "precision": precision_under_fsdp(scale, by_device, on_gpu=machines.on_gpu),
    }


def _data_choices(
    data: DataConfig, facts: DataFacts | None, model_facts: ModelFacts | None, allowed: int | None,
    estimate: Callable[..., dict[str, Choice]], spread_out: tuple[Mapping[str, int], Mapping[str, int]],
    warnings: list[str], *, on_gpu: bool, reads: int | None,
) -> tuple[dict[str, Choice], dict[str, Choice]]:  # fmt: skip
    """(storage, loader_workers, and resident_rows where a part of the rows is kept; the estimates including that data).
    `estimate` takes the bytes of resident data; `spread_out` is (workers, cores) of each node."""
    model_bytes = estimate(resident=0)["memory"]
    whole = model_facts is not None and model_facts.activation_bytes_per_sample is not None
    known = model_bytes.value_or(None)
    room = DataRoom(allowed, model_bytes=known, whole=whole, on_gpu=on_gpu)
    counts, cores = spread_out
    loaders = choose_loaders(data, facts=facts, counts=counts, cores=cores, warnings=warnings)
    kept = choose_storage(data, facts=facts, room=room, loaders=loaders, warnings=warnings, reads=reads)
    if kept["storage"].value_or(None) == "resident" and loaders.value_or(None) != 0:
        loaders = Resolved(0, "rows are kept in memory")
    return {**kept, "loader_workers": loaders}, estimate(resident=resident_bytes(facts, kept))


def _rows_kept(batches: dict[str, Resolved], inflight: Choice | None) -> int:
    """Rows whose activations a worker keeps at the same time: those of each micro-batch in flight."""
    most = 1 if inflight is None or inflight.value_or(2) == 1 else 2
    return batches["micro_batch_size"].value * min(most, batches["accumulation"].value)
