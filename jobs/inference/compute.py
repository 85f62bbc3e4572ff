"""Computes the units of a plan: in this process, or on a cluster that is running or started for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cluster.devices.inventory import local_inventory
from jobs.driver.plan import show_only_picked
from jobs.driver.runtime import connected
from jobs.inference.layout import rebalanced, with_hosts
from jobs.inference.plan import InferencePlan
from raytrain.infer.input import Unit, UnitReport
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import rows_in_progress
from raytrain.infer.stages.measure import PartTimes, measure_parts
from raytrain.infer.worker import InferenceWorker, Work
from raytrain.plan.room import TYPE_SHARE, Need


class UnitComputation:
    """Computes units and writes their files: one worker in this process, more on a Ray cluster.

    A model that runs in this process is loaded at once, so that one that does not load leaves nothing behind.

    Args:
        say: prints a line.

    Attributes:
        split: how the model is divided, once it was measured.

    Raises:
        InputError: the model does not fit the input or its weights.
    """

    def __init__(self, planned: InferencePlan, *, verbose: bool, say: Callable[[str], None]) -> None:
        self._planned, self._work, self._verbose, self._say = planned, planned.work(), verbose, say
        self._address, self.split = planned.target.address, planned.stages.split
        self._here: InferenceWorker | None = None
        self._done: dict[int, int] = {}
        if planned.workers == 1 and self._address == "local" and not needs_actors(planned):
            work = _on_own_devices(planned, self._work)
            if planned.measures_stages:
                work = self._with_stages(work, measure_parts(work, planned.units[0]))
            self._here = InferenceWorker(work, "this process", self._note)
            self._here.load()

    def _note(self, unit: Unit, rows: int) -> None:
        self._done = {unit.number: rows}

    def in_progress(self) -> dict[int, int]:
        """Unit -> rows that are done of it, of units that may not be complete."""
        return self._done if self._here is not None else rows_in_progress(self._work.parts)

    def reports(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        """Compute units; yields what is complete, in any order."""
        if self._here is not None:
            yield from map(self._here.run, units)
            self._here.close()
        elif units:
            yield from self._on_ray(units)

    def _on_ray(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        from raytrain.infer.ray_data import measure_stages, run_units

        work, workers, machines = self._work, self._planned.workers, self._planned.target.machines
        gpus = 1 if machines.on_gpu else 0
        if gpus:
            if self._address == "local":
                show_only_picked(str(machines.accelerator.value), local_inventory())
            work = _on_first_gpu(work)
        kind = None if self._address == "local" else machines.required_type
        count = workers * self._planned.processes
        with connected(self._address, num_cpus=count + 1, num_gpus=count * gpus, verbose=self._verbose) as cluster:
            if not cluster.local:  # one worker is enough, the others may come later
                from jobs.driver.watch.cluster import check_room  # imports Ray

                each = {"CPU": 1.0, "GPU": gpus} | ({f"accelerator_type:{kind}": TYPE_SHARE} if kind else {})
                key = "experts.hosts" if work.hosts else "infer.stages" if work.split is not None else "scale.workers"
                waits = check_room([Need(key, "process of a worker", work.processes_of_worker, each)])
                self._say(waits.rstrip()) if waits else None
            if work.hosts:
                work = replace(work, model=self._beside_hosts(work, loopback=cluster.local))
            if self._planned.measures_stages:
                times = measure_stages(work, self._planned.units[0], cpus=1, gpus=gpus, accelerator=kind)
                work = self._with_stages(work, times)
            at_once = workers if cluster.local else 1
            yield from run_units(
                work, units, workers=workers, at_once=at_once, cpus=1, gpus=gpus, accelerator=kind
            )  # fmt: skip

    def _beside_hosts(self, work: Work, *, loopback: bool) -> InferenceModel:
        planned = self._planned
        return with_hosts(
            work.model, planned.target, planned.hosts, threads=planned.threads, loopback=loopback,
            folder=planned.output.path,
        )  # fmt: skip

    def _with_stages(self, work: Work, times: PartTimes) -> Work:
        """The work with stages balanced by what was measured."""
        split = rebalanced(self._planned.target, self._planned.stages, times)
        for stage in range(split.plan.stages):
            self._say(f"stage {stage}: {split.plan.describe(stage)}")
        self._say(f"balance: {split.balance}")
        self.split = split
        assert work.split is not None
        return replace(work, split=replace(split, devices=work.split.devices))


def _on_first_gpu(work: Work) -> Work:
    """Ray shows each actor its own GPU alone."""
    return replace(work, model=replace(work.model, device="cuda:0"))


def needs_actors(planned: InferencePlan) -> bool:
    """Whether one worker needs other processes: hosts, or one for each stage where memory is limited on a CPU, as a
    limit of a process's memory is no limit of threads."""
    if planned.hosts.hosts:
        return True
    on_cpu = planned.target.model.device == "cpu"
    return planned.stages.split is not None and on_cpu and planned.target.spec.cluster.memory_limit is not None


def _on_own_devices(planned: InferencePlan, work: Work) -> Work:
    """The stages of one worker on the GPUs of this machine."""
    if work.split is None or not work.model.device.startswith("cuda"):
        return work
    gpus = planned.target.machines.gpus[: work.split.plan.stages]
    return replace(work, split=replace(work.split, devices=tuple(f"cuda:{gpu.index}" for gpu in gpus)))
