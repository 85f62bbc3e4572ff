"""The plan: every `auto` of a job becomes one value with its reason, before anything is started.

`make_plan` is pure: `PlanInputs` in, a frozen `Plan` out. It imports neither torch nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from cluster.config import ClusterConfig
from cluster.devices.inventory import Inventory
from raytrain.config.sections import DataConfig, LoopConfig, OptimConfig, PrecisionConfig, SaveConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan import batch, expert_hosts, memory, speed
from raytrain.plan import machines as devices
from raytrain.plan.choice import Choice, Deferred, Resolved, reason_of, value_text
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.machines import DevicePool, allowed_bytes, spread
from raytrain.plan.shares import choose_shares, splits
from raytrain.runs.storage import join


@dataclass(frozen=True)
class Plan:
    """What a run will do; written to the run folder as plan.json and passed to the workers.

    Every choice is a `Resolved` or a `Deferred`, or None where it does not apply. `warnings` lists each fall-back and
    each doubtful setting; `config` is the full configuration with its defaults, `sources` says where each dotted key of
    it came from (default, recipe, file, python or command line).
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
    checkpoint_bytes: Choice
    files: Choice
    warnings: list[str] = field(default_factory=list)
    model_facts: ModelFacts | None = None
    data_facts: DataFacts | None = None
    inventory: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def choices(self) -> dict[str, Choice]:
        named = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in named if isinstance(value, Resolved | Deferred)}

    def value(self, name: str, default: Any) -> Any:
        """The value of a choice; `default` where it is deferred to a measurement or does not apply to this job."""
        choice = self.choices().get(name)
        return default if choice is None else choice.value_or(default)

    @property
    def per_gpu(self) -> int:
        return self.value("processes_per_gpu", 1)

    @property
    def gpu_share(self) -> float:
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
            "model_facts": self.model_facts.to_json() if self.model_facts else None,
            "data_facts": self.data_facts.to_json() if self.data_facts else None,
            "inventory": self.inventory,
            "config": self.config,
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote; choices of older runs that are no longer made are left out."""
        model, data = record["model_facts"], record["data_facts"]
        names = {item.name for item in fields(cls)}
        made = {name: row for name, row in record["choices"].items() if name in names}
        return cls(
            **{name: (Deferred if "how" in row else Resolved).from_json(row) for name, row in made.items()},
            warnings=list(record["warnings"]),
            model_facts=ModelFacts.from_json(model) if model else None,
            data_facts=DataFacts.from_json(data) if data else None,
            inventory=dict(record["inventory"]),
            config=dict(record["config"]),
            sources=dict(record["sources"]),
        )


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    data: DataConfig
    optim: OptimConfig
    precision: PrecisionConfig
    loop: LoopConfig
    save: SaveConfig
    scale: ScaleConfig
    cluster: ClusterConfig
    experts_hosts: Any  # None for a dense model
    experts_inflight: Any
    seed: int
    inventory: Inventory
    model_facts: ModelFacts | None  # None where only the run knows them
    data_facts: DataFacts | None
    name: str = "run"
    share_out: memory.ShareOut | None = None  # None where the sizes of the experts are unknown
    compile_missing: str | None = None  # why the driver's machine cannot compile

    @property
    def sharded(self) -> bool:
        return self.scale.strategy == "fsdp"

    @property
    def recomputed(self) -> bool:
        return bool(self.loop.activation_checkpointing)

    def estimate(
        self, machines: DevicePool, precision: Choice, *, workers: int, hosts: Resolved, rows: int, resident: int = 0
    ) -> dict[str, Choice]:
        """`estimate_bytes` of this job, with `rows` whose activations a worker keeps at the same time."""
        return memory.estimate_bytes(
            self.model_facts, self.optim, precision=precision, micro=rows, resident=resident, on_gpu=machines.on_gpu,
            workers=workers, hosts=hosts, share_out=self.share_out, sharded=self.sharded, recomputed=self.recomputed,
        )  # fmt: skip

    def fits(self, machines: DevicePool, precision: Choice, hosts: Any, workers: int) -> bool:
        """Whether a layout of the experts is within what `cluster.memory_fraction` and `memory_limit` allow, by the
        estimate; True where that is unknown."""
        own, theirs = expert_hosts.divided_pools(machines, hosts, self.inventory)
        given = self.loop.micro_batch_size
        # an `auto` micro-batch is made as small as the memory needs
        rows = 1 if given == "auto" else batch.choose_global_batch(self.loop, None) if given == "whole" else given
        found = self.estimate(machines, precision, workers=workers, hosts=Resolved(hosts, ""), rows=rows)
        needed, of_host = (found[name].value_or(None) or 0 for name in ("memory", "host_memory"))
        allowed = allowed_bytes(self.cluster, own, self.inventory, workers=workers)
        if not machines.on_gpu:  # all processes of a node share its memory
            return allowed is None or needed + of_host * expert_hosts.number_of_hosts(hosts) // workers <= allowed
        room = allowed_bytes(self.cluster, theirs, self.inventory, workers=1)
        return (allowed is None or needed <= allowed) and (room is None or of_host <= room)


def make_plan(inputs: PlanInputs) -> Plan:
    """Decides everything that can be decided before the start. Pure: the same inputs give the same plan. Raises
    InputError: these machines or this data cannot provide what the job asks for; names the key."""
    loop, optim, cluster, inventory = inputs.loop, inputs.optim, inputs.cluster, inputs.inventory
    model_facts, data_facts = inputs.model_facts, inputs.data_facts
    warnings, total = list[str](), batch.choose_global_batch(loop, data_facts)
    scale, why_one = batch.one_worker_for_whole(inputs.scale, loop)
    inputs = replace(inputs, scale=scale)

    machines = devices.share_gpus(
        scale, devices.choose_devices(scale, inventory, warnings), inputs.experts_hosts, warnings
    )
    alone = devices.count_workers(scale, machines, inventory, global_batch=total, warnings=warnings)
    alone = replace(alone, reason=why_one or alone.reason)
    requested, why_hosts = inputs.experts_hosts, None
    if requested == "auto" and scale.strategy not in ("data_parallel", "fsdp"):
        fits = partial(inputs.fits, machines, devices.choose_precision(inputs.precision, machines, inventory, []))
        chosen = expert_hosts.choose_auto_hosts(model_facts, scale, machines, workers=alone.value, fits=fits)
        requested, why_hosts = chosen.value, chosen.reason
    workers = expert_hosts.leave_gpus_to_hosts(alone, requested, scale, machines, inventory)
    hosts = expert_hosts.choose_hosts(requested, scale, machines, inventory, workers=workers.value)
    hosts = replace(hosts, reason=why_hosts or hosts.reason)
    left = machines.without(expert_hosts.gpus_of_hosts(hosts.value, machines, inventory))
    choices = _machine_choices(inputs, machines, left, workers, hosts, warnings)
    precision = choices["precision"]

    length = batch.choose_length(loop, global_batch=total, data_facts=data_facts, drop_last=inputs.data.drop_last)
    parts = splits(scale, workers=workers.value, hosts=hosts)
    batches = batch.choose_batches(loop, workers=workers.value, warnings=warnings, splits=parts)
    inflight = expert_hosts.choose_inflight(
        inputs.experts_inflight, loop, hosts=hosts, batches=batches, warnings=warnings
    )

    # Rows whose activations a worker keeps at the same time: those of each micro-batch in flight.
    most = 1 if inflight is None else inflight.value
    rows = batches["micro_batch_size"].value * min(most, batches["accumulation"].value)
    estimate = partial(inputs.estimate, machines, precision, workers=workers.value, hosts=hosts)
    one_row, shards = estimate(rows=1)["memory"], workers.value if inputs.sharded else 1
    memory.check_limit(
        cluster.memory_limit, model_facts, optim, on_gpu=machines.on_gpu, hosts=hosts, one_row=one_row,
        recomputed=inputs.recomputed, shards=shards,
    )  # fmt: skip
    allowed = allowed_bytes(cluster, left, inventory, workers=workers.value)
    whole = model_facts is not None and model_facts.activation_bytes_per_sample is not None
    model_bytes = estimate(rows=rows)["memory"].value_or(None)
    room = batch.DataRoom(allowed, model_bytes=model_bytes, whole=whole, on_gpu=left.on_gpu)
    counts, cores = spread(workers.value, left, inventory), devices.cores_of(inventory)
    loaders = batch.choose_loaders(inputs.data, facts=data_facts, counts=counts, cores=cores, warnings=warnings)
    reads = None  # for a run of whole epochs
    if loop.max_steps is not None and loop.global_batch_size != "auto":
        reads = loop.max_steps * loop.global_batch_size
    kept = batch.choose_storage(
        inputs.data, facts=data_facts, room=room, loaders=loaders, warnings=warnings, reads=reads
    )
    if kept["storage"].value_or(None) == "resident" and loaders.value_or(None) != 0:
        loaders = Resolved(0, "rows are kept in memory")
    kept["loader_workers"] = loaders
    estimates = estimate(rows=rows, resident=batch.resident_bytes(data_facts, kept))
    doubt = memory.reason_to_measure(model_facts, estimates["memory"], allowed, on_gpu=machines.on_gpu)
    fixed = inputs.sharded or "sync_batchnorm" in choices
    updated = (
        memory.micro_batch_under_fsdp(loop, batches) if fixed else batch.defer_micro_batch(loop, batches, doubt=doubt)
    )
    warnings += memory.warn_over_budget(
        allowed, estimates["memory"], one_row, measured=not fixed and updated is not batches
    )
    warnings += memory.advise_activation_checkpointing(model_facts, estimates["memory"], allowed, loop, rows=rows)

    save = inputs.save
    eval_every = batch.choose_eval_every(loop, data_facts=data_facts, **length)
    measured = Deferred(
        "set from the measured cost of the first checkpoint", (1, length["max_steps"].value_or(None)),
        "30 s of work lie between two, more where saving takes over 3 % of the time",
    )  # fmt: skip
    known: dict[str, Any] = {**choices, **updated, **length, **estimates, **kept}
    return Plan(
        **known,
        shares=choose_shares(scale, loop, left, inventory, {**choices, **batches}, hosts=hosts),
        fp32_layers=devices.choose_fp32_layers(inputs.precision, precision, warnings),
        global_batch_size=Resolved(total, "loop.global_batch_size"),
        warmup_steps=batch.choose_warmup(optim, length["max_steps"], warnings),
        lr=batch.choose_lr(optim, global_batch=total),
        optimizer_impl=speed.choose_optimizer_kernels(optim, machines, choices["strategy"]),
        compile=speed.choose_compile(
            loop, choices["strategy"], steps=length["max_steps"].value_or(None), on_gpu=machines.on_gpu,
            missing=inputs.compile_missing, warnings=warnings,
        ),
        cudnn_benchmark=speed.choose_cudnn_benchmark(loop, machines),
        eval_every=eval_every,
        checkpoint_every=measured if save.every == "auto" else Resolved(save.every, "save.every"),
        best_saves=batch.choose_best_saves(save, eval_every, shared=shards > 1 or hosts.value not in ("none", 0)),
        export=batch.choose_export(save, loop, data_facts=data_facts),
        hosts=hosts, inflight=inflight, warnings=warnings, model_facts=model_facts, data_facts=data_facts,
        deterministic=Resolved(loop.deterministic, f"loop.deterministic; seed {inputs.seed}"),
        files=Resolved(join(save.dir, f"{inputs.name}-<UTC stamp>"), "save.dir and name"),
        inventory=inventory.to_json(),
    )  # fmt: skip


def _machine_choices(
    inputs: PlanInputs, machines: DevicePool, left: DevicePool, workers: Resolved, hosts: Resolved, warnings: list[str]
) -> dict[str, Choice]:
    """Choices that depend only on the machines and the number of workers; `left` excludes the GPUs of expert hosts."""
    scale, inventory = inputs.scale, inputs.inventory
    warnings += devices.warn_of_lesser_devices(inputs.cluster, machines, inventory)
    if scale.shares == "equal":
        names = sorted({gpu.name for gpu in left.gpus})
        if len(names) > 1:
            warnings.append(
                f"GPUs of {len(names)} kinds ({', '.join(names)}): each step waits for the slowest;"
                " scale.shares auto gives the faster ones more, scale.accelerator picks one kind"
            )
    if scale.strategy == "fsdp" and inputs.precision.fp32_layers == "auto":
        raise InputError(
            "precision.fp32_layers", got="auto with scale.strategy fsdp", expected="a list of layers, or null",
            remedy=memory.UNMEASURED,
        )  # fmt: skip
    precision = devices.choose_precision(inputs.precision, machines, inventory, warnings)
    if scale.strategy == "fsdp" and isinstance(precision, Deferred):  # the device alone decides
        if machines.on_gpu and "bf16" in precision.bounds and precision.reason.startswith("CUDA"):
            precision = Resolved("bf16", f"{precision.reason}; {memory.UNMEASURED}")
        else:
            why = f"{memory.UNMEASURED}; set precision.dtype {precision.bounds[0]} for half precision"
            precision = Resolved("fp32", why)
    counts = spread(workers.value, left, inventory)
    other_processes = expert_hosts.hosts_by_node(hosts, counts, machines, inventory)
    whole = machines.per_gpu == 1
    nccl = whole and machines.on_gpu
    overlap = expert_hosts.choose_overlap(scale, hosts, workers=workers.value, nccl=nccl, warnings=warnings)
    synced = expert_hosts.choose_sync_batchnorm(scale, hosts, workers=workers.value, warnings=warnings)
    why_gloo = "through the host, as NCCL refuses two processes on one GPU" if machines.on_gpu else "CPU tensors"
    shared = f"scale.gpus_per_worker: {machines.per_gpu} processes share each GPU, for development; slower than one"
    return {
        "mode": machines.mode,
        "device": machines.device,
        "accelerator": machines.accelerator,
        "workers": workers,
        "placement": Resolved("PACK" if machines.on_gpu or len(counts) == 1 else "SPREAD", devices.where_text(counts)),
        "strategy": expert_hosts.choose_strategy(scale, hosts, workers=workers.value),
        "backend": Resolved("nccl", "GPUs") if nccl else Resolved("gloo", why_gloo),
        **({} if whole else {"processes_per_gpu": Resolved(machines.per_gpu, shared)}),
        **({} if overlap is None else {"overlap": overlap}),
        **({} if synced is None else {"sync_batchnorm": synced}),
        "threads": devices.choose_threads(
            scale, counts, machines, inventory, warnings, other_processes=other_processes
        ),
        "precision": precision,
    }
