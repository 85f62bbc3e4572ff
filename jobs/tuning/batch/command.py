"""The search over batch size and precision on the driver: earlier measurements, trials, result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cluster.devices.inventory import Inventory, inventory_from_ray
from jobs.driver.checks.job import Checked, train_job
from jobs.driver.plan import show_only_picked
from jobs.driver.runtime import Cluster, connected
from jobs.job.paths import path_from_here
from jobs.tuning.batch.cache import FOLDER, Cache, Caches, cache_key, gate_key
from jobs.tuning.batch.device_kinds import of_kind
from jobs.tuning.batch.results import print_search, write_batch
from jobs.tuning.batch.search import BatchSearch, find_search
from jobs.tuning.command import TuneCommand
from jobs.tuning.table import BATCH_COLUMNS, SweepTable
from raytrain.autotune.search.measurement import Candidate
from raytrain.plan.rules.devices import choose_devices
from raytrain.runs.storage import join
from raytrain.runs.sweep import SweepFolder

if TYPE_CHECKING:
    from jobs.tuning.batch.trials import KindTrials  # imports Ray

LEAVE_S = 10.0
"""Seconds that trials get to exit after a signal."""


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
            command.activity.begin("starting Ray")
            with connected(address, num_cpus=1 + max(1, gpus), num_gpus=gpus, verbose=command.verbose) as cluster:
                command.signals.install()
                _try(command, search, checked, cluster, caches)
    else:
        command.activity.begin("connecting to Ray")
        with connected(address, num_cpus=0, num_gpus=0, verbose=command.verbose) as cluster:
            command.signals.install()
            inventory = inventory_from_ray()
            search = find_search(command.loaded, checked, inventory)
            caches = _open_caches(command, search, checked, inventory)
            if _has_work(command, search, caches):
                _try(command, search, checked, cluster, caches)
    command.activity.begin("writing the result")
    write_batch(command, search, caches)
    return command.the_sweep


def is_complete(search: BatchSearch, caches: Caches) -> bool:
    """Whether nothing is left to measure."""
    pairs = [(search.space_of(one), caches[one.name]) for one in search.kinds]
    return all(
        cache.is_complete(one) and not search.loaders.ask(one, cache.known, search.goodput) for one, cache in pairs
    )


def _has_work(command: TuneCommand, search: BatchSearch, caches: Caches) -> bool:
    """Whether anything is left to measure, including a noise scale whose trial died in an earlier command."""
    died = any(row["what"] == "noise" for row in command.the_sweep.again())
    return not is_complete(search, caches) or (died and all(cache.known.noise is None for cache in caches.values()))


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
    if is_complete(search, caches):
        command.print_line(f"nothing is left to measure: {kept} measurements of earlier searches apply")
        paths = " ".join(path_from_here(cache.path) for cache in caches.values())
        command.print_line(f"  {paths}; --fresh measures again; search folder {path_from_here(sweep.path)}")
    elif kept:
        command.print_line(f"{kept} measurements of earlier searches apply; --fresh measures again")
    return caches


def _try(command: TuneCommand, search: BatchSearch, checked: Checked, cluster: Cluster, caches: Caches) -> None:
    import ray
    from ray import cloudpickle, tune

    from jobs.tuning.batch.trial import BatchTrialSettings, batch_trial
    from jobs.tuning.sweep import close_channel, make_tuner, run_trials
    from raytrain.execution.driver_channel import open_channel

    command.activity.begin("preparing the trials")
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
    command.activity.begin("")  # the table says what happens from here on
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
    command.activity.begin("stopping Ray")


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
