"""The search over batch size and precision on the driver: what may be tried, what is known already, the trials, the
answer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from cluster.inventory import Inventory, inventory_from_ray
from jobs.driver import Checked, train_job
from jobs.plan import has_experts, plan_job, resolve_paths
from jobs.runtime import Cluster, connected
from jobs.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.batch_results import write_batch
from jobs.tuning.cache import FOLDER, Cache
from jobs.tuning.command import show_only_picked
from jobs.tuning.table import BATCH_COLUMNS, SweepTable
from raytrain.decode import encode
from raytrain.errors import InputError
from raytrain.expected import render
from raytrain.plan import Deferred, Plan
from raytrain.planning.machines import choose_machines
from raytrain.planning.memory import check_limit
from raytrain.planning.values import size_text
from raytrain.planning.workers import worker_room
from raytrain.search.measurement import Candidate
from raytrain.search.signature import make_signature
from raytrain.search.space import BatchSpace, sizes_dividing, sizes_free
from raytrain.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from jobs.tuning.command import TuneCommand

PLANNED_BATCH = 4096
"""At most so large a global batch is planned with where the search is to find it: no worker is left out for it."""


LEAVE_S = 10.0
"""Trials leave within so many seconds after a signal."""


@dataclass(frozen=True)
class BatchSearch:
    """What is searched, and for which run.

    Attributes:
        space: the candidates.
        plan: of the run itself.
        alone_spec: the job of a trial: one worker, experts in-process.
        alone_plan: its plan.
    """

    space: BatchSpace
    plan: Plan
    alone_spec: JobSpec
    alone_plan: Plan

    @property
    def on_gpu(self) -> bool:
        return self.plan.device.value == "cuda"  # type: ignore[union-attr]

    @property
    def workers(self) -> int:
        return self.space.workers


def find_search(loaded: LoadedSpec, checked: Checked, inventory: Inventory) -> BatchSearch:
    """What a search without `tune.space` may try on these machines.

    Raises:
        InputError: nothing is left open, or the model alone is larger than a process may be.
    """
    spec = loaded.spec
    free = spec.loop.global_batch_size == "auto"
    dtype, micro = spec.precision.dtype, spec.loop.micro_batch_size
    if dtype != "auto" and micro != "auto" and not free:
        raise InputError("tune", seen=f"precision.dtype {dtype} and loop.micro_batch_size {micro}, both given",
                         expected="one of them auto, or keys to try in tune.space")
    if spec.tune.objective == "goodput" and not free:
        raise InputError("tune.objective", seen="goodput with a global batch that is given",
                         expected="throughput, or loop.global_batch_size: auto")
    facts: dict[str, Any] = {"model_facts": checked.model_facts, "data_facts": checked.data_facts}
    planned = min(PLANNED_BATCH, checked.data_facts.train_rows)
    given = {"loop.global_batch_size": planned} if free and planned else {}
    plan = plan_job(_with(loaded, given), inventory=inventory, **facts)
    workers, threads = int(plan.workers.value), int(plan.threads.value)  # type: ignore[union-attr]
    pinned = {"scale.workers": 1, "scale.threads": threads, "scale.strategy": "auto", "experts.hosts": 0,
              "experts.replicas": 0, "loop.global_batch_size": min(2, planned), "loop.micro_batch_size": 1,
              "tune.space": None, "tune.found": None}  # fmt: skip
    if plan.mode.value == "multi_gpu":  # type: ignore[union-attr]
        pinned["scale.mode"] = "single_gpu"
    alone = _with(loaded, pinned)
    precisions = tuple(plan.precision.bounds) if isinstance(plan.precision, Deferred) else (str(plan.precision.value),)
    reference = "fp32" if "fp32" in precisions else precisions[0]
    if micro != "auto":
        sizes: tuple[int, ...] = (int(micro),)
    elif free:
        sizes = sizes_free(checked.data_facts.train_rows, workers)
    else:
        sizes = sizes_dividing(int(spec.loop.global_batch_size), workers)
    budget = budget_of(spec, inventory, workers=workers)
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
    alone_spec = alone.spec.model_copy(update={"data": resolve_paths(alone.spec.data)})
    return BatchSearch(space, plan, alone_spec, plan_job(alone, inventory=inventory, **facts))


def _with(loaded: LoadedSpec, values: dict[str, Any]) -> LoadedSpec:
    return load_spec(mapping=loaded.mapping, overrides=[f"{key}={render(value)}" for key, value in values.items()])


def budget_of(spec: JobSpec, inventory: Inventory, *, workers: int) -> int | None:
    """Bytes that each process of the run may take; None where nobody knows."""
    machines = choose_machines(spec.scale, inventory, [])
    return worker_room(spec.cluster, machines, inventory, workers=workers)


def _check_budget(plan: Plan, spec: JobSpec, budget: int | None) -> None:
    """A model of which not even one row fits into what a process may take is refused now."""
    if plan.model_facts is not None:
        limit = spec.cluster.memory_limit
        key = "cluster.memory_limit" if limit is not None and budget == limit else "cluster.memory_fraction"
        check_limit(
            budget, plan.model_facts, spec.optim, on_gpu=plan.device.value == "cuda",  # type: ignore[union-attr]
            recomputed=spec.loop.activation_checkpointing, key=key,
        )  # fmt: skip


def run_batch(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Search, and write what was found.

    Raises:
        InputError, RunError, Interrupted.
    """
    if address == "local":
        search = find_search(command.loaded, checked, inventory)
        cache = _begin(command, search, checked, inventory)
        gpus = devices_of(command.spec, search, inventory) if search.on_gpu else 0
        if not cache.answers(search.space):
            show_only_picked(command.spec, inventory)
            with connected(address, num_cpus=1 + max(1, gpus), num_gpus=gpus, verbose=command.verbose) as cluster:
                command.signals.install()
                _try(command, search, checked, cluster, inventory, cache)
    else:
        with connected(address, num_cpus=0, num_gpus=0, verbose=command.verbose) as cluster:
            command.signals.install()
            inventory = inventory_from_ray()
            search = find_search(command.loaded, checked, inventory)
            cache = _begin(command, search, checked, inventory)
            if not cache.answers(search.space):
                _try(command, search, checked, cluster, inventory, cache)
    write_batch(command, search, cache)
    return command.the_sweep


