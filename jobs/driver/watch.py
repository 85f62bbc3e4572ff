"""The driver while workers train: `fit` in a thread; progress, signals and the cluster in the main thread.

One call per attempt, by `jobs.driver.attempts`; returns when the attempt ended or the cluster changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from rich.console import Console

from cluster.network import answers
from experts.hosts.host import ProcessLimits
from experts.hosts.reserve import request_of, start_hosts
from jobs.driver.check_job import train_job
from jobs.driver.hangs import Signs, StuckWorkers, pid_of
from jobs.driver.progress import Activity, Clock, TrainingDisplay
from jobs.driver.runtime import Cluster
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.spec import JobSpec
from raytrain.errors import ClusterLost, InputError, ResourcesTaken, RunError, WorkersChange
from raytrain.execution import driver_channel, trainer
from raytrain.execution.driver_channel import FELL_BACK, RESTARTING, STARTING, AttemptResult, step_of
from raytrain.execution.ray_private import autoscales, controller_pid, dead_daemons, free_by_node
from raytrain.execution.telemetry import HostTelemetry
from raytrain.plan.plan import Plan
from raytrain.plan.room import Need, missing, short_of
from raytrain.plan.shares import ElasticWorkers
from raytrain.runs.faults import record_lost_ranks
from raytrain.runs.records import event
from raytrain.runs.storage import join

if TYPE_CHECKING:  # imports this
    from jobs.driver.run_folder import OpenRun

# ---------------------------------------------------------------- cluster: what it has lost, and the room that it has

#: Seconds between two looks at a cluster.
LOOK_EVERY_S = 2.0
#: The head may be unreachable for this long; Ray itself ends this process after 60 s.
HEAD_SILENT_S = 40.0


def describe_loss(address: str, ranks: list[int], hosts: list[int], nodes: Sequence[Mapping[str, Any]]) -> str:
    """What was lost with a node that Ray reports as dead and what happens next, in one line. It says what `nodes`
    (`ray.nodes()`) have in all: what is free changes as the lost workers end."""
    what = [f"rank {rank}" for rank in ranks] + [f"expert host {host}" for host in hosts]
    ran = f"{', '.join(what)} ran there" if what else "nothing of this run was there"
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    amounts = {name: sum(one.get(name, 0.0) for one in alive) for name in ("CPU", "GPU")}
    have = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "no CPU"
    if ranks:
        after = f"all workers restart from the latest checkpoint on the other nodes, which have {have} in all"
    elif hosts:
        after = "a new host is started, or the other hosts take its experts (retry.host_wait_s)"
    else:
        after = "the run continues"
    return f"node {address} was lost: {ran}; {after}"


class ClusterWatch:
    """Looks at Ray's own processes and nodes from the driver, every `LOOK_EVERY_S` seconds. The daemons of a `local`
    cluster are children of this process."""

    def __init__(self, *, local: bool, clock: Clock = time.monotonic) -> None:
        self._local, self._clock = local, clock
        self.controller: int | None = None  # process id of Ray Train's controller, once it was seen
        self.looked_now = False  # whether the last call looked at the nodes
        self._looked = self._answered = clock()
        self._alive: dict[str, str] = {}

    def lost_nodes(self) -> dict[str, str]:
        """Node id -> address of the nodes that died since the last call. Errors: ClusterLost, a daemon of the private
        cluster died, or the head has not answered for `HEAD_SILENT_S`."""
        dead = dead_daemons()
        if dead:
            raise ClusterLost(f"Ray's process {' and '.join(dead)} died")
        now = self._clock()
        self.looked_now = now - self._looked >= LOOK_EVERY_S
        if not self.looked_now:
            return {}
        self._looked = now
        if self._local:
            self.find_controller()
            return {}
        head = ray.get_runtime_context().gcs_address
        self.looked_now = answers(head)
        if not self.looked_now:  # a call to it would wait
            if now - self._answered >= HEAD_SILENT_S:
                raise ClusterLost(f"the head of the cluster at {head} does not answer")
            return {}
        self._answered = now
        self.find_controller()
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        lost = {node: address for node, address in self._alive.items() if node not in alive}
        self._alive = alive
        return lost

    def find_controller(self) -> int | None:
        """The process id of Ray Train's controller; asks Ray only until it is known."""
        self.controller = self.controller or controller_pid()
        return self.controller


def workers_wait_for_room() -> bool:
    """Whether the cluster has not placed the workers that Ray Train or Ray Tune starts for this process."""
    return trainer.waits_for_room(ray.util.placement_group_table(), ray.get_runtime_context().get_job_id())


