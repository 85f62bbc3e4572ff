"""The search over batch size and precision on the driver: what may be tried, a Ray Tune run on each kind of device, and
the result."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cluster.devices.inventory import Inventory, Node
from jobs.driver.check_job import Checked, train_job
from jobs.driver.planning import plan_job
from jobs.driver.runtime import Cluster
from jobs.job.facts import path_from_here, resolved
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from jobs.tuning.driver import TuneCommand
from raytrain.autotune.batch_decision import BatchDecision, KindsDecision, choose_for_all, decide
from raytrain.autotune.batch_space import BatchSpace, SearchResults, sizes_dividing, sizes_free
from raytrain.autotune.measurement import STEADY, Candidate, line_of
from raytrain.autotune.precision import gate_refusal
from raytrain.config.decode import encode
from raytrain.config.messages import render
from raytrain.config.sections import TuneFound
from raytrain.errors import InputError, RunError
from raytrain.plan.choice import figure_text, size_text
from raytrain.plan.machines import allowed_bytes, choose_devices, spread
from raytrain.plan.memory import check_limit
from raytrain.plan.plan import Plan
from raytrain.plan.room import Need
from raytrain.report.sweep import batch_spec
from raytrain.runs.folder import SweepFolder

LEAVE_S = 10.0
"""Seconds that trials get to exit after a signal."""

Known = Mapping[str, SearchResults]
"""What is measured, by the name of the kind of device, "" for a single kind."""

# -- what may be tried -----------------------------------------------------------------------------

PLANNED_BATCH = 4096
"""Global batch to plan with at most if the search chooses the batch; large enough to keep every worker busy."""
SLIVER = 0.001
"""Fraction of Ray's `accelerator_type:*` resource that a trial reserves: it selects the node, and limits nothing."""


@dataclass(frozen=True)
class Kind:
    """Devices of one type. Each kind is searched by itself, and Ray runs its trials on its devices.

    Attributes:
        name: Ray's accelerator type; "" if there is one kind only, or if Ray cannot tell the kinds apart.
        devices: concurrent measurements: one on each GPU, or on each node without GPUs.
        workers: the run's workers on this kind, possibly fewer than its devices.
        cores: CPU cores that a measurement on CPUs reserves: those of its node, so that no other one runs there.
        budget_bytes: memory budget of one process; None if unknown.
        required: Ray's accelerator type where `scale.accelerator` names one of several in the cluster; else "".
    """

    name: str
    devices: int
    workers: int
    cores: int
    budget_bytes: int | None
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
    counts, found = spread(workers, machines, inventory), []
    for name in names:
        own = [node for node in nodes if node.accelerator == name]
        there = sum(counts.get(host, 0) for host in {node.host for node in own})
        if there:  # a kind that the run does not use must not decide
            part = replace(inventory, nodes=tuple(own))
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
    asked = machines.accelerator.value
    return Kind(
        name=name,
        devices=max(1, len(machines.gpus) if on_gpu else len(nodes)),
        workers=workers,
        cores=min((node.cpus for node in nodes), default=1),
        budget_bytes=allowed_bytes(spec.cluster, machines, inventory, workers=workers),
        required=asked if on_gpu and any(asked in node.accelerators for node in nodes) else "",
    )


@dataclass(frozen=True)
class BatchSearch:
    """What is searched, and for which run.

    Attributes:
        space: the candidates, for the kind of device with the least memory.
        kinds: the kinds of devices, each of which is searched by itself.
        on_gpu: whether the run computes on GPUs.
        alone_spec: the job of a trial: one worker, experts in-process.
        alone_plan: its plan.
        run_plan: of the run, for which the result is.
    """

    space: BatchSpace
    kinds: tuple[Kind, ...]
    on_gpu: bool
    alone_spec: JobSpec
    alone_plan: Plan
    run_plan: Plan

    def space_of(self, kind: Kind) -> BatchSpace:
        """The candidates on one kind of device."""
        return replace(self.space, budget_bytes=kind.budget_bytes, devices=kind.devices)

    def need(self, kind: Kind, cluster: Cluster) -> Need:
        """What a trial on a kind of device reserves."""
        return Need("scale.threads", "trial", 1, kind.resources(on_gpu=self.on_gpu, local=cluster.local))


def find_search(loaded: LoadedSpec, checked: Checked, inventory: Inventory) -> BatchSearch:
    """What a search without `tune.space` may try on these machines.

    Raises:
        InputError: nothing is left to search, or the model alone needs more memory than a process may use.
    """
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
              "loop.micro_batch_size": 1, "tune.space": None, "tune.found": None}  # fmt: skip
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
    )
    alone_plan = plan_job(alone, inventory=inventory, **facts)
    return BatchSearch(space, kinds, on_gpu, resolved(alone.spec), alone_plan, plan)


def _with(loaded: LoadedSpec, values: dict[str, Any]) -> LoadedSpec:
    return load_spec(mapping=loaded.mapping, overrides=[f"{key}={render(value)}" for key, value in values.items()])


# -- the trials ------------------------------------------------------------------------------------