def _begin(command: TuneCommand, search: BatchSearch, checked: Checked, inventory: Inventory) -> Cache:
    """The sweep's folder, and what earlier searches have left."""
    command.open_sweep(inventory)
    spec = command.spec
    cache = Cache(
        f"{spec.save.dir.rstrip('/')}/{FOLDER}",
        cache_key(spec, search, checked),
        budget=search.space.budget_bytes,
        fresh=spec.tune.fresh,
    )
    if command.the_sweep.ended():
        for row in command.the_sweep.ended():
            cache.known.add(row)
    elif cache.answers(search.space):
        command.say(f"nothing is left to measure: {len(cache.rows)} measurements of an earlier search hold here")
        command.say(f"  {cache.path}; --fresh measures anew; sweep folder {command.the_sweep.path}")
    elif cache.rows:
        command.say(f"{len(cache.rows)} measurements of an earlier search hold here; --fresh measures anew")
    return cache


def cache_key(spec: JobSpec, search: BatchSearch, checked: Checked) -> dict[str, Any]:
    """All that a measurement depends on, as far as the driver knows it, and nothing else: neither the global batch nor
    the budget."""
    data, nodes = checked.data_facts, search.plan.inventory["nodes"]
    devices = [(row["name"], row["memory_bytes"]) for node in nodes for row in node["devices"]] if search.on_gpu else []
    device, memory = min(devices, key=lambda one: one[1], default=(search.plan.inventory["cpu_model"], 0))
    signature = make_signature(
        model=search.alone_spec.model,
        optim=spec.optim,
        loop=spec.loop,
        experts=search.alone_spec.experts if has_experts(spec) else None,
        parameters=checked.model_facts.parameters,
        longest_row=data.tokens_per_row or data.row_bytes,
        device=device,
        device_bytes=memory,
        threads=int(search.alone_plan.threads.value),  # type: ignore[union-attr]
        workers=search.workers,
        versions={name: metadata.version(name) for name in ("torch", "raytrain")},
    )
    return {**signature.facts, "data": encode(search.alone_spec)["data"]}


