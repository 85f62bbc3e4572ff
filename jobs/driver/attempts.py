"""The connections to Ray of one command: where Ray itself is lost, the rules of a lost worker decide on the next one.

Importing this module loads neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.devices.inventory import Inventory, inventory_from_ray, local_inventory
from cluster.wording import counted
from jobs.driver.planning import plan_job, show_only_picked
from jobs.driver.progress import Activity, Phases
from jobs.driver.result import Result, close_run
from jobs.driver.run_folder import OpenRun, Resumed, open_run, record_inference, replan
from jobs.driver.runtime import cluster_size, connected, dashboard_url
from jobs.driver.signals import StopSignals
from jobs.job.spec import JobSpec, LoadedSpec
from raytrain.config.sections import RetryConfig
from raytrain.errors import ClusterLost, ResourcesTaken, RunError, WorkersChange
from raytrain.execution.driver_channel import AttemptResult
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.runs.folder import this_process
from raytrain.runs.records import event

if TYPE_CHECKING:  # imports torch
    from jobs.driver.check_job import Checked

#: What the driver does first, by `cluster_address`.
CONNECTING = {"local": "starting Ray", "connected": "looking at the Ray that this process is connected to"}


@dataclass(frozen=True)
class RunPlanner:
    """Plans a job for the machines that are there, and opens its run folder.

    Attributes:
        spec: the job of `loaded` with absolute paths.
        checked: what the checks on the driver found.
        resumed: the run to resume; None makes a new one.
        began: when the command started, in unix seconds.
        phases: what takes its seconds.
        verbose: print the whole plan.
    """

    loaded: LoadedSpec
    spec: JobSpec
    checked: Checked
    _: KW_ONLY
    resumed: Resumed | None
    began: float
    phases: Phases
    console: Console
    verbose: bool = False

    def open(self, inventory: Inventory, *, shared: bool = False) -> OpenRun:
        """The run folder, with the plan for these machines, those of the connected cluster if it is `shared`.

        Raises:
            InputError: the machines do not fit the job.
        """
        hosts = None if self.resumed is None else self.resumed.hosts()
        plan = self._plan(inventory, hosts_of_run=hosts)
        if shared:
            from jobs.driver.watch import check_room, run_needs  # imports Ray

            waits = check_room(run_needs(self.spec, plan))
            self.console.print(waits, end="", markup=False, highlight=False, soft_wrap=True)
        opened = open_run(
            self.loaded, self.spec, plan, inventory, resumed=self.resumed, began=self.began, console=self.console,
            verbose=self.verbose,
        )  # fmt: skip
        record_inference(opened.run, self.checked.unanswered)
        return opened

    def change_workers(self, opened: OpenRun, inventory: Inventory, workers: Resolved) -> OpenRun:
        """The same run, with the plan for another number of workers.

        Raises:
            InputError: the machines do not fit the job.
        """
        plan = self._plan(inventory, hosts_of_run=opened.plan.hosts.value_or(None), workers=workers)
        return replan(opened, self.spec, plan, inventory)

    def _plan(self, inventory: Inventory, *, hosts_of_run: Any, workers: Resolved | None = None) -> Plan:
        return plan_job(
            self.loaded,
            inventory=inventory,
            model_facts=self.checked.model_facts,
            data_facts=self.checked.data_facts,
            hosts_of_run=hosts_of_run,
            workers=workers,
            split=self.checked.split,
        )


class RunAttempts:
    """Trains a job on one connection to Ray after the other.

    Args:
        address: as `cluster_address` returns it.
        planner: plans the job and opens the run folder.
        data: the data that the driver read for all workers, or None.
        signals: stops the run.

    Attributes:
        opened: the run folder; None before it is open.
        result: how the run ended.
        closed: the same as written to the run folder, if that was done before Ray was shut down.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        address: str,
        planner: RunPlanner,
        data: Any,
        signals: StopSignals,
        console: Console,
        verbose: bool,
    ) -> None:
        self.opened: OpenRun | None = None
        self.result = AttemptResult("interrupted", "interrupted before the first step")
        self.closed: Result | None = None
        self._spec, self._address, self._planner = spec, address, planner
        self._workers: Resolved | None = None  # another number of workers, with which the next connection continues
        self._data, self._signals, self._console, self._verbose = data, signals, console, verbose

    def run(self) -> None:
        """Train until the run ends, and set `result`.

        Raises:
            RunError: the run failed.
            Interrupted: a signal arrived before the first step of a connection.
        """
        if self._address == "local":  # planned before Ray starts: the plan says how large the private cluster is
            inventory = local_inventory()
            self.opened = self._planner.open(inventory)
            show_only_picked(str(self.opened.plan.choices()["accelerator"].value_or("cpu")), inventory)
        while True:
            try:
                self._connect_and_fit()
                return
            except (ClusterLost, ResourcesTaken) as error:
                change = error if isinstance(error, WorkersChange) else None
                kept = self._address != "connected" or change is not None  # the connection is the caller's
                if self.opened is None or not kept:
                    raise
                self._workers = None if change is None else Resolved(change.workers, str(change))
                self.opened = next_attempt(
                    self.opened, error, retry=self._spec.retry, fallback=self._spec.precision.fallback
                )
                again = "a new private Ray starts" if self._address == "local" else "the driver connects again"
                self._console.print(f"{error}; {again}", markup=False, highlight=False, soft_wrap=True)
                self._signals.training = False  # no worker is left that could save

    def _beat(self) -> None:
        """Other commands must not take over a run that waits for room in a cluster."""
        if self.opened is not None:
            with contextlib.suppress(OSError, RunError):  # a full disk ends the run where it writes next
                self.opened.run.heartbeat()

    def _connect_and_fit(self) -> None:
        cpus, gpus, processes = cluster_size(None if self.opened is None else self.opened.plan)
        with Activity(self._console, phases=self._planner.phases, beat=self._beat) as activity:
            activity.begin(CONNECTING.get(self._address, f"connecting to {self._address}"))
            with connected(
                self._address, num_cpus=cpus, num_gpus=gpus, workers=processes, verbose=self._verbose
            ) as cluster:
                self._signals.install()
                if self.opened is None:  # a running cluster: Ray knows its machines
                    activity.begin("checking the nodes of the cluster")
                    self.opened = self._planner.open(inventory_from_ray(), shared=not cluster.local)
                elif self._workers is not None:
                    activity.begin(f"planning for {counted(self._workers.value, 'worker')}")
                    self.opened = self._planner.change_workers(self.opened, inventory_from_ray(), self._workers)
                    self._workers = None
                if not cluster.local:
                    self._show_dashboard(self.opened)
                activity.begin("preparing the workers' job")
                from jobs.driver.watch import fit_watched  # imports Ray, which reads the environment of `connected`

                self.result = fit_watched(
                    self._spec,
                    self.opened,
                    cluster,
                    data=self._data,
                    signals=self._signals,
                    console=self._console,
                    activity=activity,
                )
                if self.result.workers_running:  # write the result before Ray shuts down, which may take long
                    self.closed = close_run(
                        self.opened.run, self.result, console=self._console, phases=self._planner.phases
                    )
                if self._address != "connected":  # Ray is the caller's, and goes on
                    activity.begin("stopping Ray" if cluster.local else "disconnecting from Ray")

    def _show_dashboard(self, opened: OpenRun) -> None:
        """Where the cluster itself is watched, beside the report of the run."""
        if (url := dashboard_url()) is not None:
            self._console.print(f"{'watch':<10}{url} (Ray's dashboard)", markup=False, highlight=False, soft_wrap=True)
            opened.run.append_event(event("dashboard", url=url, reason=f"Ray's dashboard is at {url}"))


