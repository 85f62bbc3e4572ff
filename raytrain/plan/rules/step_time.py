"""Plan rule about time: an estimate of one step under each layout of the experts.

Pure: facts, devices and decisions in, values out. A step is counted as products, the traffic of the other operations,
a cost for each operation, the optimizer's update, reductions and exchanges, at the rates of `plan.rules.rates`. It
assumes evenly loaded experts and no overlap of computation and communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.devices.calibration import MachineRates
from cluster.devices.inventory import Inventory
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import HALF, ExpertFacts, ModelFacts
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.rules.memory import AFTER_MODEL, SHOWN_HOSTS
from raytrain.plan.rules.rates import ProcessRates, gpu_flops, name_of_slowest, rates_of
from raytrain.plan.text import seconds_text

UPDATE_BYTES = 28
"""Memory traffic per parameter of AdamW in fp32: weight, gradient and two moments read, three of them written."""

NORM_BYTES = 24
"""Memory traffic per parameter of zeroing gradients, of their norm in float64, and of clipping."""

STACK_BYTES = 24
"""Memory traffic per expert parameter in backward, which fills the gradients of stacked weights."""

STEP_S = 1.5e-3
"""Seconds of a step besides its passes and its update: data, schedule, records."""

TRIPS_PER_EXCHANGE = 8
"""Round trips' time of one exchange besides its bytes: header, sizes, and waking up the other process."""

EXCHANGED_COPIES = 3
"""Copies of exchanged rows on each side: into and out of the order of the experts, and into the message."""

MOVED_PER_KEPT = 4.0
"""Traffic of operations other than products per activation byte, where only activations are known."""

RECOMPUTED_WORK = 1.25
"""Factor on the work of a model whose blocks are computed again in backward, all but the last product of each."""

UNKNOWN_WIDTH = 128


@dataclass(frozen=True)
class StepWork:
    """The work of one optimizer step of all workers together.

    Attributes:
        trunk_flops, expert_flops: in products.
        trunk_moved, expert_moved: bytes read and written by other operations.
        operations: of one micro-batch.
        trunk_parameters, expert_parameters: which are updated.
        exchanged_bytes, exchanges: rows sent to experts, results and both gradients.
        passes: micro-batches of one worker.
        width: of a typical product.
    """

    trunk_flops: float
    expert_flops: float
    trunk_moved: float
    expert_moved: float
    operations: float
    trunk_parameters: int
    expert_parameters: int
    exchanged_bytes: float
    exchanges: int
    passes: int
    width: int


def predict_step(
    facts: ModelFacts | None, machines: DevicePool, inventory: Inventory, choices: Mapping[str, Choice], *,
    hosts: Resolved, recomputed: bool = False, measured: MachineRates | None = None, threads: int | str = "auto",
) -> Choice:  # fmt: skip
    """Seconds of a step as planned; the reason has those of the other layouts.

    Args:
        choices: strategy, precision, threads, workers, effective_batch, accumulation and, if present, shares are read.
        recomputed: `loop.activation_checkpointing`.
        measured: the calibration of these machines; None assumes rates.
        threads: `scale.threads`.
    """
    unknown = facts is not None and facts.experts is None and hosts.value not in ("none", 0)
    if facts is None or facts.flops_per_sample is None or unknown:
        return Deferred(AFTER_MODEL if facts is None else "measured in the run")
    workers, rows, accumulation = (_known(choices[name]) for name in ("workers", "effective_batch", "accumulation"))
    dtype = str(choices["precision"].candidates[-1])
    unequal = isinstance(choices.get("shares"), Deferred)
    if machines.on_gpu and gpu_flops(machines, dtype, unequal=unequal) is None:
        return Deferred("measured in the run", (), f"the peak rate is unknown for {name_of_slowest(machines)}")
    work = work_of(facts, rows=rows, passes=accumulation, dtype=dtype, recomputed=recomputed)

    def rates(processes: int) -> ProcessRates:
        each = threads_of(inventory, processes=processes, configured=threads)
        return rates_of(
            machines, inventory, dtype, processes=processes, threads=each, width=work.width, unequal=unequal,
            measured=measured,
        )  # fmt: skip

    found: dict[str, float] = {}
    for name, number in _layouts(hosts, machines, workers=workers, has_experts=facts.experts is not None).items():
        shared = name != "data_parallel"
        found[name] = layout_seconds(work, rates(workers + number), workers=workers, hosts=number, shared=shared)
    planned = found[layout_name(hosts)]
    if isinstance(way := choices.get("strategy"), Resolved) and way.value == "fsdp":
        calls = accumulation * (1 + len(facts.blocks or (0,)))
        planned = found["fsdp"] = sharded_seconds(work, rates(workers), workers=workers, collectives=calls)
    each = ", ".join(f"{name} {seconds_text(spent)}" for name, spent in found.items())
    return Resolved(planned, f"estimated, not measured: {each}; {rates(workers).source}")