def missing_room(needs: Sequence[Need]) -> str:
    """What workers or trials that are being started still need of a shared cluster; "" where nothing is missing."""
    return missing(needs, free_by_node()) if needs and workers_wait_for_room() else ""


def run_needs(spec: JobSpec, plan: Plan) -> list[Need]:
    """What a run of this plan cannot start without in a shared cluster; an elastic one, the fewest workers."""
    asked = spec.scale.workers
    return request_of(plan, workers=asked[0] if isinstance(asked, tuple) else None).needs


def check_room(needs: Sequence[Need]) -> str:
    """Refuse processes that the nodes of the connected cluster never have room for (InputError); a line where an
    autoscaler may add nodes, "" where there may be room."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found, text = short_of(needs, nodes), missing(needs, nodes, are="there are")
    if found is None:
        return ""
    if autoscales():
        return f"waiting for nodes that the autoscaler may add: {text}"
    need, there = found
    cpus, most = need.each.get("CPU", 1), max((node.get("CPU", 0) for node in nodes), default=0)
    if "GPU" not in need.each and cpus > max(1, most):  # fewer workers would need them too
        raise InputError(
            "scale.threads", got=f"{cpus:g}", expected=f"at most {most:g} ({text})", remedy="lower it, or add nodes"
        )
    raise InputError(
        need.key, got=need.many, expected=f"at most {there} ({text})",
        remedy=f"lower it{'' if 'GPU' in need.each else ' or scale.threads'}, or add nodes",
    )  # fmt: skip


# ---------------------------------------------------------------- fit

POLL_EVERY_S = 0.25
ANSWER_TIMEOUT_S = 5
#: Begins the reason of a run whose workers were left.
LEFT = "exited without waiting for the workers"
#: With reserved expert hosts, the workers may wait this long for room; then the run gives its hosts back.
GIVE_BACK_S = 120.0
#: Without its controller, `fit` ends at once; with a cluster that does not answer, when Ray gives it up.
END_FIT_S, END_INTERRUPTED_S = 30.0, 5.0
END_EVERY_S = 0.1


def fit_watched(
    spec: JobSpec,
    opened: OpenRun,
    cluster: Cluster,
    *,
    data: Any,
    signals: StopSignals,
    console: Console,
    activity: Activity,
) -> AttemptResult:
    """Start the expert hosts and the workers, and return how the run ended.

    A first signal asks the workers to save and return; a second one, or the end of `retry.stop_grace_s`, returns
    without waiting for them.

    Args:
        data: the data that the driver read for all workers; None if each worker opens the source itself.

    Raises:
        Interrupted: a signal arrived before the first step.
        RunError: Ray gave up.
        ClusterLost: Ray itself was lost.
        WorkersChange: an elastic run continues with another number of workers.
    """
    fitting = _Fit(spec, opened, cluster, data=data, activity=activity)
    activity.begin("")
    try:
        result = _watched(fitting, spec, opened, signals=signals, console=console)
    except (ClusterLost, ResourcesTaken) as error:
        if not fitting.end(END_FIT_S, lost=True):
            raise RunError(f"{error}, and Ray Train did not end within {END_FIT_S:.0f} s: resume the run") from error
        raise
    except Interrupted:
        fitting.end(END_INTERRUPTED_S)
        raise
    if result.workers_running:
        fitting.end(END_INTERRUPTED_S, lost=True)
    return result


def _watched(fitting: _Fit, spec: JobSpec, opened: OpenRun, *, signals: StopSignals, console: Console) -> AttemptResult:
    """`fit_watched` once `fit` runs."""
    stop_at: float | None = None
    unanswered, change = 0, None
    with TrainingDisplay(console, phases=fitting.phases) as display:
        while fitting.running(wait_s=POLL_EVERY_S):
            opened.run.heartbeat()
            unanswered = 0 if _show_progress(fitting, display, signals) else unanswered + 1
            if signals.asked.is_set() and not signals.training:
                raise Interrupted("before the first step")  # Ray swallowed the exception that the signal raised
            if signals.asked.is_set() and stop_at is None:
                stop_at = time.monotonic() + spec.retry.stop_grace_s
                fitting.channel.request_stop.remote()
                display.print_lines("stopping: the workers save and return (a second signal exits immediately)")
            late = stop_at is not None and time.monotonic() > stop_at
            cluster_ended = stop_at is not None and unanswered > 1  # the same signal may have ended it
            if signals.times > 1 or late or cluster_ended:
                left, steps = LEFT, opened.run.saved_steps()
                left += f": they did not save within {spec.retry.stop_grace_s:g} s" if late else ""
                saved = f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
                display.print_lines(f"{left}{' (retry.stop_grace_s)' if late else ''}; {saved}")
                return AttemptResult("interrupted", left, workers_running=True)
            if stop_at is None:
                fitting.check_cluster(display)
            if change is None and fitting.change is not None:
                change = fitting.change
                fitting.channel.request_stop.remote()
                display.print_lines(f"{change}; the workers save and return")
        _show_progress(fitting, display, signals, last=True)
    result = fitting.result(stopping=signals.asked.is_set())
    if change is not None and result.status == "interrupted" and not signals.asked.is_set():
        raise change
    return result


class _Fit:
    """Runs `fit` in its own thread, since only the main thread receives signals."""

    def __init__(self, spec: JobSpec, opened: OpenRun, cluster: Cluster, *, data: Any, activity: Activity) -> None:
        self._run_folder, self._plan, self._cluster = opened.run, opened.plan, cluster
        self._watch = ClusterWatch(local=cluster.local)
        self.phases = activity.phases
        self.channel = driver_channel.open_channel()
        fraction, memory_limit = spec.cluster.memory_fraction / opened.plan.per_gpu, spec.cluster.memory_limit
        self._hosts = start_hosts(
            opened.plan, opened.run, local=cluster.local,
            interface="lo" if cluster.local else spec.cluster.interface, retry=spec.retry, begin=activity.begin,
            limits=ProcessLimits(fraction, memory_limit, spec.loop.deterministic),
            telemetry=HostTelemetry(opened.run.path, spec.telemetry.every, memory_limit, self.channel),
        )  # fmt: skip
        self.progress: Mapping[str, Any] = {}
        self.stuck = StuckWorkers(opened.run, self.channel, spec.retry, local=cluster.local)
        self._warned: set[str] | None = None
        self._left_out: set[str] = set()  # ids of nodes
        self.change: WorkersChange | None = None  # wanted, once the workers have saved
        bounds, workers = spec.scale.workers, int(opened.plan.workers.value)  # pyright: ignore[reportAttributeAccessIssue]
        self._elastic = None
        if isinstance(bounds, tuple) and not cluster.local:
            self._elastic = ElasticWorkers(bounds, workers)
        taken: Any = {"attempt": opened.attempt, "claimed": opened.claimed, "connection": self._hosts.connection}
        job = train_job(spec, opened.plan, opened.run, **taken)
        options = {
            "data": data,
            "channel": self.channel,
            "local": cluster.local,
            "interface": spec.cluster.interface,
            "storage": os.path.join(cluster.folder, "t") if cluster.local else join(opened.run.path, "logs/ray"),
            "least": bounds[0] if isinstance(bounds, tuple) else None,
        }
        self._result: AttemptResult | None = None
        self._error: BaseException | None = None
        # not `Thread.join`, after which Python 3.11 takes a thread for ended if a signal interrupted the wait
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(job, options), daemon=True, name="fit").start()

    def _run(self, job: Any, options: dict[str, Any]) -> None:
        try:
            self._result = trainer.fit(job, **options)
        except BaseException as error:  # raised in the main thread by `result`
            self._error = error
        try:
            if not self._cluster.ended.is_set():
                self._hosts.close()
        finally:
            self._ended.set()

    def running(self, *, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds for `fit`; return whether it was running before the wait."""
        running = not self._ended.is_set()
        if running:
            self._ended.wait(wait_s)
        return running

    def end(self, limit_s: float, *, lost: bool = False) -> bool:
        """End `fit` by ending Ray Train's controller, which it waits for; returns whether it has ended in time.

        To shut Ray down before would end this process with a segmentation fault: its client (2.60) does not wake a
        thread that waits for a result, but frees what the thread reads. A `lost` cluster cannot be asked for it.
        """
        ends = time.monotonic() + limit_s
        ended: int | None = None
        while not self._ended.is_set() and time.monotonic() < ends:
            # it may have started since it was last looked for, or later
            controller = self._watch.controller if lost else self._watch.find_controller()
            if controller is not None and controller != ended:
                with contextlib.suppress(OSError):
                    os.kill(controller, signal.SIGKILL)
                ended = controller
            self._ended.wait(END_EVERY_S)
        return self._ended.is_set()

    def check_cluster(self, display: TrainingDisplay) -> None:
        """Say which nodes and hosts were lost; stop waiting where it cannot help.

        Raises:
            ClusterLost: Ray itself was lost.
            ResourcesTaken: the workers have found no room for `GIVE_BACK_S`, while this run holds expert hosts.
            WorkersChange: there is no room for all workers of an elastic run, but for fewer.
        """
        lost = self._watch.lost_nodes()
        waiting = self.progress.get("phase", STARTING) in (STARTING, RESTARTING)
        if not waiting:
            self._hosts.workers_started()
        for line in self._hosts.changes():
            display.print_lines(line)
            if FELL_BACK in line:
                self._run_folder.append_event(event("fallback", what="kernels", reason=line))
        for node, address in lost.items():
            ranks = [rank for rank, place in self.progress.get("nodes", {}).items() if place == node]
            hosts = self._hosts.on_node(node)
            line = describe_loss(address, ranks, hosts, ray.nodes())
            self._run_folder.append_event(event("node_lost", node=address, ranks=ranks, hosts=hosts, reason=line))
            display.print_lines(line)
            for rank in ranks:
                message = f"the node {address} of rank {rank} was lost"
                record_lost_ranks(self._run_folder, [rank], message=message, step=step_of(self.progress), node=node)
        self._look_at_room(waiting=waiting)
        if waiting and self._hosts.reserved and display.waiting_s > GIVE_BACK_S and workers_wait_for_room():
            raise ResourcesTaken(
                f"the workers found no room for {GIVE_BACK_S:.0f} s ({self.missing()}): the expert hosts are given back"
            )

    def _look_at_room(self, *, waiting: bool) -> None:
        """An elastic run continues with the workers that fit: at once where the others cannot start, and where more
        fit, after its workers have saved (`change`).
        """
        if self._elastic is None or self.change is not None or not self._watch.looked_now:
            return
        if waiting and not workers_wait_for_room():
            return
        if not waiting and self.progress.get("phase") != "training":
            return
        room = trainer.free_room(self._plan, without=self._left_out)
        change = self._elastic.decide(room=room, waiting=waiting)
        if change is not None and waiting:
            raise change
        self.change = change

    def new_warnings(self, warnings: Sequence[Mapping[str, Any]], signs: Signs) -> list[str]:
        """Record the warnings of telemetry that this run has not had yet, and return their lines."""
        if not warnings:
            return []
        if self._warned is None:  # those of earlier commands on the same run count too
            events = self._run_folder.read_rows(self._run_folder.events)
            self._warned = {str(row.get("key")) for row in events if row["kind"] == "warning"}
        new = [with_rank(row, signs) for row in warnings if row["key"] not in self._warned]
        self._left_out |= {row["node"] for row in warnings if row["what"] == "node_left_out"}
        for row in new:
            self._warned.add(row["key"])
            self._run_folder.append_event(event("warning", **row))
        return [f"warning: {row['reason']}" for row in new]

    def missing(self) -> str:
        """What the workers that are being started still need; "" where nothing is missing."""
        starting = self.progress.get("phase", STARTING) in (STARTING, RESTARTING)
        if self._cluster.local or not starting:
            return ""
        number = int(self._plan.workers.value)  # pyright: ignore[reportAttributeAccessIssue]  (never deferred)
        return missing_room([trainer.workers_need(self._plan, number)])

    def result(self, *, stopping: bool) -> AttemptResult:
        """Return the result of rank 0, or raise the exception of `fit` unless a stop was requested."""
        if self._error is not None:
            if stopping:
                return AttemptResult("interrupted", "a stop was requested")
            raise self._error
        assert self._result is not None
        return self._result


