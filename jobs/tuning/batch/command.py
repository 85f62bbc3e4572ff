"""The search over batch size and precision on the driver: search space, earlier measurements, trials, result."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.devices.inventory import Inventory, inventory_from_ray
from jobs.driver.checks import Checked, train_job
from jobs.driver.plan import plan_job, show_only_picked
from jobs.driver.runtime import Cluster, connected
from jobs.job.paths import resolved
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.batch.cache import FOLDER, Cache, Caches, cache_key, gate_key
from jobs.tuning.batch.device_kinds import Kind, find_kinds, of_kind
from jobs.tuning.batch.loaders import LoaderSearch, find_loaders
from jobs.tuning.batch.results import print_search, write_batch
from jobs.tuning.table import BATCH_COLUMNS, SweepTable
from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.space import BatchSpace, sizes_dividing, sizes_free
from raytrain.config.messages import render
from raytrain.errors import InputError
from raytrain.plan.plan import Plan
from raytrain.plan.rules.devices import choose_devices
from raytrain.plan.rules.memory import check_limit
from raytrain.runs.storage import join
from raytrain.runs.sweep import SweepFolder

if TYPE_CHECKING:
    from jobs.tuning.batch.trials import KindTrials
    from jobs.tuning.command import TuneCommand

PLANNED_BATCH = 4096
"""Global batch to plan with at most if the search chooses the batch; large enough to keep every worker busy."""

LEAVE_S = 10.0
"""Seconds that trials get to exit after a signal."""


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

    def is_complete(self, caches: Caches) -> bool:
        """Whether nothing is left to measure."""
        pairs = [(self.space_of(one), caches[one.name]) for one in self.kinds]
        return all(
            cache.is_complete(one) and not self.loaders.ask(one, cache.known, self.goodput) for one, cache in pairs
        )


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
            seen=f"fixed values for precision.dtype ({dtype}) and loop.micro_batch_size ({micro})",
            expected="auto for one of them, or keys to search in tune.space",
        )
    if spec.tune.objective == "goodput" and not free:
        raise InputError(
            "tune.objective",
            seen="goodput with a fixed loop.global_batch_size",
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
    if micro != "auto":
        sizes: tuple[int, ...] = (int(micro),)
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


def run_batch(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Run the search and write the result.

    Raises:
        InputError, RunError, Interrupted.
    """
    if address == "local":
        search = find_search(command.loaded, checked, inventory)
        caches = _open_caches(command, search, checked, inventory)
        gpus = search.devices if search.on_gpu else 0
        if _has_work(command, search, caches):
            show_only_picked(choose_devices(command.spec.scale, inventory, []).accelerator.value, inventory)
            with connected(address, num_cpus=1 + max(1, gpus), num_gpus=gpus, verbose=command.verbose) as cluster:
                command.signals.install()
                _try(command, search, checked, cluster, caches)
    else:
        with connected(address, num_cpus=0, num_gpus=0, verbose=command.verbose) as cluster:
            command.signals.install()
            inventory = inventory_from_ray()
            search = find_search(command.loaded, checked, inventory)
            caches = _open_caches(command, search, checked, inventory)
            if _has_work(command, search, caches):
                _try(command, search, checked, cluster, caches)
    write_batch(command, search, caches)
    return command.the_sweep


def _has_work(command: TuneCommand, search: BatchSearch, caches: Caches) -> bool:
    """Whether anything is left to measure, including a noise scale whose trial died in an earlier command."""
    died = any(row["what"] == "noise" for row in command.the_sweep.again())
    return not search.is_complete(caches) or (died and all(cache.known.noise is None for cache in caches.values()))


def _open_caches(command: TuneCommand, search: BatchSearch, checked: Checked, inventory: Inventory) -> Caches:
    """Open the search folder, and the measurements of earlier searches by kind of device."""
    command.open_sweep(inventory)
    spec, sweep, caches = command.spec, command.the_sweep, {}
    for kind in search.kinds:
        key = cache_key(spec, search, checked, kind)
        folder = join(spec.save.dir, FOLDER)
        cache = caches[kind.name] = Cache(
            folder, key, budget=kind.budget_bytes, fresh=spec.tune.fresh, gate=gate_key(search)
        )
        cache.add_rows(of_kind(sweep.standing(), kind.name))
    noise = next((cache.known.noise for cache in caches.values() if cache.known.noise is not None), None)
    for cache in caches.values():
        cache.known.noise = noise
    kept = sum(len(cache.rows) for cache in caches.values())
    if sweep.ended():
        return caches
    if search.is_complete(caches):
        command.print_line(f"nothing is left to measure: {kept} measurements of earlier searches apply")
        paths = " ".join(cache.path for cache in caches.values())
        command.print_line(f"  {paths}; --fresh measures again; search folder {sweep.path}")
    elif kept:
        command.print_line(f"{kept} measurements of earlier searches apply; --fresh measures again")
    return caches


def _try(command: TuneCommand, search: BatchSearch, checked: Checked, cluster: Cluster, caches: Caches) -> None:
    import ray
    from ray import cloudpickle, tune

    from jobs.tuning.batch.trial import BatchTrialSettings, batch_trial
    from jobs.tuning.sweep import close_channel, make_tuner, run_trials
    from raytrain.execution.driver_channel import open_channel

    sweep = command.the_sweep
    print_search(command, search)
    job = train_job(search.alone_spec, search.alone_plan, sweep, attempt=1)
    channel = open_channel()
    settings = BatchTrialSettings(
        job=ray.put(cloudpickle.dumps(job)),  # pyright: ignore[reportPrivateImportUsage]
        data=None if checked.handed is None else ray.put(checked.handed),
        folder=os.getcwd(),
        prepared="fp64" if "fp64" in search.space.precisions else "fp32",
        reference=search.space.lead,
        budgets={one.name: one.budget_bytes for one in search.kinds},
        workers=search.workers,
        goodput=search.goodput,
        channel=channel,
    )
    reserved = {one.name: one.resources(on_gpu=search.on_gpu, local=cluster.local) for one in search.kinds}
    columns = ("kind", *BATCH_COLUMNS) if search.kinds[0].name else BATCH_COLUMNS
    with SweepTable(command.console, columns, title="measurements") as table:
        trials = _trials(command, search, caches, table)
        tuner = make_tuner(
            tune.with_parameters(batch_trial, settings=settings),
            trials,
            storage=command.storage(cluster),
            resources=lambda config: tune.PlacementGroupFactory([reserved[config["kind"]]]),
            at_a_time=search.devices,
        )

        def stop() -> None:
            trials.stop()
            close_channel(channel)

        run_trials(tuner, sweep=sweep, signals=command.signals, show=table.show, stop=stop, grace_s=LEAVE_S)


def _trials(command: TuneCommand, search: BatchSearch, caches: Caches, table: SweepTable) -> KindTrials:
    """The trials of each kind of device; the first kind also measures the noise scale, which is the same for all."""
    from jobs.tuning.batch.trials import BatchTrials, KindTrials, Numbers

    spec, numbers = command.spec, Numbers(command.the_sweep)
    space = search.space
    return KindTrials({
        kind.name: BatchTrials(
            search.space_of(kind),
            known=caches[kind.name].known,
            sweep=command.the_sweep,
            table=table,
            numbers=numbers,
            kind=kind.name,
            noise_at=Candidate(space.lead, space.first_sizes()[0]) if kind is search.kinds[0] else None,
            goodput=search.goodput,
            most=spec.tune.max_trials,
            loaders=search.loaders,
        )
        for kind in search.kinds
    })  # fmt: skip
