"""The search over batch size and precision on the driver: what may be tried, on which devices, and the result."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Column, Table

from cluster.devices.inventory import Inventory
from cluster.wording import plain_number
from jobs.driver.planning import plan_job
from jobs.driver.runtime import Cluster
from jobs.job.facts import path_from_here, resolved
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.driver import TuneCommand
from raytrain.autotune.batch_search import BatchDecision, SearchResults, decide
from raytrain.autotune.measurement import STEADY, Candidate, line_of
from raytrain.autotune.size_curve import BatchSpace, sizes_dividing, sizes_free
from raytrain.config.messages import render
from raytrain.errors import InputError
from raytrain.plan.choice import size_text
from raytrain.plan.machines import allowed_bytes, choose_devices, spread
from raytrain.plan.memory import check_limit
from raytrain.plan.plan import Plan
from raytrain.plan.room import Need
from raytrain.report.sweep import batch_spec

if TYPE_CHECKING:
    from jobs.driver.check_job import Checked

LEAVE_S = 10.0
"""Seconds that trials get to exit after a signal."""

# -- what may be tried -----------------------------------------------------------------------------

PLANNED_BATCH = 4096
"""Global batch to plan with at most if the search chooses the batch; large enough to keep every worker busy."""
SLIVER = 0.001
"""Fraction of Ray's `accelerator_type:*` resource that a trial reserves: it selects the node, and limits nothing."""


@dataclass(frozen=True)
class TrialDevices:
    """Where trials run: on each GPU, or on each node without GPUs, one at a time."""

    number: int
    on_gpu: bool
    cores: int  # CPU cores that a measurement on CPUs reserves: those of its node, so that no other one runs there
    budget_bytes: int | None  # memory budget of one process; None if unknown
    required: str = ""  # Ray's accelerator type that a trial needs, where the cluster has several; else ""

    def resources(self, *, local: bool) -> dict[str, float]:
        own: dict[str, float] = {"CPU": 1, "GPU": 1} if self.on_gpu else {"CPU": 1 if local else self.cores}
        return own | ({f"accelerator_type:{self.required}": SLIVER} if self.required else {})


def find_devices(spec: JobSpec, inventory: Inventory, *, workers: int, on_gpu: bool) -> TrialDevices:
    """The devices that a search of this job measures on: of several types that Ray can tell apart, the one with the
    least memory of those that the run uses, since a micro-batch has to fit every worker. Raises InputError: a machine
    has GPUs of different types, of which Ray would assign any to a trial."""
    machines = choose_devices(spec.scale, inventory, [])
    nodes = [node for node, _ in machines.pool] if on_gpu else [node for node in inventory.nodes if node.cpus > 0]
    types = sorted({node.accelerator for node in nodes})
    if len(types) < 2 or "" in types:
        asked = machines.accelerator.value
        required = asked if on_gpu and any(asked in node.accelerators for node in nodes) else ""
        return _devices_of(spec, inventory, workers=workers, on_gpu=on_gpu, required=required)
    counts, found = spread(workers, machines, inventory), []
    for name in types:
        own = tuple(node for node in nodes if node.accelerator == name)
        if there := sum(counts.get(host, 0) for host in {node.host for node in own}):
            part = replace(inventory, nodes=own)
            found.append(_devices_of(spec, part, workers=there, on_gpu=on_gpu, required=name))
    return min(found, key=lambda one: one.budget_bytes or math.inf)


def _devices_of(spec: JobSpec, inventory: Inventory, *, workers: int, on_gpu: bool, required: str) -> TrialDevices:
    machines = choose_devices(spec.scale, inventory, [])
    for node, devices in machines.pool:
        names = sorted({device.name for device in devices})
        if len(names) > 1:
            raise InputError(
                "scale.accelerator", got=f"{' and '.join(names)} on the machine {node.host}",
                expected="GPUs of one type per machine",
                remedy="Ray cannot tell GPUs of one machine apart; set scale.accelerator to the type to search on",
            )  # fmt: skip
    cpus = [node.cpus for node in inventory.nodes if node.cpus > 0]
    budget = allowed_bytes(spec.cluster, machines, inventory, workers=workers)
    number = max(1, len(machines.gpus) if on_gpu else len(cpus))
    return TrialDevices(number, on_gpu, min(cpus, default=1), budget, required)


@dataclass(frozen=True)
class BatchSearch:
    space: BatchSpace
    devices: TrialDevices
    alone_spec: JobSpec  # of a trial: one worker, experts in-process
    alone_plan: Plan
    run_plan: Plan  # of the run, for which the result is