def _show_progress(fitting: _Fit, display: TrainingDisplay, signals: StopSignals, *, last: bool = False) -> bool:
    """Show what the workers reported and printed; return False if the channel does not answer."""
    channel = fitting.channel
    try:
        asked = [channel.progress.remote(), channel.printed_lines.remote(last=last), channel.last_signs.remote()]
        asked += [channel.warnings.remote(), channel.stacks.remote()]
        answers = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.RayError:  # too slow, or it died: `fit` reports the outcome
        display.show(dict(fitting.progress), missing=fitting.missing)
        return False
    fitting.progress, lines, signs, warnings, stacks = answers
    if lines:
        display.print_lines(lines)
    for line in [*fitting.new_warnings(warnings, signs), *fitting.stuck.lines(fitting.progress, signs, stacks)]:
        display.print_lines(line)
    display.show(dict(fitting.progress), missing=fitting.missing)
    if fitting.progress.get("phase") == "training":
        signals.training = True
    return True


def with_rank(warning: Mapping[str, Any], signs: Signs) -> dict[str, Any]:
    """A warning about a process, which is named with its rank where it is a worker of this run."""
    pid = warning.get("pid")
    ranks = [rank for rank, (_, where) in signs.items() if pid is not None and pid_of(where) == pid]
    if len(ranks) != 1:  # none, or processes of two nodes that have the same number
        return dict(warning)
    named = warning["reason"].replace(f"(pid {pid})", f"(rank {ranks[0]}, pid {pid})")
    return {**warning, "reason": named, "rank": ranks[0]}