def work_of(facts: ModelFacts, *, rows: int, passes: int, dtype: str, recomputed: bool) -> StepWork:
    """The work of a step of `rows` rows in `passes` micro-batches of each worker."""
    experts = facts.experts or ExpertFacts((), 0, 0, 0, 0)
    traced = facts.passes is not None and facts.passes.recomputed_bytes == facts.passes.full_bytes  # with it
    again = RECOMPUTED_WORK if recomputed and not traced else 1.0
    total = again * (facts.flops_per_sample or 0.0) * rows
    routed = again * experts.flops_per_sample * rows
    kept = facts.activation_bytes_per_sample or 0
    moved = facts.passes.moved_bytes if facts.passes is not None else MOVED_PER_KEPT * kept
    of_experts = MOVED_PER_KEPT * len(experts.parameters) * experts.rows_per_sample * experts.kept_bytes_per_row
    wide = 2 if dtype == "fp64" else 1
    there, ways = len(experts.parameters) * experts.rows_per_sample * rows * experts.row_bytes, 4
    return StepWork(
        trunk_flops=max(0.0, total - routed),
        expert_flops=routed,
        trunk_moved=wide * again * rows * max(0.0, moved - of_experts),
        expert_moved=wide * again * rows * min(moved, of_experts),
        operations=again * (facts.passes.operations if facts.passes is not None else 0),
        trunk_parameters=facts.parameters - experts.total,
        expert_parameters=experts.total,
        exchanged_bytes=ways * wide * there / (2 if dtype in HALF else 1),
        exchanges=ways * len(experts.parameters) * passes,
        passes=passes,
        width=facts.passes.width if facts.passes is not None else UNKNOWN_WIDTH,
    )


def layout_seconds(
    work: StepWork, rates: ProcessRates, *, workers: int, hosts: int, shared: bool,
    of_hosts: ProcessRates | None = None,
) -> float:  # fmt: skip
    """Seconds of a step.

    Args:
        rates: of every process.
        of_hosts: of the hosts, where they are on other devices than the workers.
        hosts: number of expert hosts; 0: the workers hold the experts.
        shared: each expert is in one process only.
    """
    holders = hosts or workers
    reduced = work.trunk_parameters + (0 if shared else work.expert_parameters)
    update = (UPDATE_BYTES + NORM_BYTES) / rates.memory
    spent = STEP_S + work.trunk_flops / (rates.share(workers) * rates.flops)
    spent += work.trunk_moved / (rates.share(workers) * rates.elementwise)
    spent += work.passes * work.operations * rates.operation_s * workers / rates.share(workers)
    if workers > 1:
        spent += 2 * (workers - 1) / workers * 4 * reduced / rates.wire + TRIPS_PER_EXCHANGE * rates.trip_s
    holding = of_hosts or rates
    computed = work.expert_flops / holding.flops + work.expert_moved / holding.elementwise
    stacked = STACK_BYTES * work.expert_parameters / holding.memory
    if not shared:  # each worker fills and updates all of them
        filled = stacked + reduced * update
        return spent + computed / rates.share(workers) + filled * workers / rates.share(workers)
    spent += (computed + stacked) / holding.share(holders)
    away = 1.0 if hosts else (holders - 1) / holders  # a worker's own experts need no message
    busy = rates.share(workers + hosts)  # both ends of an exchange work on it
    spent += work.exchanges * TRIPS_PER_EXCHANGE * rates.trip_s * max(1.0, (workers + hosts) / busy)
    spent += away * work.exchanged_bytes / (min(workers, holders) * rates.wire)
    spent += EXCHANGED_COPIES * work.exchanged_bytes / (min(workers, busy) * rates.memory)
    own, theirs = work.trunk_parameters * update, work.expert_parameters / holders * update
    spent += max(own, theirs) if hosts else own + theirs
    return spent + 2 * TRIPS_PER_EXCHANGE * rates.trip_s  # the vote


def layout_name(hosts: Resolved) -> str:
    """The layout that a value of `experts.hosts` means, as the plan names it."""
    if hosts.value in ("none", 0):
        return "data_parallel"
    if isinstance(hosts.value, int):
        return f"{hosts.value} hosts"
    return "colocated" if hosts.value == "colocated" else f"{sum(hosts.value.values())} hosts"


def threads_of(inventory: Inventory, *, processes: int, configured: int | str = "auto") -> int:
    """CPU threads of each of `processes` processes that share the cores of the machines; `configured` is
    `scale.threads`."""
    return configured if isinstance(configured, int) else max(1, inventory.cpus // processes)


def _known(choice: Choice) -> int:
    assert isinstance(choice, Resolved)
    return int(choice.value)


def _layouts(hosts: Resolved, machines: DevicePool, *, workers: int, has_experts: bool) -> dict[str, int]:
    """Layout -> processes besides the workers: those that the machines can run, with the planned one."""
    found = {"data_parallel": 0}
    if not has_experts:
        return found
    if workers > 1:
        found["colocated"] = 0
    free = len(machines.gpus) - workers if machines.on_gpu else SHOWN_HOSTS
    planned = hosts.value if isinstance(hosts.value, int) else 0
    for number in {2, planned} - {0}:
        if number <= free or number == planned:
            found[f"{number} hosts"] = number
    if layout_name(hosts) not in found:
        found[layout_name(hosts)] = sum(hosts.value.values()) if isinstance(hosts.value, dict) else 0
    return found


def sharded_seconds(work: StepWork, rates: ProcessRates, *, workers: int, collectives: int) -> float:
    """Seconds of a step under FSDP: weights are gathered twice per pass and gradients reduce-scattered once, each in
    `collectives` calls."""
    parameters = work.trunk_parameters + work.expert_parameters
    busy = rates.share(workers)
    spent = STEP_S + (work.trunk_flops + work.expert_flops) / (busy * rates.flops)
    spent += (work.trunk_moved + work.expert_moved) / (busy * rates.elementwise)
    spent += work.passes * work.operations * rates.operation_s * workers / busy
    spent += STACK_BYTES * work.expert_parameters / rates.memory * workers / busy  # gathered on each worker
    if workers > 1:
        moved = work.passes * (workers - 1) / workers * 4 * parameters
        spent += 3 * (moved / rates.wire + collectives * TRIPS_PER_EXCHANGE * rates.trip_s)
    return spent + parameters / workers * (UPDATE_BYTES + NORM_BYTES) / rates.memory
