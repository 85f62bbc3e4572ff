"""Strategies of a job: every way to distribute it over the machines, with its predicted step time and its memory.

Pure: facts, sections, devices and rates in, values out. The times come from `plan.rules.step_time`, the bytes from
`plan.rules.memory`; nothing here decides. The plan marks the strategy that was chosen and says why it was not a faster
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.config import ClusterConfig
from cluster.devices.calibration import MachineRates
from cluster.devices.inventory import Inventory
from cluster.wording import counted
from raytrain.config.sections import LoopConfig, OptimConfig, PrecisionConfig, ScaleConfig
from raytrain.plan.choice import Choice, Resolved
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.rules.devices import DevicePool, choose_precision
from raytrain.plan.rules.fsdp import precision_under_fsdp
from raytrain.plan.rules.hosts import number_of_hosts
from raytrain.plan.rules.layouts import CPU_HOSTS, WORTH, pools, seconds_of_layout, slow_kind
from raytrain.plan.rules.memory import ShareOut, estimate_bytes
from raytrain.plan.rules.rates import gpu_flops, rates_of
from raytrain.plan.rules.step_time import sharded_seconds, threads_of, work_of
from raytrain.plan.rules.workers import CPU_OVERLOAD, GPU_THREADS, allowed_bytes
from raytrain.plan.text import host_kinds_text, seconds_text, size_text

UNDER_LOAD = "rates were measured while other processes used the cores, so times of strategies are not compared"
"""Why a prediction is no reason to add processes."""


TIE = 0.97
"""Predictions are not exact enough to tell a strategy from one that takes this fraction of its time or more."""


@dataclass(frozen=True)
class Strategy:
    """One way to distribute a job.

    Attributes:
        name: for people, such as "2 workers, 2 expert hosts".
        workers: training processes. hosts: a value of `experts.hosts`; "none" for a dense model.
        sharded: `scale.strategy: fsdp`.
        threads: CPU threads of each process.
        seconds: predicted time of a step; None where it cannot be predicted.
        memory: predicted bytes of a worker's device (on a CPU, of the worker). host_memory: the same of the fullest
            expert host; None without hosts, both None where unknown.
        fits: whether the bytes are within what `cluster.memory_fraction` and `memory_limit` allow; None where unknown.
        comparable: the rates were not measured under load.
        chosen: the plan uses this one.
        keys: the keys of a job that select it.
    """

    name: str
    workers: int
    hosts: Any
    sharded: bool
    threads: int
    seconds: float | None
    memory: int | None
    host_memory: int | None
    fits: bool | None
    comparable: bool
    keys: Mapping[str, Any]
    chosen: bool = False
    reason: str = ""

    @property
    def processes(self) -> int:
        """Workers and expert hosts together."""
        return self.workers + number_of_hosts(self.hosts)

    @property
    def keys_text(self) -> str:
        """The keys as on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.keys.items())

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {**asdict(self), "keys": dict(self.keys)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Strategy:
        """The inverse of `to_json`."""
        return cls(**row)


@dataclass(frozen=True)
class StrategyInputs:
    """What the predictions of a job's strategies are made from; `facts` are None until the model was built."""

    facts: ModelFacts | None
    data: DataFacts | None
    optim: OptimConfig
    precision: PrecisionConfig
    loop: LoopConfig
    scale: ScaleConfig
    cluster: ClusterConfig
    machines: DevicePool
    inventory: Inventory
    rows: int
    measured: MachineRates | None
    share_out: ShareOut | None

    @property
    def comparable(self) -> bool:
        """Whether predictions for different numbers of processes may be compared."""
        return self.machines.on_gpu or self.measured is None or not self.measured.busy

    def micro_batch(self, workers: int) -> int:
        """Rows of a micro-batch with this number of workers: as configured, else a worker's share of the batch."""
        configured = self.loop.micro_batch_size
        return configured if isinstance(configured, int) else math.ceil(self.rows / workers)

    def accumulation(self, workers: int) -> int:
        """Micro-batches of the busiest worker in a step."""
        return math.ceil(math.ceil(self.rows / self.micro_batch(workers)) / workers)

    def precision_of(self, *, sharded: bool) -> Choice:
        """The number format, which FSDP does not measure."""
        by_device = choose_precision(self.precision, self.machines, self.inventory, [])
        scale = self.scale.model_copy(update={"strategy": "fsdp"}) if sharded else self.scale
        return precision_under_fsdp(scale, by_device, on_gpu=self.machines.on_gpu) if sharded else by_device

    def threads(self, processes: int) -> int:
        """CPU threads of each of `processes` processes."""
        found = threads_of(self.inventory, processes=processes, configured=self.scale.threads)
        return min(found, GPU_THREADS) if self.machines.on_gpu and self.scale.threads == "auto" else found

    def memory(
        self, hosts: Any, workers: int, *, sharded: bool = False, resident: int = 0
    ) -> tuple[int | None, int | None, bool | None]:
        """(bytes of a worker, bytes of the fullest host, whether they fit); None for what is unknown."""
        own, theirs = pools(self.machines, hosts, self.inventory)
        found = estimate_bytes(
            self.facts, self.optim, precision=self.precision_of(sharded=sharded), micro=self.micro_batch(workers),
            resident=resident, on_gpu=self.machines.on_gpu, workers=workers, hosts=Resolved(hosts, ""),
            share_out=self.share_out, sharded=sharded, recomputed=bool(self.loop.activation_checkpointing),
            data=self.data,
        )  # fmt: skip
        needed, of_host = (found[name].value_or(None) for name in ("memory", "host_memory"))
        if needed is None:
            return None, of_host, None
        allowed = allowed_bytes(self.cluster, own, self.inventory, workers=workers)
        if not self.machines.on_gpu:  # on a CPU all processes of a node share its memory
            total = needed + (of_host or 0) * number_of_hosts(hosts) // workers
            return needed, of_host, None if allowed is None else total <= allowed
        room = allowed_bytes(self.cluster, theirs or self.machines, self.inventory, workers=1)
        if of_host is not None and room is not None and of_host > room:
            return needed, of_host, False
        return needed, of_host, None if allowed is None else needed <= allowed

    def seconds(self, hosts: Any, workers: int, *, sharded: bool = False) -> float | None:
        """Predicted seconds of a step; None where sizes or rates are unknown."""
        facts = self.facts
        dtype = str(self.precision_of(sharded=sharded).candidates[-1])
        if facts is None or facts.flops_per_sample is None or (facts.experts is None and hosts not in ("none", 0)):
            return None
        if self.machines.on_gpu and gpu_flops(self.machines, dtype, unequal=False) is None:
            return None
        passes = self.accumulation(workers)
        again = bool(self.loop.activation_checkpointing)
        work = work_of(facts, rows=self.rows, passes=passes, dtype=dtype, recomputed=again)
        if not sharded:
            return seconds_of_layout(
                work, dtype, hosts, workers, self.machines, self.inventory, self.scale, self.measured
            )
        threads = threads_of(self.inventory, processes=workers, configured=self.scale.threads)
        rates = rates_of(
            self.machines, self.inventory, dtype, processes=workers, threads=threads, width=work.width, unequal=False,
            measured=self.measured,
        )  # fmt: skip
        return sharded_seconds(work, rates, workers=workers, collectives=passes * (1 + len(facts.blocks or (0,))))


Way = tuple[Any, int, bool]
"""(value of `experts.hosts`, workers, sharded)."""


def strategies_of(
    inputs: StrategyInputs, *, planned: Way, workers: Resolved, asked_hosts: Any, step_time: Choice,
    resident: int,
) -> tuple[Strategy, ...]:  # fmt: skip
    """Every strategy that could be used on these machines, by predicted time; the one of the plan is marked and says
    why it is not a faster one. Empty where the sizes of the model are unknown.

    Args:
        planned: what the plan uses.
        workers: the choice of the plan, for its reason. asked_hosts: `experts.hosts`; None for a dense model.
        step_time: the plan's prediction of a step, which the chosen strategy shows.
        resident: bytes of data that each worker keeps on its device.
    """
    if inputs.facts is None:
        return ()
    ways = [planned, *(way for way in candidates(inputs) if way != planned)]
    if inputs.loop.micro_batch_size == "whole":
        ways = [way for way in ways if way[1] == 1]
    found = [_predicted(inputs, way, resident=resident) for way in ways]
    chosen = replace(found[0], chosen=True, seconds=step_time.value_or(found[0].seconds))
    others = [replace(one, reason=_against(one, chosen)) for one in found[1:]]
    chosen = replace(chosen, reason=_why(chosen, others, inputs, workers=workers, asked_hosts=asked_hosts))
    return tuple(sorted([chosen, *others], key=_order))


def candidates(inputs: StrategyInputs) -> list[Way]:
    """What these machines can run: one process, several data-parallel or FSDP workers, and for a model with experts
    those with the experts in the workers' shards or on expert hosts."""
    facts, machines, cores = inputs.facts, inputs.machines, inputs.inventory.cpus
    experts = None if facts is None else facts.experts
    local = "none" if experts is None else 0
    nodes = max(1, sum(node.cpus > 0 for node in inputs.inventory.nodes))
    counts = {1, len(machines.gpus)} if machines.on_gpu else {1, nodes, min(2, cores), cores}
    counts = {count for count in counts if 1 <= count <= inputs.rows}
    found: list[Way] = [(local, count, False) for count in sorted(counts)]
    found += [(local, count, True) for count in sorted(counts) if count > 1]
    if experts is None or inputs.scale.sync_batchnorm:
        return found
    number = min(map(len, experts.parameters), default=0)
    found += [("colocated", count, False) for count in sorted(counts) if 1 < count <= number]
    return found + [way for way in _on_hosts(inputs, sorted(counts)) if number_of_hosts(way[0]) <= number]


def _on_hosts(inputs: StrategyInputs, counts: Sequence[int]) -> list[Way]:
    machines, cores = inputs.machines, inputs.inventory.cpus
    if not machines.on_gpu:
        fewest, most = counts[0], CPU_OVERLOAD * cores
        wanted = [count for count in counts if count in (fewest, min(2, cores))]
        return [(CPU_HOSTS, count, False) for count in wanted if cores >= CPU_HOSTS and count + CPU_HOSTS <= most]
    gpus, dtype = len(machines.gpus), str(inputs.precision_of(sharded=False).candidates[-1])
    numbers = sorted({1, gpus // 2} - {0, gpus})
    found: list[Way] = [(number, gpus - number, False) for number in numbers if gpus - number <= inputs.rows]
    slow = slow_kind(machines, dtype)
    if slow is not None:
        kind, number = slow
        found.append(({kind: number}, gpus - number, False))
    return found


def _predicted(inputs: StrategyInputs, way: Way, *, resident: int) -> Strategy:
    hosts, workers, sharded = way
    memory, host_memory, fits = inputs.memory(hosts, workers, sharded=sharded, resident=resident)
    keys: dict[str, Any] = {"scale.workers": workers}
    if sharded:
        keys["scale.strategy"] = "fsdp"
    elif hosts != "none":
        keys["experts.hosts"] = hosts
    return Strategy(
        _name(hosts, workers, sharded=sharded), workers, hosts, sharded,
        inputs.threads(workers + number_of_hosts(hosts)), inputs.seconds(hosts, workers, sharded=sharded), memory,
        host_memory, fits, inputs.comparable, keys,
    )  # fmt: skip


def _name(hosts: Any, workers: int, *, sharded: bool) -> str:
    if sharded:
        return counted(workers, "FSDP worker")
    if hosts == "colocated":
        return f"{counted(workers, 'worker')}, experts in shards"
    if isinstance(hosts, dict):
        kinds = host_kinds_text(hosts)
        return f"{counted(workers, 'worker')}, experts on {kinds}"
    if hosts in ("none", 0):
        return "1 process" if workers == 1 else f"{workers} data-parallel workers"
    return f"{counted(workers, 'worker')}, {counted(hosts, 'expert host')}"


def _order(one: Strategy) -> tuple[bool, float, int]:
    """By predicted time; without comparable times the chosen one first, then by processes."""
    if not one.comparable:
        return not one.chosen, 0.0, one.processes
    return one.seconds is None, one.seconds or 0.0, one.processes


def _against(one: Strategy, chosen: Strategy) -> str:
    """What speaks against or for a strategy that was not chosen."""
    if one.fits is False:
        return f"does not fit the memory; {one.keys_text}"
    if not one.comparable:
        return f"not compared; {one.keys_text}"
    if one.seconds is None or not chosen.seconds:
        return one.keys_text
    return f"{one.seconds / chosen.seconds:.2f} times the chosen one's time; {one.keys_text}"


def _why(
    chosen: Strategy, others: Sequence[Strategy], inputs: StrategyInputs, *, workers: Resolved, asked_hosts: Any
) -> str:
    """Why the plan uses `chosen`, and not a strategy that is predicted to be faster."""
    given = [key for key, value in _given(inputs.scale, asked_hosts).items() if value]
    how = f"set by {' and '.join(given)}" if given else "chosen by auto"
    if inputs.measured is None and not inputs.machines.on_gpu:
        how += ", with assumed rates until a run has measured this machine"
    if chosen.fits is False:
        fitting = [one for one in others if one.fits]
        instead = f"; {fitting[0].keys_text} fits" if fitting else ""
        return f"{how}, and does not fit the memory{instead}"
    if not chosen.comparable:
        return f"{how}; {UNDER_LOAD}"
    timed = [one for one in others if one.fits is not False and one.seconds is not None]
    if chosen.seconds is None or not timed:
        return how
    best = min(timed, key=lambda one: one.seconds or 0.0)
    assert best.seconds is not None
    if best.seconds > TIE * chosen.seconds:
        tied = "" if best.seconds >= chosen.seconds else f", with {best.name}"
        return f"{how}: predicted to be the fastest of those that fit{tied}"
    faster = [one for one in timed if not one.sharded and (one.seconds or 0.0) <= TIE * chosen.seconds]
    if not given and faster:  # what auto could have taken
        best = min(faster, key=lambda one: one.seconds or 0.0)
        assert best.seconds is not None
    saved = f"{best.name} would save {_saved(best.seconds / chosen.seconds)} of {seconds_text(chosen.seconds)}"
    return f"{how}; {saved}" if given else f"{how}: {saved}, but {_limit(chosen, best, inputs, workers=workers)}"


def _saved(ratio: float) -> str:
    """What is saved at this ratio of the times, as a percentage that is not rounded up to what `WORTH` asks for."""
    saved = 1 - ratio
    rounded_up = ratio >= WORTH and f"{saved:.0%}" == f"{1 - WORTH:.0%}"
    return f"{math.floor(1000 * saved) / 10:.1f}%" if rounded_up else f"{saved:.0%}"


def _limit(chosen: Strategy, best: Strategy, inputs: StrategyInputs, *, workers: Resolved) -> str:
    """The rule by which `auto` did not take `best`."""
    if best.sharded:
        return "auto uses FSDP only when scale.strategy asks for it: it saves memory, and cannot split a micro-batch"
    assert best.seconds is not None and chosen.seconds is not None
    if best.workers > chosen.workers and not inputs.machines.on_gpu:
        each = "" if best.memory is None else f" of {size_text(best.memory)}"
        return f"auto adds no workers on CPUs, where each is a further process{each}; {best.keys_text} takes it"
    if best.processes > chosen.processes and best.seconds >= WORTH * chosen.seconds:
        return f"more processes must save more than {1 - WORTH:.0%}"
    if best.workers < chosen.workers:
        return f"auto uses {workers.reason.partition(';')[0]}; {best.keys_text} takes it"
    return f"auto compares where experts are with {counted(chosen.workers, 'worker')}; {best.keys_text} takes it"


def _given(scale: ScaleConfig, asked_hosts: Any) -> dict[str, bool]:
    """The keys that decided instead of `auto`."""
    return {
        "scale.workers": scale.workers != "auto",
        "scale.strategy": scale.strategy != "auto",
        "experts.hosts": asked_hosts not in (None, "auto"),
    }