def find_search(loaded: LoadedSpec, checked: Checked, inventory: Inventory) -> BatchSearch:
    """What a search without `tune.space` may try on these machines. Raises InputError: nothing is left to search, or
    the model alone needs more memory than a process may use."""
    spec = loaded.spec
    free = spec.loop.global_batch_size == "auto"
    dtype, micro = spec.precision.dtype, spec.loop.micro_batch_size
    if dtype != "auto" and micro != "auto" and not free:
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
    pinned = {"scale.workers": 1, "scale.threads": int(plan.value("threads", 0)), "scale.strategy": "auto",
              "experts.hosts": 0, "experts.replicas": 0, "loop.global_batch_size": min(2, planned),
              "loop.micro_batch_size": 1, "tune.space": None}  # fmt: skip
    if plan.value("mode", "") == "multi_gpu":
        pinned["scale.mode"] = "single_gpu"
    alone = _with(loaded, pinned)
    if micro != "auto":
        sizes: tuple[int, ...] = (int(spec.loop.global_batch_size if micro == "whole" else micro),)
    else:
        sizes = sizes_free(rows, workers) if free else sizes_dividing(int(spec.loop.global_batch_size), workers)
    devices = find_devices(spec, inventory, workers=workers, on_gpu=on_gpu)
    budget = devices.budget_bytes
    if plan.model_facts is not None:  # refuse a model of which not even one row fits
        limit = spec.cluster.memory_limit
        key = "cluster.memory_limit" if limit is not None and budget == limit else "cluster.memory_fraction"
        recomputed = bool(spec.loop.activation_checkpointing)
        check_limit(budget, plan.model_facts, spec.optim, on_gpu=on_gpu, recomputed=recomputed, key=key)
    space = BatchSpace(
        precisions=plan.precision.candidates,
        sizes=sizes,
        rows_per_step=None if free else math.ceil(int(spec.loop.global_batch_size) / workers),
        budget_bytes=budget,
        devices=devices.number,
    )
    return BatchSearch(space, devices, resolved(alone.spec), plan_job(alone, inventory=inventory, **facts), plan)


def _with(loaded: LoadedSpec, values: dict[str, Any]) -> LoadedSpec:
    return load_spec(mapping=loaded.mapping, overrides=[f"{key}={render(value)}" for key, value in values.items()])


# -- the search ------------------------------------------------------------------------------------


