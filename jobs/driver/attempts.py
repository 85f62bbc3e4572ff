"""The connections to Ray of one command: where Ray itself is lost, the rules of a lost worker decide on the next one.
With `train --debug` there is none.

Importing this module loads neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from cluster.devices.inventory import inventory_from_ray
from cluster.telemetry.processes import limit_memory
from cluster.wording import counted
from jobs.driver.printing import print_line
from jobs.driver.progress import TRAINING, Activity, figures
from jobs.driver.result import Result, close_run
from jobs.driver.run_folder import OpenRun, RunPlanner
from jobs.driver.runtime import cluster_address, cluster_size, connected, dashboard_url
from jobs.driver.signals import Interrupted, StopSignals
from raytrain.config.sections import RetryConfig
from raytrain.config.user_code import users_place
from raytrain.errors import ClusterLost, RaytrainError, ResourcesTaken, RunError, WorkersChange, first_line
from raytrain.execution.driver_channel import AttemptResult, OwnProcess
from raytrain.plan.choice import Resolved
from raytrain.runs.faults import CLUSTER_LOST
from raytrain.runs.folder import this_process
from raytrain.runs.records import event

#: Exit codes by which `SystemExit` stands for a signal: `ray.init` turns a SIGTERM that it receives into one.
SIGNAL_EXIT_CODES = (15, 130, 143)
#: What the driver does first, by `cluster_address`.
CONNECTING = {"local": "starting Ray", "connected": "looking at the Ray that this process is connected to"}


class RunAttempts:
    """Trains a job on one connection to Ray after the other."""

    def __init__(self, planner: RunPlanner, signals: StopSignals) -> None:
        self.opened: OpenRun | None = None
        self.result = AttemptResult("interrupted", "interrupted before the first step")  # how the run ended
        self.closed: Result | None = None  # that as written to the run folder, if it was before Ray was shut down
        self._planner, self._signals = planner, signals
        self._spec, self._console = planner.spec, planner.console
        self._address = cluster_address(self._spec.cluster.address)
        self._workers: Resolved | None = None  # another number of workers, with which the next connection continues

    def run(self) -> None:
        """Train until the run ends or is stopped, and set `result`; what ends it before there is a run folder is
        raised."""
        try:
            self._run()
        except KeyboardInterrupt:  # includes `Interrupted`; what the workers returned before it stays the result
            pass
        except SystemExit as stop:
            if stop.code not in SIGNAL_EXIT_CODES:
                raise
        except RaytrainError as error:
            if self.opened is None:
                raise
            lost = f"{CLUSTER_LOST}: " if isinstance(error, ClusterLost) else ""  # as in the records of faults
            self.result = AttemptResult("failed", f"{lost}{error}")
        if self.opened is None:
            raise Interrupted("before the run folder was made")

    def _run(self) -> None:
        if self._address == "local":  # planned before Ray starts: the plan says how large the private cluster is
            self.opened = self._planner.open_here()
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
                retry, fallback = self._spec.retry, self._spec.precision.fallback
                self.opened = next_attempt(self.opened, error, retry=retry, fallback=fallback)
                again = "a new private Ray starts" if self._address == "local" else "the driver connects again"
                print_line(self._console, f"{error}; {again}")
                self._signals.training = False  # no worker is left that could save

    def _beat(self) -> None:
        """Other commands must not take over a run that waits for room in a cluster."""
        if self.opened is not None:
            with contextlib.suppress(OSError, RunError):  # a full disk ends the run where it writes next
                self.opened.run.heartbeat()

    def _connect_and_fit(self) -> None:
        cpus, gpus, processes = cluster_size(None if self.opened is None else self.opened.plan)
        started: Any = {"num_cpus": cpus, "num_gpus": gpus, "workers": processes, "verbose": self._planner.verbose}
        phases = self._planner.phases
        with Activity(self._console, phases=phases, beat=self._beat) as activity:
            activity.begin(CONNECTING.get(self._address, f"connecting to {self._address}"))
            with connected(self._address, **started) as cluster:
                self._signals.install()
                if self.opened is None:  # a running cluster: Ray knows its machines
                    activity.begin("checking the nodes of the cluster")
                    self.opened = self._planner.open(inventory_from_ray(), shared=not cluster.local)
                elif self._workers is not None:
                    activity.begin(f"planning for {counted(self._workers.value, 'worker')}")
                    self.opened = self._planner.change_workers(self.opened, inventory_from_ray(), self._workers)
                    self._workers = None
                if not cluster.local and (url := dashboard_url()) is not None:  # the cluster itself is watched there
                    print_line(self._console, f"{'watch':<10}{url} (Ray's dashboard)")
                    row = event("dashboard", url=url, reason=f"Ray's dashboard is at {url}")
                    self.opened.run.append_event(row)
                activity.begin("preparing the workers' job")
                from jobs.driver.watch import fit_watched  # imports Ray, which reads the environment of `connected`

                data = self._planner.checked.handed
                more: Any = {"data": data, "signals": self._signals, "console": self._console, "activity": activity}
                self.result = fit_watched(self._spec, self.opened, cluster, **more)
                if self.result.workers_running:  # write the result before Ray shuts down, which may take long
                    self.closed = close_run(self.opened.run, self.result, console=self._console, phases=phases)
                if self._address != "connected":  # Ray is the caller's, and goes on
                    activity.begin("stopping Ray" if cluster.local else "disconnecting from Ray")


def next_attempt(
    opened: OpenRun, error: ClusterLost | ResourcesTaken, *, retry: RetryConfig, fallback: bool
) -> OpenRun:
    """The run with the number of its next attempt, whose workers a new connection to Ray starts after this error; those
    of the old one that are still alive stop before they write. Errors: RunError, the rules end the run, or another
    command has taken it over."""
    from raytrain.execution.recovery import decide, origins
    from raytrain.runs.faults import lost_cluster, read_faults, write_fault

    run = opened.run
    attempt = run.current_attempt()
    if run.owner_of(attempt) != this_process():
        raise RunError(f"attempt {attempt} of another command has taken over {run.path}")
    if isinstance(error, ClusterLost):
        write_fault(run, lost_cluster(attempt, str(error), time=time.time()))
        faults = read_faults(run, since=opened.attempt)
        starts = origins(faults, run.read_rows(run.events), step=max(run.saved_steps(), default=0))
        decision = decide(faults, retry=retry, fallback=fallback, resumed_from=starts)
        if decision.action == "stop":
            raise RunError(decision.reason)
    return replace(opened, claimed=run.next_attempt(this_process()))


def debugged(planner: RunPlanner, signals: StopSignals) -> tuple[OpenRun, AttemptResult]:
    """`train --debug`: train in this process, where a debugger has the terminal; returns the run and how it ended.
    A failure is not tried again. The first signal saves and stops the run, unless the debugger has taken Ctrl-C."""
    opened = planner.open_here()
    from jobs.driver.check_job import train_job  # imports torch
    from raytrain.execution.worker import Worker
    from raytrain.train.parallel.collectives import Workers

    def show(progress: dict[str, Any]) -> None:
        row = progress.get("row") or {}
        if row.get("kind") == "train" and progress.get("phase") is None:  # an evaluation is printed by itself
            line = f"step {row['step']}/{opened.plan.max_steps.value_or('?')}  {figures(row)}"
            print_line(planner.console, line)

    job = train_job(planner.spec, opened.plan, opened.run, attempt=opened.attempt)
    worker = Worker(job, workers=Workers(), local_rank=0, channel=OwnProcess(signals.asked, show))
    signals.training = True
    planner.phases.begin(TRAINING)
    try:
        result = worker.run(planner.checked.handed)
        assert result is not None  # rank 0 returns one
    except (Exception, SystemExit) as error:  # the worker has printed and recorded it
        why = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {first_line(error)}"
        place = users_place(error)
        result = AttemptResult("failed", f"{why} ({place})" if place else why, steps=worker.committed())
    finally:
        limit_memory(None)  # `cluster.memory_limit`, for a program that goes on
    return opened, result
