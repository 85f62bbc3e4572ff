"""What would need less memory: the job of a run that memory ended, planned again with one key changed.

Each remedy is a whole plan of the same machines, so that its bytes are those of the plan's own formulas, and that what
the machines or the data cannot provide, or what is in force already, is not listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.devices.inventory import inventory_from_json
from jobs.driver.planning import plan_job
from jobs.job.facts import formula_facts, shapes_of_data
from jobs.job.spec import JobSpec, load_spec, may_change_on_resume
from raytrain.errors import InputError
from raytrain.plan.batch import halved
from raytrain.plan.choice import Resolved
from raytrain.plan.memory import widest
from raytrain.plan.plan import Plan
from raytrain.runs.faults import Fault, read_faults
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

#: In the reason of a run that memory ended, where no fault says so.
RAN_OUT = re.compile(r"out ?of ?memory|not even a micro-batch", re.IGNORECASE)
#: The error of a run in which not even the smallest micro-batch fits.
NOTHING_FITS = "NothingFits"
#: A smaller saving than this fraction of a process is within the error of the estimate.
LEAST_SAVING = 0.01


def record_remedies(run: RunFolder, *, failed: bool, reason: str) -> None:
    """Write the event with the remedies of a run that memory ended; the report and the terminal show them. Nothing is
    written for other runs, and for a job with Python objects, which cannot be planned again from its records."""
    fault = next(reversed(read_faults(run, since=0)), None) if failed else None
    ran_out = bool(RAN_OUT.search(reason))
    if not failed or not run.exists(run.plan) or not (ran_out or (fault is not None and fault.out_of_memory)):
        return
    plan = Plan.from_json(run.read_json(run.plan))
    blamed = reason if ran_out or fault is None else fault.message
    process = "host_memory" if "expert host" in blamed else "memory"
    try:
        needed, found = memory_remedies(plan, *_in_force(run, plan, fault), process=process)
    except InputError:
        return
    best = found[0]["setting"] if found else "none"
    why = f"{best} is the first of {len(found)} changes that need less memory"
    run.append_event(event("memory_remedies", process=process, needed_bytes=needed, remedies=found, reason=why))


def _in_force(run: RunFolder, plan: Plan, fault: Fault | None) -> tuple[int, str]:
    """Rows of a micro-batch when memory ran out for the last time, and the precision of the last attempt."""
    rows = run.read_rows(run.events)
    attempts = [row["precision"] for row in rows if row["kind"] == "attempt"]
    sizes = [int(row["micro_batch_size"]) for row in rows if row["kind"] == "out_of_memory"]
    measured = run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}
    sizes += [int(measured["micro_batch"]["value"])] if "micro_batch" in measured else []
    sizes += [fault.micro_batch] if fault is not None and fault.micro_batch else []
    sizes += [1] if fault is not None and fault.error == NOTHING_FITS else []
    micro = min(sizes, default=int(plan.value("micro_batch_size", 1)))
    return micro, attempts[-1] if attempts else widest(plan.precision)


def memory_remedies(plan: Plan, micro: int, precision: str, *, process: str) -> tuple[int, list[dict[str, Any]]]:
    """Bytes that the process was estimated to need, and what needs less, at the end of a run with this micro-batch and
    precision. `process` is the choice of the plan with its bytes: `memory` or `host_memory`.

    A remedy is {"setting": `key=value` as it is typed, "saved_bytes": of the process, "meaning": what it changes or
    costs, "on_resume": whether `train --resume RUN` may set it}.
    """
    in_force = [f"loop.micro_batch_size={micro}", f"precision.dtype={precision}"]
    unchanged = _planned(plan, *in_force)
    needed = int(unchanged.value(process, 0) or 0)
    spec, inside, found = load_spec(mapping=plan.config).spec, unchanged.hosts.value_or(None) in ("none", 0), []
    for key, value, meaning in _changes(spec, unchanged, micro=micro, precision=precision):
        setting = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        try:
            other = _planned(plan, *in_force, setting)
        except InputError:
            continue  # this job on these machines cannot have it
        saved = needed - int(other.value(process, 0) or 0)
        if saved <= LEAST_SAVING * needed:
            continue
        # checkpoints hold experts either inside the model or by name
        on_resume = may_change_on_resume(key) and not (key == "experts.hosts" and inside)
        if key == "loop.micro_batch_size":
            count, rows = other.value("accumulation", 1), other.value("effective_batch", 0)
            meaning = f"{count} micro-batches are accumulated, so that an update still has {rows} rows"
        elif key.startswith("experts."):
            placed = other.choices()["experts"]
            text = f"experts: {placed.value_or('?')}, {getattr(placed, 'reason', '')}"
            meaning = f"{meaning}; {text}" if meaning else text
        found.append({"setting": setting, "saved_bytes": saved, "meaning": meaning, "on_resume": on_resume})
    return needed, found


def _changes(spec: JobSpec, plan: Plan, *, micro: int, precision: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it costs) of each change to try: first what computes the same update, then what rounds
    differently, then what trains another model or on other data."""
    hosts, workers = plan.hosts.value_or(None), int(plan.workers.value_or(1))
    experts = None if plan.model_facts is None else plan.model_facts.experts
    number = 0 if experts is None else len(experts.parameters[0])
    if micro > 1 and spec.loop.micro_batch_size != "whole":
        yield "loop.micro_batch_size", halved(micro), ""
    if not spec.loop.activation_checkpointing:
        why = "blocks are computed again in backward, about a third more computation"
        yield "loop.activation_checkpointing", True, why
    if workers > 1 and hosts in ("none", 0):
        yield "scale.strategy", "fsdp", f"the state is divided over the {workers} workers"
    if hosts == 0 and workers > 1:
        yield "experts.hosts", "colocated", "each worker holds a part of the experts"
    more = 2 * hosts or 2 if isinstance(hosts, int) else 0
    if 0 < more <= number:
        yield "experts.hosts", more, f"{more} processes hold the experts"
    if plan.value("storage", "") == "resident":
        yield "data.storage", "stream", "the data is read in every epoch"
    if not {precision, spec.precision.dtype} & {"bf16", "fp16"}:  # and has not fallen back from it
        yield "precision.dtype", "bf16", "products are rounded to 8 bits"
    if spec.optim.name != "sgd":
        yield "optim.name", "sgd", "without the moments of the optimizer; needs another optim.lr"
    context, width, hidden = spec.model.keys.get("context"), spec.model.keys.get("width"), spec.experts.hidden
    if isinstance(context, int) and context > 1:
        yield "model.context", context // 2, "half as many tokens in a sample"
    if number // 2 >= spec.experts.top_k and not isinstance(hidden, list):
        yield "experts.num_experts", number // 2, ""
    if hidden is None and number and isinstance(width, int):
        hidden = 4 * width
    if isinstance(hidden, int) and hidden > 1:
        yield "experts.hidden", hidden // 2, ""
    elif isinstance(hidden, list) and max(hidden) > 1:
        yield "experts.hidden", [max(1, one // 2) for one in hidden], ""


def _planned(plan: Plan, *settings: str) -> Plan:
    """The plan of the run's job with some keys changed, on its machines. Errors: InputError, they cannot have it."""
    more = ["scale.shares=equal"] if "scale.strategy=fsdp" in settings else []
    loaded = load_spec(mapping=plan.config, overrides=[*settings, *more])
    elastic = isinstance(loaded.spec.scale.workers, list | tuple)
    moved = any(setting.startswith("experts.hosts=") for setting in settings)
    return plan_job(
        loaded, inventory=inventory_from_json(plan.inventory), data_facts=plan.data_facts,
        model_facts=formula_facts(loaded.spec, shapes_of_data(loaded.spec, plan.data_facts)) or plan.model_facts,
        hosts_of_run=None if moved else plan.hosts.value_or(None),
        workers=Resolved(int(plan.workers.value_or(1)), "as in the run") if elastic else None,
    )  # fmt: skip