def run_batch(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Run the search and write the result.

    Raises:
        InputError, RunError, Interrupted.
    """

    def resources(search: BatchSearch) -> tuple[int, int]:
        gpus = sum(one.devices for one in search.kinds) if search.on_gpu else 0
        return 1 + max(1, gpus), gpus

    def find(machines: Inventory) -> BatchSearch:
        return find_search(command.loaded, checked, machines)

    def needs(search: BatchSearch, cluster: Cluster) -> list[list[Need]]:
        if cluster.local:  # of a notebook: nothing of it is reserved for threads
            return []
        from jobs.driver.watch import run_needs  # imports Ray

        return [run_needs(command.spec, search.run_plan), *([search.need(kind, cluster)] for kind in search.kinds)]

    with command.machines(address, inventory, find=find, resources=resources, needs=needs) as (search, cluster):
        sweep = command.the_sweep
        known = {
            kind.name: SearchResults.of_rows(row for row in sweep.standing() if row.get("kind", "") == kind.name)
            for kind in search.kinds
        }
        _measure(command, search, checked, cluster, known)
    command.activity.begin("writing the result")
    write_batch(command, search, known)
    return sweep


def _measure(command: TuneCommand, search: BatchSearch, checked: Checked, cluster: Cluster, known: Known) -> None:
    """Run the trials of each kind of device, one kind after the other; `known` grows with each result."""
    import ray
    from ray import cloudpickle, tune

    from jobs.tuning.batch_trials import BatchSearcher, BatchTrials, BatchTrialSettings, batch_trial
    from jobs.tuning.trials import fit
    from raytrain.execution.driver_channel import open_channel

    command.activity.begin("preparing the trials")
    _print_search(command, search)
    job = train_job(search.alone_spec, search.alone_plan, command.the_sweep, attempt=1)
    pickled = ray.put(cloudpickle.dumps(job))  # pyright: ignore[reportPrivateImportUsage]
    data = None if checked.handed is None else ray.put(checked.handed)
    channel = open_channel()
    for kind in search.kinds:
        settings = BatchTrialSettings(
            job=pickled, data=data, folder=os.getcwd(),
            prepared="fp64" if "fp64" in search.space.precisions else "fp32", reference=search.space.lead,
            budget=kind.budget_bytes, workers=search.space.workers, channel=channel,
        )  # fmt: skip
        need = search.need(kind, cluster)
        trials = BatchTrials(command, search.space_of(kind), known[kind.name], kind=kind.name, need=need)
        fit(
            tune.with_parameters(batch_trial, settings=settings), trials, cluster=cluster,
            resources=tune.PlacementGroupFactory([dict(need.each)]), at_a_time=kind.devices, channel=channel,
            grace_s=LEAVE_S, name=f"tune{kind.name}", searcher=BatchSearcher(trials),
        )  # fmt: skip
    command.activity.begin("stopping Ray")


def _print_search(command: TuneCommand, search: BatchSearch) -> None:
    space = search.space
    sizes = ", ".join(map(str, space.sizes)) if len(space.sizes) <= 12 else f"{space.sizes[0]} to {space.sizes[-1]}"
    fixed = f"{space.rows_per_step} rows per worker and step are fixed"
    batch = "the global batch is searched too" if space.rows_per_step is None else fixed
    rooms = []
    for kind in search.kinds:
        limit = f"{size_text(kind.budget_bytes)} for each process" if kind.budget_bytes else "no memory limit is known"
        rooms.append(f"{kind.devices} {kind.name}, {limit}" if kind.name else limit)
    room = rooms[0] if len(rooms) == 1 else f"a search for each kind of device ({'; '.join(rooms)})"
    command.print_line(f"search: {' and '.join(space.precisions)}, micro-batches of {sizes} rows; {batch}; {room}")
    devices = max(one.devices for one in search.kinds)
    folder = path_from_here(command.the_sweep.path)
    command.print_line(f"each trial in its own process, {devices} at a time; search folder {folder}")


# -- the result -----------------------------------------------------------------------------------


def write_batch(command: TuneCommand, search: BatchSearch, known: Known) -> None:
    """Decide from all measurements, then write and print the result.

    Raises:
        RunError: nothing that was measured can run.
    """
    spec, space, answer = command.spec, search.space, answer_of(search, known)
    chosen, own, decision = answer.candidate, known[answer.binding], answer.decisions[answer.binding]
    size = chosen.micro_batch_size
    values: dict[str, Any] = {"precision.dtype": chosen.precision}
    reasons = {"precision.dtype": answer.precision.reason, "loop.micro_batch_size": answer.micro_batch_size.reason}
    if spec.loop.micro_batch_size != "whole":
        values["loop.micro_batch_size"] = size
    if space.rows_per_step is None:
        values["loop.global_batch_size"] = size * space.workers
        reasons["loop.global_batch_size"] = f"micro-batches of {size} rows x {space.workers} workers, no accumulation"
    found = _found(answer, known, rows=space.rows(size))
    peak = found["peak_bytes"]
    limit = next(kind.budget_bytes for kind in search.kinds if kind.name == answer.binding)
    used = peak / limit if peak and limit else None
    command.write_best(values, reasons, found=found)
    for name, one in answer.decisions.items():
        command.print_table(decision_table(one, kind=name))
    command.print_line(f"precision   {chosen.precision}: {answer.precision.reason}")
    command.print_line(f"micro-batch {size}: {answer.micro_batch_size.reason}")
    if used is not None:
        of = f"a peak of {size_text(peak)} of the {size_text(limit or 0)} that a process may use"
        command.print_line(f"memory      {used:.1%} used: {of}")
    if advice := peak_advice(own, chosen, limit):
        command.print_line(advice)
    table = [
        {**asdict(row), "precision": f"{name} {row.precision}".strip()}
        for name, one in answer.decisions.items()
        for row in one.table
    ]
    line = (f"{answer.binding} {chosen.precision}".strip(), size)
    plot = batch_spec(table, sizes=space.sizes, chosen=line, budget=space.budget_bytes, name=spec.name)
    record = {
        "kind": "batch", "values": values, "decision": decision.to_json(), "found": found, "advice": advice,
        "kinds": {name: one.to_json() for name, one in answer.decisions.items()},
        "memory": {"peak_bytes": peak, "limit_bytes": limit, "used": used},
    }  # fmt: skip
    command.finish(record, plot)


def answer_of(search: BatchSearch, known: Known) -> KindsDecision:
    """The decision of each kind of device, and the one for all of them.

    Raises:
        RunError: on one kind, nothing that was measured can run.
    """

    def decided(kind: Kind) -> BatchDecision:
        try:
            return decide(search.space_of(kind), known[kind.name])
        except RunError as error:
            raise RunError(f"on {kind.name}: {error}" if kind.name else str(error)) from error

    return choose_for_all(
        {kind.name: decided(kind) for kind in search.kinds},
        workers={kind.name: kind.workers for kind in search.kinds},
        reference=search.space.lead,
        refused={gate.precision for one in known.values() for gate in one.gates if gate_refusal(gate)},
    )


def _found(answer: KindsDecision, known: Known, *, rows: int) -> dict[str, Any]:
    """`tune.found`: what was measured for the chosen point, and what that holds for."""
    own, (precision, size) = known[answer.binding], _point(answer.candidate)
    row, signature = answer.decisions[answer.binding].row(precision, size), own.signature
    assert signature is not None and row.rows_per_s, "a decision rests on a measurement"
    others = [one.signature for name, one in known.items() if name != answer.binding]
    found = TuneFound(
        signature=signature["hash"],
        facts=signature["facts"],
        precision=precision,
        micro_batch_size=size,
        step_s=rows / row.rows_per_s,
        peak_bytes=row.measured_peak,
        device=own.measurements[-1].device,
        also=[one["hash"] for one in others if one is not None],
    )
    return encode(found)


def _point(candidate: Candidate) -> tuple[str, int]:
    return candidate.precision, candidate.micro_batch_size


def decision_table(decision: BatchDecision, *, kind: str) -> Table:
    """Every candidate that was measured on one `kind` of device, the best one marked."""
    word, rows = f"best on {kind}" if kind else "best", []
    for row in decision.table:
        taken = (row.precision, row.micro_batch_size) == _point(decision.candidate)
        rate = noise = ""
        if row.rows_per_s is not None and row.low is not None and row.high is not None:
            noise = "too noisy" if row.high > (1 + STEADY) * row.low else ""
            digits = 2 if noise else 4
            speed, low, high = (figure_text(float(f"{one:.{digits}g}")) for one in (row.rows_per_s, row.low, row.high))
            rate = f"{speed} [{low}, {high}]"
        sizes = [size_text(one) if one else "" for one in (row.measured_peak, row.predicted_peak)]
        note = row.note or ", ".join(filter(None, (word if taken else "", noise)))
        rows.append((taken, (row.precision, str(row.micro_batch_size), str(row.passes or ""), rate, *sizes, note)))
    names = ("precision", "rows", "passes", "rows/s [min, max]", "peak", "predicted", "")
    filled = [at for at in range(len(names)) if any(cells[at] for _, cells in rows)]
    columns = [Column(names[at], no_wrap=bool(names[at])) for at in filled]  # only the notes are broken, between words
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=f"on {kind}" if kind else None,
                  title_justify="left")  # fmt: skip
    for taken, cells in rows:
        table.add_row(*(escape(cells[at]) for at in filled), style="bold green" if taken else "")
    return table


def peak_advice(known: SearchResults, chosen: Candidate, limit: int | None) -> str:
    """The peak memory at half, the same and twice the chosen size; "" where memory was not read."""
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision and one.peak_bytes]
    if not own:
        return ""
    line = line_of(own)
    peaks = [f"{size_text(line.predict(round(part * chosen.micro_batch_size)))} at {part:g}x" for part in (0.5, 1, 2)]
    room = "" if limit is None else f"; a process may use {size_text(limit)}"
    return f"predicted peak: {', '.join(peaks)} this micro-batch{room}"