def next_attempt(
    opened: OpenRun, error: ClusterLost | ResourcesTaken, *, retry: RetryConfig, fallback: bool
) -> OpenRun:
    """The run with the number of its next attempt, whose workers a new connection to Ray starts.

    Workers of the old connection that are still alive stop before they write.

    Args:
        error: why the attempt before has ended.
        retry, fallback: the `retry` section and `precision.fallback`.

    Raises:
        RunError: the rules end the run, or another command has taken it over.
    """
    from raytrain.checkpoint.reader import list_checkpoints
    from raytrain.execution.recovery import decide, origins
    from raytrain.runs.faults import lost_cluster, read_faults, write_fault

    run = opened.run
    attempt = run.current_attempt()
    if run.owner_of(attempt) != this_process():
        raise RunError(f"attempt {attempt} of another command has taken over {run.path}")
    if isinstance(error, ClusterLost):
        write_fault(run, lost_cluster(attempt, str(error), time=time.time()))
        step = max((info.step for info in list_checkpoints(run) if info.complete), default=0)
        faults = read_faults(run, since=opened.attempt)
        starts = origins(faults, run.read_rows(run.events), step=step)
        decision = decide(faults, retry=retry, fallback=fallback, resumed_from=starts)
        if decision.action == "stop":
            raise RunError(decision.reason)
    return replace(opened, claimed=run.next_attempt(this_process()))