def _try(
    command: TuneCommand, search: BatchSearch, checked: Checked, cluster: Cluster, inventory: Inventory, cache: Cache
) -> None:
    import ray
    from ray import cloudpickle, tune

    from jobs.tuning.batch import BatchOrders, batch_trial
    from jobs.tuning.batch_trials import BatchTrials
    from jobs.tuning.sweep import make_tuner, run_trials, stop_link
    from raytrain.trainer import make_link

    spec, sweep = command.spec, command.the_sweep
    at_a_time = devices_of(spec, search, inventory)
    space = replace(search.space, devices=at_a_time)
    say_search(command, search, at_a_time)
    job = train_job(search.alone_spec, search.alone_plan, sweep, attempt=1)
    link = make_link()
    orders = BatchOrders(
        job=ray.put(cloudpickle.dumps(job)),  # pyright: ignore[reportPrivateImportUsage]
        data=None if checked.handed is None else ray.put(checked.handed),
        folder=os.getcwd(),
        prepared="fp64" if "fp64" in space.precisions else "fp32",
        reference=space.lead,
        budget_bytes=space.budget_bytes,
        workers=search.workers,
        goodput=spec.tune.objective == "goodput",
        link=link,
    )
    cores = min((node.cpus for node in inventory.nodes if node.cpus), default=1)
    with SweepTable(command.console, BATCH_COLUMNS, title="measurements") as table:
        trials = BatchTrials(
            space,
            known=cache.known,
            sweep=sweep,
            table=table,
            noise_at=Candidate(space.lead, space.first_sizes()[0]),
            goodput=spec.tune.objective == "goodput",
            most=spec.tune.max_trials,
        )
        # a CPU trial takes all cores of its node, so that nothing else is timed there
        resources = {"cpu": 1, "gpu": 1} if search.on_gpu else {"cpu": 1 if cluster.local else cores}
        tuner = make_tuner(
            tune.with_parameters(batch_trial, orders=orders),
            trials,
            storage=command.storage(cluster),
            resources=resources,
            at_a_time=at_a_time,
        )

        def stop() -> None:
            trials.stopping = True
            stop_link(link)

        run_trials(tuner, sweep=sweep, signals=command.signals, show=table.show, stop=stop, grace_s=LEAVE_S)


def devices_of(spec: JobSpec, search: BatchSearch, inventory: Inventory) -> int:
    """Measurements beside each other: one on each GPU that may be used, on CPUs one on each node."""
    gpus = choose_machines(spec.scale, inventory, []).gpus
    return len(gpus) if search.on_gpu else sum(node.cpus > 0 for node in inventory.nodes)


def say_search(command: TuneCommand, search: BatchSearch, at_a_time: int) -> None:
    """What is going to be tried, before it is."""
    space = search.space
    sizes = ", ".join(map(str, space.sizes)) if len(space.sizes) <= 12 else f"{space.sizes[0]} to {space.sizes[-1]}"
    batch = "the global batch is searched too" if space.rows_per_step is None else (
        f"{space.rows_per_step} rows of each worker's step are kept"
    )  # fmt: skip
    room = "no memory limit is known" if space.budget_bytes is None else f"{size_text(space.budget_bytes)} a process"
    command.say(f"search: {' and '.join(space.precisions)}, micro-batches of {sizes} rows; {batch}; {room}")
    command.say(f"each in a process of its own, {at_a_time} at a time; sweep folder {command.the_sweep.path}")

