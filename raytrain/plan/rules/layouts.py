"""Plan rule about `experts.hosts: auto`: the layout of the experts that is predicted to be the fastest among those that
fit.

Pure: facts, sections, machines and rates in, a choice out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.devices.calibration import MachineRates
from cluster.devices.inventory import Inventory
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.plan.choice import Choice, Resolved
from raytrain.plan.facts import ModelFacts
from raytrain.plan.rules.accelerators import is_named
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.rules.hosts import gpus_of_hosts, number_of_hosts
from raytrain.plan.rules.rates import GPUS, ProcessRates, peak_of, rates_of
from raytrain.plan.rules.step_time import (
    StepWork,
    layout_name,
    layout_seconds,
    threads_of,
    work_of,
)
from raytrain.plan.text import host_kinds_text, seconds_text

CPU_HOSTS = 2
"""On CPUs, `auto` considers as many hosts: more processes share the same cores."""

WORTH = 0.9
"""A layout with more processes must be predicted to take less than this fraction of the time of one with fewer."""


@dataclass(frozen=True)
class Layout:
    """A way to place the experts: a value of `experts.hosts` and the number of workers that goes with it."""

    hosts: Any
    workers: int
    seconds: float

    @property
    def processes(self) -> int:
        """Workers and hosts together."""
        return self.workers + number_of_hosts(self.hosts)

    @property
    def name(self) -> str:
        """For people."""
        if isinstance(self.hosts, dict):
            return f"{host_kinds_text(self.hosts)} hosts"
        return "in every worker" if self.hosts == 0 else layout_name(Resolved(self.hosts, ""))


def choose_layout(
    facts: ModelFacts | None, scale: ScaleConfig, loop: LoopConfig, precision: Choice, machines: DevicePool,
    inventory: Inventory, *, workers: int, rows: int, measured: MachineRates | None,
    fits: Callable[[Any, int], bool],
) -> Resolved:  # fmt: skip
    """The value of `experts.hosts` for `auto`, with the predictions as its reason.

    Args:
        workers: number of workers if no GPU goes to hosts.
        rows: of a global batch.
        fits: whether (hosts, workers) fits the memory of these machines, by the estimate.
    """
    if facts is None or facts.experts is None or facts.flops_per_sample is None:
        return _without_sizes(machines)
    if machines.on_gpu and len(machines.gpus) == 1:
        return Resolved(0, "one GPU holds the full model")
    dtype = str(precision.candidates[-1])
    if machines.on_gpu and any(peak_of(gpu.name, dtype) is None for gpu in machines.gpus):
        return _without_sizes(machines)
    each = loop.micro_batch_size if isinstance(loop.micro_batch_size, int) else None

    def predicted(hosts: Any, processes: int) -> Layout:
        share = -(-rows // processes)
        passes = 1 if each is None else -(-share // each)
        work = work_of(facts, rows=rows, passes=passes, dtype=dtype, recomputed=bool(loop.activation_checkpointing))
        spent = seconds_of_layout(work, dtype, hosts, processes, machines, inventory, scale, measured)
        return Layout(hosts, processes, spent)

    layouts = [predicted(*pair) for pair in _candidates(scale, machines, inventory, workers=workers, dtype=dtype)]
    fitting = [layout for layout in layouts if fits(layout.hosts, layout.workers)]
    uncertain = not machines.on_gpu and measured is not None and measured.busy
    best = (_smallest if uncertain else _fastest)(fitting or layouts)
    each_text = ", ".join(f"{layout.name} {seconds_text(layout.seconds)}" for layout in layouts)
    reason = f"predicted step: {each_text}"
    if left := [layout.name for layout in layouts if layout not in fitting]:
        reason += f"; too little memory for {', '.join(left)}"
    elif uncertain:
        reason += "; measured while other processes used the cores, so that no processes are added for it"
    elif best.seconds > min(layout.seconds for layout in layouts):
        reason += f"; more processes must save more than {1 - WORTH:.0%}"
    return Resolved(best.hosts, reason)


def _fastest(layouts: list[Layout]) -> Layout:
    """The fastest; one with more processes only if it saves enough."""
    best, *others = sorted(layouts, key=lambda layout: (layout.processes, layout.seconds))
    for layout in others:
        limit = WORTH * best.seconds if layout.processes > best.processes else best.seconds
        if layout.seconds < limit:
            best = layout
    return best


def _smallest(layouts: list[Layout]) -> Layout:
    """The one with the fewest processes: rates measured under load do not say which of several is the fastest."""
    return min(layouts, key=lambda layout: (layout.processes, layout.seconds))


def _candidates(
    scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, workers: int, dtype: str
) -> list[tuple[Any, int]]:
    """(hosts, workers) of each layout that these machines can run."""
    found: list[tuple[Any, int]] = []
    if scale.strategy != "expert_parallel":
        found.append((0, workers))
    if workers > 1:
        found.append(("colocated", workers))
    if not machines.on_gpu and inventory.cpus >= CPU_HOSTS:
        found.append((CPU_HOSTS, workers))
    slow = slow_kind(machines, dtype) if scale.workers == "auto" else None
    if slow is not None:
        kind, number = slow
        found.append(({kind: number}, len(machines.gpus) - number))
    return found or [(0, workers)]


def slow_kind(machines: DevicePool, dtype: str) -> tuple[str, int] | None:
    """(accelerator type of the slowest kind of GPU, how many); None with one kind, and where a node has several."""
    if machines.per_gpu > 1 or any(len({gpu.name for gpu in gpus}) > 1 for _, gpus in machines.pool):
        return None
    names = {gpu.name for gpu in machines.gpus}
    if len(names) < 2:
        return None
    slowest = min(sorted(names), key=lambda name: peak_of(name, dtype) or 0.0)
    gpus = [gpu for gpu in machines.gpus if gpu.name == slowest]
    kind = next(kind.split()[0] for kind in GPUS if is_named(gpus[0], kind))
    if any(is_named(gpu, kind) for gpu in machines.gpus if gpu.name != slowest):
        return None
    return kind, len(gpus)


def seconds_of_layout(
    work: StepWork, dtype: str, hosts: Any, workers: int, machines: DevicePool, inventory: Inventory,
    scale: ScaleConfig, measured: MachineRates | None,
) -> float:  # fmt: skip
    """Predicted seconds of a step with `workers` workers and the experts as `hosts` says: a value of `experts.hosts`,
    "none" for a dense model."""
    number = number_of_hosts(hosts)

    def rates(pool: DevicePool) -> ProcessRates:
        threads = threads_of(inventory, processes=workers + number, configured=scale.threads)
        return rates_of(
            pool, inventory, dtype, processes=workers + number, threads=threads, width=work.width,
            unequal=hosts in ("none", 0) and scale.shares == "auto", measured=measured,
        )  # fmt: skip

    own, theirs = pools(machines, hosts, inventory)
    return layout_seconds(
        work, rates(own), workers=workers, hosts=number, shared=hosts not in ("none", 0),
        of_hosts=None if theirs is None else rates(theirs),
    )  # fmt: skip


def pools(machines: DevicePool, hosts: Any, inventory: Inventory) -> tuple[DevicePool, DevicePool | None]:
    """(devices of the workers, devices of the hosts) where hosts take named kinds of GPUs; else all, and None."""
    if not isinstance(hosts, dict) or not machines.on_gpu:
        return machines, None
    taken = gpus_of_hosts(hosts, machines, inventory)
    held = tuple((node, tuple(taken[node.host])) for node in inventory.nodes if node.host in taken)
    return machines.without(taken), replace(machines, pool=held)


def _without_sizes(machines: DevicePool) -> Resolved:
    """The layout where no prediction is possible."""
    if machines.on_gpu and len(machines.gpus) > 1:
        held = f"{len(machines.gpus)} GPUs: each holds its share of the experts and a copy of the rest"
        return Resolved("colocated", held)
    return Resolved(0, "every worker holds all experts; sizes or rates are not known before the start")