class BatchCommand(TuneCommand):
    checked: Checked
    search: BatchSearch

    def find(self, checked: Checked, inventory: Inventory) -> None:
        self.checked, self.search = checked, find_search(self.loaded, checked, inventory)

    def resources(self) -> tuple[int, int]:
        gpus = self.search.devices.number if self.search.devices.on_gpu else 0
        return 1 + max(1, gpus), gpus

    def needs(self, cluster: Cluster) -> Iterable[Sequence[Need]]:
        if cluster.local:  # of a notebook: nothing of it is reserved for threads
            return []
        from jobs.driver.watch import run_needs  # imports Ray

        return [run_needs(self.spec, self.search.run_plan), [self._need(cluster)]]

    def _need(self, cluster: Cluster) -> Need:
        return Need("scale.threads", "trial", 1, self.search.devices.resources(local=cluster.local))

    def measure(self, cluster: Cluster) -> None:
        from ray import cloudpickle, tune

        from jobs.driver.check_job import train_job
        from jobs.tuning.batch_trials import BatchSearcher, BatchTrials, batch_trial
        from jobs.tuning.trials import fit
        from raytrain.execution.driver_channel import open_channel

        search, sweep, need = self.search, self.the_sweep, self._need(cluster)
        space, limit = search.space, search.space.budget_bytes
        sizes = ", ".join(map(str, space.sizes)) if len(space.sizes) <= 12 else f"{space.sizes[0]} to {space.sizes[-1]}"
        fixed = f"{space.rows_per_step} rows per worker and step are fixed"
        batch = "the global batch is searched too" if space.rows_per_step is None else fixed
        room = f"{size_text(limit)} for each process" if limit else "no memory limit is known"
        room += f" of {search.devices.required}" if search.devices.required else ""
        self.print_line(f"search: {' and '.join(space.precisions)}, micro-batches of {sizes} rows; {batch}; {room}")
        folder = path_from_here(sweep.path)
        self.print_line(f"each trial in its own process, {space.devices} at a time; search folder {folder}")
        trials = BatchTrials(self, space, SearchResults.of_rows(sweep.standing()), need=need)
        job, channel = train_job(search.alone_spec, search.alone_plan, sweep, attempt=1), open_channel()
        trainable = tune.with_parameters(
            batch_trial, job=cloudpickle.dumps(job),  # pyright: ignore[reportPrivateImportUsage]
            data=self.checked.handed, folder=os.getcwd(), budget=limit, channel=channel,
        )  # fmt: skip
        resources = tune.PlacementGroupFactory([dict(need.each)])
        fit(
            trainable, trials, cluster=cluster, resources=resources, at_a_time=space.devices, channel=channel,
            grace_s=LEAVE_S, searcher=BatchSearcher(trials),
        )  # fmt: skip
        self.activity.begin("stopping Ray")

    def write(self) -> None:
        spec, space = self.spec, self.search.space
        results = SearchResults.of_rows({row["trial"]: row for row in self.the_sweep.ended()}.values())
        decision, limit = decide(space, results), space.budget_bytes
        chosen, size = decision.candidate, decision.candidate.micro_batch_size
        values: dict[str, Any] = {"precision.dtype": chosen.precision}
        reasons = {
            "precision.dtype": decision.precision.reason, "loop.micro_batch_size": decision.micro_batch_size.reason
        }  # fmt: skip
        if spec.loop.micro_batch_size != "whole":
            values["loop.micro_batch_size"] = size
        if space.rows_per_step is None:
            workers = int(self.search.run_plan.value("workers", 1))
            values["loop.global_batch_size"] = size * workers
            reasons["loop.global_batch_size"] = f"micro-batches of {size} rows x {workers} workers, no accumulation"
        self.write_best(values, reasons)
        self.print_table(decision_table(decision))
        self.print_line(f"precision   {chosen.precision}: {decision.precision.reason}")
        self.print_line(f"micro-batch {size}: {decision.micro_batch_size.reason}")
        peak, used = decision.chosen.measured_peak, None
        if peak and limit:
            used = peak / limit
            of = f"a peak of {size_text(peak)} of the {size_text(limit)} that a process may use"
            self.print_line(f"memory      {used:.1%} used: {of}")
        if advice := peak_advice(results, chosen, limit):
            self.print_line(advice)
        table = [asdict(row) for row in decision.table]
        plot = batch_spec(table, sizes=space.sizes, chosen=(chosen.precision, size), budget=limit, name=spec.name)
        memory = {"peak_bytes": peak, "limit_bytes": limit, "used": used}
        record = {"values": values, "decision": asdict(decision), "advice": advice, "memory": memory}
        self.finish({"kind": "batch", **record}, plot)


def decision_table(decision: BatchDecision) -> Table:
    """Every candidate that was measured, the best one marked."""
    rows = []
    for row in decision.table:
        taken, rate, noise = row == decision.chosen, "", ""
        if row.rows_per_s is not None and row.low is not None and row.high is not None:
            noise = "too noisy" if row.high > (1 + STEADY) * row.low else ""
            digits = 2 if noise else 4
            speed, low, high = (plain_number(float(f"{one:.{digits}g}")) for one in (row.rows_per_s, row.low, row.high))
            rate = f"{speed} [{low}, {high}]"
        sizes = [size_text(one) if one else "" for one in (row.measured_peak, row.predicted_peak)]
        note = row.note or ", ".join(filter(None, ("best" if taken else "", noise)))
        rows.append((taken, (row.precision, str(row.micro_batch_size), str(row.passes or ""), rate, *sizes, note)))
    names = ("precision", "rows", "passes", "rows/s [min, max]", "peak", "predicted", "")
    filled = [at for at in range(len(names)) if any(cells[at] for _, cells in rows)]
    columns = [Column(names[at], no_wrap=bool(names[at])) for at in filled]  # only the notes are broken, between words
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for taken, cells in rows:
        table.add_row(*(escape(cells[at]) for at in filled), style="bold green" if taken else "")
    return table


def peak_advice(known: SearchResults, chosen: Candidate, limit: int | None) -> str:
    """The peak memory at half, the same and twice the chosen size; "" where memory was not read."""
    measured = [*known.measurements, *(one for several in known.comparisons for one in several)]
    own = [one for one in measured if one.candidate.precision == chosen.precision and one.peak_bytes]
    if not own:
        return ""
    line = line_of(own)
    peaks = [f"{size_text(line.predict(round(part * chosen.micro_batch_size)))} at {part:g}x" for part in (0.5, 1, 2)]
    room = "" if limit is None else f"; a process may use {size_text(limit)}"
    return f"predicted peak: {', '.join(peaks)} this micro-batch{room}"
