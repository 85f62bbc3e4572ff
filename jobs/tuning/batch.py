"""The search over batch size and precision on the driver: earlier measurements, trials, and the result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cluster.devices.inventory import Inventory, inventory_from_ray
from jobs.driver.check_job import Checked, train_job
from jobs.driver.planning import show_only_picked
from jobs.driver.runtime import Cluster, connected
from jobs.job.facts import path_from_here
from jobs.tuning.batch_search import BatchSearch, find_search
from jobs.tuning.cache import CACHE, Cache, cache_key, of_kind
from jobs.tuning.driver import TuneCommand
from raytrain.autotune.batch_decision import BatchDecision, KindsDecision, choose_for_all, decide
from raytrain.autotune.batch_search import next_proposals
from raytrain.autotune.batch_space import SearchResults
from raytrain.autotune.loaders import choose_count
from raytrain.autotune.measurement import STEADY, Candidate, line_of
from raytrain.autotune.precision import gate_refusal
from raytrain.config.decode import encode
from raytrain.config.sections import TuneFound
from raytrain.errors import RunError
from raytrain.plan.choice import Choice, Deferred, Resolved, figure_text, size_text
from raytrain.plan.machines import choose_devices
from raytrain.plan.room import Need
from raytrain.report.sweep import batch_spec
from raytrain.runs.folder import SweepFolder
from raytrain.runs.storage import join

LEAVE_S = 10.0
"""Seconds that trials get to exit after a signal."""
LOADERS = "data.loader_workers"

Known = Mapping[str, SearchResults]
"""What is measured, by the name of the kind of device, "" for a single kind."""


def run_batch(command: TuneCommand, checked: Checked, *, address: str, inventory: Inventory) -> SweepFolder:
    """Run the search and write the result.

    Raises:
        InputError, RunError, Interrupted.
    """
    with contextlib.ExitStack() as stack:

        def connect(*, cpus: int, gpus: int) -> Cluster:
            command.activity.begin("starting Ray" if address == "local" else "connecting to Ray")
            cluster = stack.enter_context(connected(address, num_cpus=cpus, num_gpus=gpus, verbose=command.verbose))
            command.signals.install()
            return cluster

        cluster = None
        if address != "local":  # the cluster says what machines there are; our own Ray starts only to measure
            cluster, inventory = connect(cpus=0, gpus=0), inventory_from_ray()
        search = find_search(command.loaded, checked, inventory)
        known, caches = _earlier_measurements(command, search, checked, inventory)
        if not _is_complete(search, known):
            if cluster is None:
                show_only_picked(choose_devices(command.spec.scale, inventory, []).accelerator.value, inventory)
                gpus = search.devices if search.on_gpu else 0
                cluster = connect(cpus=1 + max(1, gpus), gpus=gpus)
            _measure(command, search, checked, cluster, known)
    command.activity.begin("writing the result")
    for name, cache in caches.items():
        cache.store(of_kind(command.the_sweep.ended(), name))
    write_batch(command, search, known, from_cache=sum(len(cache.rows) for cache in caches.values()))
    return command.the_sweep


def _is_complete(search: BatchSearch, known: Known) -> bool:
    """Whether nothing is left to measure."""
    spaces = [(search.space_of(kind), known[kind.name]) for kind in search.kinds]
    return all(found.measurements and not next_proposals(space, found) for space, found in spaces)


def _earlier_measurements(
    command: TuneCommand, search: BatchSearch, checked: Checked, inventory: Inventory
) -> tuple[Known, dict[str, Cache]]:
    """Open the search folder, and the measurements of earlier searches."""
    command.open_sweep(inventory)
    spec, sweep = command.spec, command.the_sweep
    caches = {
        kind.name: Cache(
            join(spec.save.dir, CACHE), cache_key(spec, search, checked, kind), budget=kind.budget_bytes,
            fresh=spec.tune.fresh,
        )
        for kind in search.kinds
    }  # fmt: skip
    known = {name: cache.results_with(of_kind(sweep.standing(), name)) for name, cache in caches.items()}
    count = sum(len(cache.rows) for cache in caches.values())
    if sweep.ended():
        return known, caches
    if _is_complete(search, known):
        command.print_line(f"nothing is left to measure: {count} measurements of earlier searches apply")
        paths = " ".join(path_from_here(cache.path) for cache in caches.values())
        command.print_line(f"  {paths}; --fresh measures again; search folder {path_from_here(sweep.path)}")
    elif count:
        command.print_line(f"{count} measurements of earlier searches apply; --fresh measures again")
    return known, caches


def _measure(command: TuneCommand, search: BatchSearch, checked: Checked, cluster: Cluster, known: Known) -> None:
    import ray
    from ray import cloudpickle, tune

    from jobs.driver.watch import check_room
    from jobs.tuning.batch_trials import BatchSearcher, BatchTrials, BatchTrialSettings, batch_trial
    from jobs.tuning.trials import fit
    from raytrain.execution.driver_channel import open_channel

    command.activity.begin("preparing the trials")
    print_search(command, search)
    sweep = command.the_sweep
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
        channel=channel,
    )
    reserved = {one.name: one.resources(on_gpu=search.on_gpu, local=cluster.local) for one in search.kinds}
    needs = {name: Need("scale.threads", "trial", 1, resources) for name, resources in reserved.items()}
    if not cluster.local:
        for waits in filter(None, [check_room([need]) for need in needs.values()]):
            command.print_line(waits.rstrip())
    trials = BatchTrials(
        search, known=known, needs=needs, sweep=sweep, activity=command.activity, print_line=command.print_line,
        most=command.spec.tune.max_trials,
    )  # fmt: skip
    fit(
        tune.with_parameters(batch_trial, settings=settings), trials,
        storage=command.storage(cluster),
        resources=lambda config: tune.PlacementGroupFactory([reserved[config["trial"]["kind"]]]),
        at_a_time=search.devices, signals=command.signals, channel=channel, grace_s=LEAVE_S,
        searcher=BatchSearcher(trials),
    )  # fmt: skip
    command.activity.begin("stopping Ray")


def print_search(command: TuneCommand, search: BatchSearch) -> None:
    """Print the search space before the search starts."""
    space = search.space
    sizes = ", ".join(map(str, space.sizes)) if len(space.sizes) <= 12 else f"{space.sizes[0]} to {space.sizes[-1]}"
    fixed = f"{space.rows_per_step} rows per worker and step are fixed"
    batch = "the global batch is searched too" if space.rows_per_step is None else fixed
    rooms = [
        "no memory limit is known" if one.budget_bytes is None else f"{size_text(one.budget_bytes)} for each process"
        for one in search.kinds
    ]
    named = [f"{one.devices} {one.name}, {room}" for one, room in zip(search.kinds, rooms, strict=True)]
    room = rooms[0] if len(rooms) == 1 else f"a search for each kind of device ({'; '.join(named)})"
    command.print_line(f"search: {' and '.join(space.precisions)}, micro-batches of {sizes} rows; {batch}; {room}")
    folder = path_from_here(command.the_sweep.path)
    command.print_line(f"each trial in its own process, {search.devices} at a time; search folder {folder}")


# -- the result -----------------------------------------------------------------------------------


def write_batch(command: TuneCommand, search: BatchSearch, known: Known, *, from_cache: int) -> None:
    """Decide from all measurements, then write and print the result.

    Raises:
        RunError: nothing that was measured can run.
    """
    spec, space = command.spec, search.space
    answer = answer_of(search, known)
    chosen, own, decision = answer.candidate, known[answer.binding], answer.decisions[answer.binding]
    size = chosen.micro_batch_size
    values: dict[str, Any] = {"precision.dtype": chosen.precision, "loop.micro_batch_size": size}
    reasons = {"precision.dtype": answer.precision.reason, "loop.micro_batch_size": answer.micro_batch_size.reason}
    if spec.loop.micro_batch_size == "whole":
        del values["loop.micro_batch_size"], reasons["loop.micro_batch_size"]
    if space.rows_per_step is None:
        values["loop.global_batch_size"] = size * search.workers
        reasons["loop.global_batch_size"] = f"micro-batches of {size} rows x {search.workers} workers, no accumulation"
    loaders = chosen_loaders(search, known)
    if isinstance(loaders, Resolved):
        values[LOADERS], reasons[LOADERS] = loaders.value, loaders.reason
    found = found_figures(answer, known, search)
    peak, limit = found["peak_bytes"], next(k.budget_bytes for k in search.kinds if k.name == answer.binding)
    memory = {"peak_bytes": peak, "limit_bytes": limit, "used": peak / limit if peak and limit else None}
    warnings = list(filter(None, [unsteady_warning(own), untold_warning(decision)]))
    command.write_best(values, reasons, found=found, notes="\n".join(warnings))
    advice = [*warnings, *peaks_advice(own, chosen, limit)]
    for name, one in answer.decisions.items():
        command.print_table(decision_table(one, kind=name))
    command.print_line(f"precision   {chosen.precision}: {answer.precision.reason}")
    command.print_line(f"micro-batch {size}: {answer.micro_batch_size.reason}")
    if peak and limit:
        of = f"a peak of {size_text(peak)} of the {size_text(limit)} that a process may use"
        command.print_line(f"memory      {peak / limit:.1%} used: {of}")
    told = f"{loaders.value}: {loaders.reason}" if isinstance(loaders, Resolved) else loaders.how
    for line in (f"{LOADERS} {told}", *advice):
        command.print_line(line)
    table = [
        {**asdict(row), "precision": f"{name} {row.precision}".strip()}
        for name, one in answer.decisions.items()
        for row in one.table
    ]
    line = f"{answer.binding} {chosen.precision}".strip()
    plot = batch_spec(table, sizes=space.sizes, chosen=(line, size), budget=space.budget_bytes, name=spec.name)
    kinds = {name: one.to_json() for name, one in answer.decisions.items()}
    record = {"kind": "batch", "values": values, "decision": decision.to_json(), "kinds": kinds, "found": found,
              "memory": memory, "loaders": loaders.to_json(), "advice": advice, "from_cache": from_cache}  # fmt: skip
    command.finish(record, plot)


def answer_of(search: BatchSearch, known: Known) -> KindsDecision:
    """The decision of each kind of device, and the one for all of them.

    Raises:
        RunError: on one kind, nothing that was measured can run.
    """
    decisions: dict[str, BatchDecision] = {}
    for kind in search.kinds:
        try:
            decisions[kind.name] = decide(search.space_of(kind), known[kind.name])
        except RunError as error:
            if not kind.name:
                raise
            raise RunError(f"on {kind.name}: {error}") from error
    return choose_for_all(
        decisions,
        workers={kind.name: kind.workers for kind in search.kinds},
        reference=search.space.lead,
        refused={gate.precision for one in known.values() for gate in one.gates if gate_refusal(gate)},
    )


def chosen_loaders(search: BatchSearch, known: Known) -> Choice:
    """The chosen count: the largest of all kinds of devices, so that the fastest one does not wait; Deferred says why
    there is none."""
    if search.loaders.most is None:
        return Deferred(search.loaders.reason)
    found = [choose_count(one.loaders) for one in known.values() if one.loaders is not None and one.loaders.rates]
    return max(found, key=lambda one: one.value) if found else Deferred("not measured: its trial failed")


def found_figures(answer: KindsDecision, known: Known, search: BatchSearch) -> dict[str, Any]:
    """`tune.found`: what was measured for the chosen point; `train` compares its own measurement with it."""
    chosen, own = answer.candidate, known[answer.binding]
    others = [one.signature for name, one in known.items() if name != answer.binding]
    timed = [one for one in own.measurements if one.candidate == chosen and one.pass_s]
    in_turn = [one for contest in own.contests[-1:] for one in contest if one.candidate == chosen and one.pass_s]
    rows = search.space.rows_per_step or chosen.micro_batch_size
    point = (chosen.precision, chosen.micro_batch_size)
    table = {(row.precision, row.micro_batch_size): row for row in answer.decisions[answer.binding].table}
    assert own.signature is not None, "a decision rests on a measurement"
    found = TuneFound(
        signature=own.signature["hash"],
        facts=own.signature["facts"],
        precision=chosen.precision,
        micro_batch_size=chosen.micro_batch_size,
        step_s=median(one.step_s(rows) for one in in_turn or timed),
        peak_bytes=table[point].measured_peak,
        device=(in_turn or timed)[-1].device,
        also=[one["hash"] for one in others if one is not None],
    )
    return encode(found)


def decision_table(decision: BatchDecision, *, kind: str) -> Table:
    """Every candidate that was measured on one `kind` of device, the best one marked."""
    word, rows = f"best on {kind}" if kind else "best", []
    chosen = (decision.candidate.precision, decision.candidate.micro_batch_size)
    for row in decision.table:
        taken = (row.precision, row.micro_batch_size) == chosen
        rate, noise = "", ""
        if row.rows_per_s is not None and row.low is not None and row.high is not None:
            noise = "too noisy" if row.high > (1 + STEADY) * row.low else ""
            digits = 2 if noise else 4
            speed, low, high = (figure_text(float(f"{one:.{digits}g}")) for one in (row.rows_per_s, row.low, row.high))
            rate = f"{speed} [{low}, {high}]"
        sizes = [size_text(one) if one else "" for one in (row.measured_peak, row.predicted_peak)]
        note = row.note or ", ".join(part for part in (word if taken else "", noise) if part)
        rows.append((taken, (row.precision, str(row.micro_batch_size), str(row.passes or ""), rate, *sizes, note)))
    names = ("precision", "rows", "passes", "rows/s [min, max]", "peak", "predicted", "")
    filled = [at for at in range(len(names)) if any(cells[at] for _, cells in rows)]
    columns = [Column(names[at], no_wrap=bool(names[at])) for at in filled]  # only the notes are broken, between words
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=f"on {kind}" if kind else None,
                  title_justify="left")  # fmt: skip
    for taken, cells in rows:
        table.add_row(*(escape(cells[at]) for at in filled), style="bold green" if taken else "")
    return table


def untold_warning(decision: BatchDecision) -> str:
    """A warning that precisions could not be told apart, or ""."""
    if not decision.untold:
        return ""
    chosen, others = decision.candidate.precision, " and ".join(decision.untold)
    return (
        f"the times vary too much to tell {others} from {chosen}: {chosen} stays, as train chooses where it cannot "
        "tell; search again on an idle machine (--fresh)"
    )


def unsteady_warning(known: SearchResults) -> str:
    """A warning that some times are unreliable, or ""."""
    unsteady = sum(not one.is_steady for one in known.measurements)
    if not unsteady:
        return ""
    message = f"times of {unsteady} of {len(known.measurements)} measurements vary by more than {STEADY:.0%}"
    return f"{message}, since the machine was busy; they are not cached: search again when it is idle"


def peaks_advice(known: SearchResults, chosen: Candidate, limit: int | None) -> list[str]:
    """The peak memory at half, the same and twice the chosen size."""
    own = [one for one in known.measurements if one.candidate.precision == chosen.precision]
    if not any(one.peak_bytes for one in own):
        return []
    line = line_of(own)
    peaks = [f"{size_text(line.predict(round(part * chosen.micro_batch_size)))} at {part:g}x" for part in (0.5, 1, 2)]
    room = "" if limit is None else f"; a process may use {size_text(limit)}"
    return [f"predicted peak: {', '.join(peaks)} this micro-batch{room}"]
