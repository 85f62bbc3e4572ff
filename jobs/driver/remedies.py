"""What would need less memory, or less time for a row: the job of a run, planned again with one key changed.

Each remedy is a whole plan of the same machines, so that its bytes and seconds are those of the plan's own formulas,
and that what the machines or the data cannot provide, or what is in force already, is not listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from cluster.devices.calibration import MachineRates
from cluster.devices.inventory import Inventory, inventory_from_json
from jobs.driver.plan import kept_rates, plan_job
from jobs.job.facts import facts_of_model, shapes_of_data
from jobs.job.spec import JobSpec, load_spec, may_change_on_resume
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.rules.memory import widest
from raytrain.runs.faults import Fault, read_faults
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event
from raytrain.train.memory.micro_batch import halved

#: In the reason of a run that memory ended, where no fault says so.
RAN_OUT = re.compile(r"out ?of ?memory|not even a micro-batch", re.IGNORECASE)
#: The error of a run in which not even the smallest micro-batch fits.
NOTHING_FITS = "NothingFits"
#: A smaller saving than this fraction of a process is within the error of the estimate.
LEAST_SAVING = 0.01
#: A smaller gain in speed is within the error of the prediction.
LEAST_GAIN = 1.15


@dataclass(frozen=True)
class MemoryRemedy:
    """One change of the job, and what it saves.

    Attributes:
        setting: `key=value`, as it is typed on the command line.
        saved_bytes: of the process that ran out of memory.
        meaning: what it changes or costs.
        on_resume: `train --resume RUN` may set it; otherwise it needs a new run.
    """

    setting: str
    saved_bytes: int
    meaning: str
    on_resume: bool


@dataclass(frozen=True)
class _Change:
    """A candidate: `level` 0 computes the same update, 1 rounds differently, 2 trains something else."""

    key: str
    value: Any
    level: int
    meaning: str
    from_formula: bool = False  # the sizes of the model change with it

    @property
    def setting(self) -> str:
        return f"{self.key}={self.value if isinstance(self.value, str) else json.dumps(self.value)}"


@dataclass(frozen=True)
class SpeedRemedy:
    """One change of the job, and how much faster it computes a row.

    Attributes:
        settings: `key=value`s, as they are typed on the command line.
        ratio: predicted rows per second, relative to the run's.
        meaning: what it changes or costs.
    """

    settings: str
    ratio: float
    meaning: str


@dataclass(frozen=True)
class PlannedRun:
    """A run with what was in force at its end, which is planned again.

    Attributes:
        plan: of the run.
        spec: its job.
        micro: rows of a micro-batch; where memory ran out, when it did so for the last time.
        precision: in which it computed.
        rates: measured on this machine; None for other machines, or without a measurement.
        process: the choice of the plan with the bytes of the process that ran out: `memory` or `host_memory`.
    """

    plan: Plan
    spec: JobSpec
    micro: int
    precision: str
    rates: MachineRates | None = None
    process: str = "memory"

    def speed_remedies(self) -> list[SpeedRemedy]:
        """What computes a row faster at the rates that were measured on this machine, the best first.

        Empty where no rates were measured. A change whose plan has a new warning, such as one of memory, is left out.
        """
        plan = self._unchanged
        if self.rates is None or self._inventory.devices() or plan is None or not (before := self._rows_per_s(plan)):
            return []
        rows = int(plan.value("effective_batch", 0))
        found = []
        if self.precision == self.spec.precision.dtype == "fp32":  # `auto` has compared them, a fall-back has a reason
            change = _Change("precision.dtype", "bf16", 1, "products are rounded to 8 bits; `auto` compares the losses")
            found.append((change, ()))
        change = _Change("loop.global_batch_size", 2 * rows, 2, "another training: optim.lr may have to follow")
        found.append((change, (f"loop.micro_batch_size={2 * self.micro}",)))
        remedies = []
        for change, more in found:
            other = self._planned(change, *more)
            if other is None or len(other.warnings) > len(plan.warnings) or not (after := self._rows_per_s(other)):
                continue
            if after >= LEAST_GAIN * before:
                remedies.append(SpeedRemedy(" ".join([change.setting, *more]), after / before, change.meaning))
        return sorted(remedies, key=lambda one: -one.ratio)

    def _rows_per_s(self, plan: Plan) -> float | None:
        seconds = plan.value("step_time", None)
        return plan.value("effective_batch", 0) / seconds if seconds else None

    def memory_remedies(self) -> tuple[int, list[MemoryRemedy]]:
        """Bytes that the process was estimated to need, and what needs less, the best first.

        What computes the same update comes before what rounds differently, and that before what trains another model
        or on other data; of each kind, the largest saving comes first.
        """
        found = []
        for change in self._changes():
            plan = self._planned(change)
            base = self._unchanged if not change.from_formula else self._unchanged_by_formula
            if plan is None or base is None:
                continue
            saved = self._bytes(base) - self._bytes(plan)
            if saved > LEAST_SAVING * self._bytes(base):
                found.append((change, saved, self._meaning(change, plan)))
        found.sort(key=lambda one: (one[0].level, -one[1]))
        remedies = [
            MemoryRemedy(change.setting, saved, meaning, self._on_resume(change)) for change, saved, meaning in found
        ]
        return (0 if self._unchanged is None else self._bytes(self._unchanged)), remedies

    def _on_resume(self, change: _Change) -> bool:
        """Whether `--resume` may set it; checkpoints hold experts either inside the model or by name."""
        inside = self.plan.hosts.value_or(None) in ("none", 0)
        return may_change_on_resume(change.key) and not (change.key == "experts.hosts" and inside)

    def _bytes(self, plan: Plan) -> int:
        return int(plan.value(self.process, 0) or 0)

    def _changes(self) -> Iterator[_Change]:
        spec = self.spec
        if self.micro > 1 and spec.loop.micro_batch_size != "whole":
            yield _Change("loop.micro_batch_size", halved(self.micro), 0, "")
        if not spec.loop.activation_checkpointing:
            why = "blocks are computed again in backward, about a third more computation"
            yield _Change("loop.activation_checkpointing", True, 0, why)
        if self._workers > 1 and self.plan.hosts.value_or(None) in ("none", 0):
            yield _Change("scale.strategy", "fsdp", 0, f"the state is divided over the {self._workers} workers")
        if self.plan.value("storage", "") == "resident":
            yield _Change("data.storage", "stream", 0, "the data is read in every epoch")
        if not {self.precision, spec.precision.dtype} & {"bf16", "fp16"}:  # and has not fallen back from it
            yield _Change("precision.dtype", "bf16", 1, "products are rounded to 8 bits")
        yield from self._other_hosts()
        if spec.optim.name != "sgd":
            yield _Change("optim.name", "sgd", 2, "without the moments of the optimizer; needs another optim.lr")
        context = spec.model.keys.get("context")
        if isinstance(context, int) and context > 1:
            yield _Change("model.context", context // 2, 2, "half as many tokens in a sample", from_formula=True)
        yield from self._smaller_experts()

    def _other_hosts(self) -> Iterator[_Change]:
        """Expert hosts, or more of them: each holds fewer experts."""
        facts = None if self.plan.model_facts is None else self.plan.model_facts.experts
        now = self.plan.hosts.value_or(None)
        if facts is None or not isinstance(now, int):
            return
        if now == 0 and self._workers > 1:
            yield _Change("experts.hosts", "colocated", 0, "each worker holds a part of the experts")
        number = 2 * now if now else 2
        if number <= len(facts.parameters[0]):
            yield _Change("experts.hosts", number, 0, f"{number} processes hold the experts")

    def _smaller_experts(self) -> Iterator[_Change]:
        facts = None if self.plan.model_facts is None else self.plan.model_facts.experts
        if facts is None:
            return
        number, experts = len(facts.parameters[0]), self.spec.experts
        if number // 2 >= experts.top_k and not isinstance(experts.hidden, list):
            yield _Change("experts.num_experts", number // 2, 2, "", from_formula=True)
        hidden: Any = experts.hidden
        width = self.spec.model.keys.get("width")
        if hidden is None and isinstance(width, int):
            hidden = 4 * width
        if isinstance(hidden, int) and hidden > 1:
            yield _Change("experts.hidden", hidden // 2, 2, "", from_formula=True)
        elif isinstance(hidden, list) and max(hidden) > 1:
            yield _Change("experts.hidden", [max(1, one // 2) for one in hidden], 2, "", from_formula=True)

    def _meaning(self, change: _Change, plan: Plan) -> str:
        if change.key == "loop.micro_batch_size":
            count, rows = plan.value("accumulation", 1), plan.value("effective_batch", 0)
            return f"{count} micro-batches are accumulated, so that an update still has {rows} rows"
        if change.key == "experts.hosts" or (change.from_formula and change.key.startswith("experts.")):
            placed = plan.choices()["experts"]
            text = f"experts: {placed.value_or('?')}, {getattr(placed, 'reason', '')}"
            return f"{change.meaning}; {text}" if change.meaning else text
        return change.meaning

    @property
    def _workers(self) -> int:
        return int(self.plan.workers.value_or(1))

    @cached_property
    def _inventory(self) -> Inventory:
        return inventory_from_json(self.plan.inventory)

    @cached_property
    def _unchanged(self) -> Plan | None:
        return self._planned(None)

    @cached_property
    def _unchanged_by_formula(self) -> Plan | None:
        """By the formula alone, which sizes a model that was not built the same way."""
        return self._planned(_Change("loop.micro_batch_size", self.micro, 0, "", from_formula=True))

    def _planned(self, change: _Change | None, *more: str) -> Plan | None:
        """The plan of the job with a change; None where it does not exist: the machines or the data forbid it, or the
        sizes of the model are unknown."""
        settings = [f"loop.micro_batch_size={self.micro}", f"precision.dtype={self.precision}"]
        settings += [] if change is None else [change.setting, *more]
        if change is not None and change.key == "scale.strategy":
            settings.append("scale.shares=equal")
        try:
            loaded = load_spec(mapping=self.plan.config, overrides=settings)
            data = self.plan.data_facts
            facts = self.plan.model_facts
            if change is not None and change.from_formula:
                facts = facts_of_model(loaded.spec, shapes_of_data(loaded.spec, data))
                if facts is None:
                    return None
            keeps = change is None or change.key != "experts.hosts"
            hosts = self.plan.hosts.value_or(None) if keeps else None
            elastic = isinstance(self.spec.scale.workers, list | tuple)
            return plan_job(
                loaded, inventory=self._inventory, model_facts=facts, data_facts=data, hosts_of_run=hosts,
                rates=self.rates, workers=Resolved(self._workers, "as in the run") if elastic else None,
            )  # fmt: skip
        except InputError:
            return None  # this job on these machines cannot have it


def planned_run_of(run: RunFolder) -> PlannedRun | None:
    """The run as its records show it; None without a plan, or if its job has Python objects and cannot be planned again
    from them."""
    if not run.exists(run.plan):
        return None
    plan = Plan.from_json(run.read_json(run.plan))
    try:
        spec = load_spec(mapping=plan.config).spec
    except InputError:
        return None
    rows = run.read_rows(run.events)
    attempts = [row["precision"] for row in rows if row["kind"] == "attempt"]
    sizes = [int(row["micro_batch_size"]) for row in rows if row["kind"] == "out_of_memory"]
    measured = run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}
    sizes += [int(measured["micro_batch"]["value"])] if "micro_batch" in measured else []
    fault = _last_of(read_faults(run, since=0))
    sizes += [fault.micro_batch] if fault is not None and fault.micro_batch else []
    sizes += [1] if fault is not None and fault.error == NOTHING_FITS else []
    return PlannedRun(
        plan=plan, spec=spec, rates=kept_rates(inventory_from_json(plan.inventory)),
        micro=min(sizes, default=int(plan.value("micro_batch_size", 1))),
        precision=attempts[-1] if attempts else widest(plan.precision),
    )  # fmt: skip


def _last_of(faults: Sequence[Fault]) -> Fault | None:
    return faults[-1] if faults else None


def record_remedies(run: RunFolder, *, failed: bool, reason: str) -> None:
    """Write the event with the remedies of a run that memory ended, or of one that was only slow; the report and the
    terminal show them.

    Args:
        failed: whether the run failed, and not because it was stopped.
        reason: why it ended.
    """
    fault = _last_of(read_faults(run, since=0)) if failed else None
    of_memory = failed and bool(RAN_OUT.search(reason) or (fault is not None and fault.out_of_memory))
    if (failed and not of_memory) or (planned := planned_run_of(run)) is None:
        return
    if not of_memory:
        remedies = [asdict(one) for one in planned.speed_remedies()]
        if remedies:
            why = f"{remedies[0]['settings']} is predicted to be {remedies[0]['ratio']:.2g} times as fast"
            run.append_event(event("speed_remedies", remedies=remedies, reason=why))
        return
    blamed = reason if RAN_OUT.search(reason) or fault is None else fault.message
    planned = replace(planned, process="host_memory" if "expert host" in blamed else "memory")
    needed, found = planned.memory_remedies()
    listed, best = [asdict(one) for one in found], found[0].setting if found else "none"
    why = f"{best} is the best of {len(found)} changes that need less memory"
    run.append_event(
        event("memory_remedies", process=planned.process, needed_bytes=needed, remedies=listed, reason=why)
    )
