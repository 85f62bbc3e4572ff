"""The verb `check`, and the function `check` for Python: the machines, their devices and storage, then a real training.

The order: facts and checks of every node -> versions, clocks -> rates of the devices -> two training steps in each
supported precision -> the job itself, if one was named: its model on its data.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cluster.devices.inventory import inventory_from_ray, local_inventory
from cluster.preflight import CheckResult, DeviceSize, check_wanted, local_folder, on_each_node
from cluster.wording import counted, size
from jobs.checks.node import (
    DeviceRates,
    NodeReport,
    check_clocks,
    check_monitoring,
    check_platform,
    check_rates,
    check_repeatable,
    check_versions,
    clock,
    examine,
    measure_node,
)
from jobs.driver.printing import print_line
from jobs.driver.progress import Activity
from jobs.driver.runtime import Cluster, cluster_address, connected
from jobs.job.facts import absolute_path, run_named
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from raytrain.errors import InputError, RaytrainError, RunError, first_line
from raytrain.runs.storage import join, open_store

if TYPE_CHECKING:
    from jobs.checks.training import NamedJob

__all__ = ["CheckReport", "check"]

#: A node that has not answered by then is not part of a working cluster.
NODE_TIMEOUT_S, RATES_TIMEOUT_S = 60.0, 180.0
SIGNS = {"ok": "ok", "warn": "warning", "fail": "FAILED", "na": "-"}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "na": "dim"}
#: Workers of the training on CPUs of one machine: two of them, so that collectives are tried.
CPU_WORKERS = 2


@dataclass
class CheckReport:
    """What `raytrain check` found.

    Attributes:
        results: (node, check) in order; the node is "" for what is about all of them.
        nodes, rates: by the address of the node.
        training: the rows of every worker; empty with `quick`.
        job: what was measured of the job, a row for each of its trainings; None where none was named.

    Example:
        >>> from jobs.check import check
        >>> report = check(quick=True)
        >>> report.failed, report.to_json()["status"]
        (False, 'ok')
        >>> report.line()
        'ok: 1 node, ...'
        >>> [result.name for _, result in report.results][:2]
        ['python', 'torch']
    """

    results: list[tuple[str, CheckResult]] = field(default_factory=list)
    nodes: dict[str, NodeReport] = field(default_factory=dict)
    rates: dict[str, list[DeviceRates]] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    job: list[dict[str, Any]] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(result.status == "fail" for _, result in self.results)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "failed" if self.failed else "ok",
            "checks": [{"node": node, **result.to_json()} for node, result in self.results],
            "nodes": {node: asdict(report) for node, report in self.nodes.items()},
            "rates": {node: [vars(one) for one in devices] for node, devices in self.rates.items()},
            "training": self.training,
            "job": self.job,
            "seconds": self.seconds,
        }

    def line(self) -> str:
        """One line: the verdict, the machines, versions, and the first thing that is wrong."""
        counts = Counter(result.status for _, result in self.results)
        devices = Counter(row["name"] for report in self.nodes.values() for row in report.devices)
        kinds = ", ".join(f"{number} x {name}" for name, number in devices.items())
        record = next(iter(self.nodes.values())).environment if self.nodes else {"versions": {}, "python": "?"}
        runtimes = {row["runtime"] for report in self.nodes.values() for row in report.devices if row["runtime"]}
        cuda = sum(row["kind"] == "cuda" for report in self.nodes.values() for row in report.devices)
        text = (
            f"{'FAILED' if self.failed else 'ok'}: {counted(len(self.nodes), 'node')}, {kinds}; "
            f"CUDA devices {cuda}; {', '.join(sorted(runtimes))}, Ray {record['versions'].get('ray')}, Python "
            f"{record['python']}; {counted(counts['ok'], 'check')} ok, {counted(counts['warn'], 'warning')}, "
            f"{counts['fail']} failed"
        )
        wrong = [(node, result) for node, result in self.results if result.status == "fail"]
        return f"{text}: {f'{wrong[0][0]}: ' if wrong[0][0] else ''}{wrong[0][1].text}" if wrong else text


def check(
    job: str | Path | None = None, *, overrides: Sequence[str] = (), quick: bool = False, console: Console | None = None
) -> CheckReport:
    """Check the machines that a job would train on, and the job on one of them.

    Args:
        job: a JOB.yaml or a recipe: its model is measured on its data. None measures the machines alone, with the
            `cluster`, `scale` and `save` sections of the default recipe.
        overrides: `section.key=value` strings.
        quick: leave the training out.
        console: shows each check as it ends; None shows nothing.

    Raises:
        InputError: the job is wrong, or `cluster.address` cannot be reached.
        RunError: Ray did not start, or a node did not answer.

    Example:
        >>> from jobs.check import check
        >>> report = check("default", overrides=["scale.mode=cpu"], quick=True)
        >>> [result.text for _, result in report.results if result.status == "fail"]
        []
    """
    path = None if job is None else Path(job)
    loaded, own = load_spec(path, list(overrides)), None
    spec = loaded.spec
    if path is not None and not quick:
        from jobs.checks.training import NamedJob  # imports torch

        own = NamedJob(path, overrides)
    report, console = CheckReport(), console or Console(quiet=True)
    address, here = cluster_address(spec.cluster.address), local_inventory()
    with Activity(console) as activity, _timed(report, "all"), _new_folders_removed(absolute_path(spec.save.dir)):
        activity.begin("connecting to Ray" if address != "local" else "starting Ray")
        print_line(console, f"checking {here.describe()}")
        started: Any = {"num_cpus": here.cpus + CPU_WORKERS, "num_gpus": len(here.devices()), "verbose": False}
        with _timed(report, "with Ray"), connected(address, **started) as cluster:
            checking = _Checking(report, spec, cluster, activity, console)
            checking.check_machines()
            if path is not None and not cluster.local:
                checking.check_room(loaded)
            if quick:
                seen, expected = "left out (--quick)", "two steps in each supported precision"
                checking.add(CheckResult("training", "na", seen, expected))
            elif report.failed:
                checking.add(CheckResult("training", "na", "left out: a check failed", "the other checks are ok"))
            else:
                checking.check_training()
                if own is not None and not report.failed:
                    checking.check_job(own)
    return report


@contextlib.contextmanager
def _new_folders_removed(save_dir: str) -> Iterator[None]:
    """Context manager that removes the folders of `save_dir` that did not exist before, unless something is in them."""
    folder = local_folder(save_dir)
    above = [] if folder is None else [folder, *folder.parents]
    missing = [one for one in above if not one.exists()]
    try:
        yield
    finally:
        for one in missing:  # the deepest first
            with contextlib.suppress(OSError):  # not empty, or not there
                one.rmdir()


class _Checking:
    """The checks that need the cluster; each method adds its results to the report, and shows them."""

    def __init__(
        self, report: CheckReport, spec: JobSpec, cluster: Cluster, activity: Activity, console: Console
    ) -> None:
        self.report, self._spec, self._cluster = report, spec, cluster
        self._activity, self._console = activity, console
        self._save_dir, self._inventory = absolute_path(spec.save.dir), inventory_from_ray()

    def add(self, *results: CheckResult, node: str = "") -> None:
        several, console = len(self.report.nodes) > 1, self._console
        for result in results:
            self.report.results.append((node, result))
            wrong = result.status in ("warn", "fail")
            seen = f"{node}: {result.seen}" if node and several else result.seen
            remedy = f"expected {result.expected}{'; ' * bool(result.remedy)}{result.remedy}"
            name = result.name.replace("_", " ")
            if not console.is_terminal:
                print_line(console, f"{SIGNS[result.status]:<9} {name:<19} {seen}")
                if wrong:
                    print_line(console, f"{'':<29} {remedy}")
                continue
            table = Table(box=None, show_header=False, pad_edge=False, expand=False)
            table.add_column(width=8, style=COLOURS[result.status])
            table.add_column(width=18, overflow="fold")
            table.add_column(overflow="fold")
            table.add_row(SIGNS[result.status], name, seen)
            if wrong:
                table.add_row("", "", remedy, style="dim")
            console.print(table, markup=False, highlight=False)

    def check_machines(self) -> None:
        """Facts and checks of every node, then their rates."""
        import ray

        report, save_dir, token = self.report, self._save_dir, f".raytrain-check-{secrets.token_hex(8)}"
        interface = "lo" if self._cluster.local else self._spec.cluster.interface
        self._activity.begin(f"writing to {save_dir}")
        with _timed(report, "machines"):
            host = ray.util.get_node_ip_address()  # by which the cluster knows this machine
            with _token(save_dir, token) as why, socket.create_server((host, 0), backlog=1024) as server:
                self._activity.begin("checking every node")
                driver = (host, server.getsockname()[1])
                tasks = on_each_node(examine, save_dir, token, secrets.token_hex(4), driver, interface)
                report.nodes = _answers(tasks, NODE_TIMEOUT_S)
            wanted = check_wanted(self._spec.cluster, (
                DeviceSize(f"{row['name']} of {node}", row["kind"] != "cpu", row["memory_total_bytes"],
                           row["capability"] and tuple(row["capability"]))
                for node, one in report.nodes.items() for row in one.devices
            ))  # fmt: skip
            self.add(*check_versions(report.nodes), check_platform(report.nodes))
            if wanted.status != "na":  # the job says what it is meant for
                self.add(wanted)
            for node, one in report.nodes.items():
                self.add(*(result for result in one.results if result.name != "shared_storage" or not why), node=node)
            if why:
                seen = f"{why}, so that the nodes have nothing to read"
                self.add(CheckResult("shared_storage", "na", seen, "the driver can write there"))
            clocks = dict[str, tuple[float, float, float]]()
            for node in _answers(on_each_node(clock), NODE_TIMEOUT_S):  # the processes have started now
                asked = time.time()
                said = _answers(on_each_node(clock, only=[node]), NODE_TIMEOUT_S)[node]
                clocks[node] = (asked, said, time.time())
            self.add(check_clocks(clocks))
            self._activity.begin("measuring the devices")
            gpus = any(row["kind"] != "cpu" for one in report.nodes.values() for row in one.devices)
            turns, seen_hosts = defaultdict[int, list[str]](list), Counter[str]()
            for node, one in report.nodes.items():  # in turn those of one machine, which share its cores
                turns[seen_hosts[one.host]].append(node)
                seen_hosts[one.host] += 1
            for nodes in turns.values():
                report.rates |= _answers(on_each_node(measure_node, gpus=gpus, only=nodes), RATES_TIMEOUT_S)
            self.add(check_repeatable(report.rates), *check_rates(report.rates), check_monitoring(report.rates))

    def check_room(self, loaded: LoadedSpec) -> None:
        """Whether the nodes can ever hold the processes of the job, as `train` asks before it starts."""
        from jobs.driver.planning import plan_job
        from jobs.driver.watch import check_room, run_needs

        expected = "room for the processes of the job"
        with self._failing("room", expected):
            waits = check_room(run_needs(loaded.spec, plan_job(loaded, inventory=self._inventory)))
            self.add(CheckResult("room", "ok", waits or "the nodes can hold the processes of the job", expected))

    def check_training(self) -> None:
        """One fit on every GPU, or on two workers of a machine's CPU, or one worker on each CPU node."""
        from jobs.checks.training import check_training, small_jobs

        self._activity.begin("training two steps in each supported precision")
        gpus, nodes = len(self._inventory.devices()), sum(node.cpus > 0 for node in self._inventory.nodes)
        workers = gpus or (nodes if nodes > 1 else CPU_WORKERS)
        with _timed(self.report, "training"), self._failing("training", f"{counted(workers, 'worker')} train"):
            jobs = small_jobs(self._inventory, workers=workers, formats=self._formats())
            self.report.training = self._fit(jobs, workers=workers)
            self.add(*check_training(self.report.training, workers=workers))

    def check_job(self, own: NamedJob) -> None:
        """Train the job on one device, and judge what was measured."""
        from jobs.checks.training import check_job

        self._activity.begin("measuring the job on its data")
        arms = own.arms(self._formats())
        with _timed(self.report, "job"), self._failing("job", "some steps of the job on its data"):
            rows = self._fit([own.job(arm, self._inventory) for arm in arms], workers=1)
            asked = ({"rows_asked": arm.rows, "loaders": arm.loaders} for arm in arms)
            self.report.job = [one | row for one, row in zip(asked, rows, strict=True)]
            source, number = self._spec.data.source or "the data", own.checked.data_facts.train_rows
            self.add(*check_job(arms, rows, self._spec, source=source, rows=number))

    @contextlib.contextmanager
    def _failing(self, name: str, expected: str) -> Iterator[None]:
        """An error of the training is the result of its check: the plan refuses a job, or a process died."""
        try:
            yield
        except RaytrainError as error:
            self.add(CheckResult(name, "fail", str(error), expected, "see the message"))

    def _fit(self, jobs: Sequence[Any], *, workers: int) -> list[dict[str, Any]]:
        """`run_fit` with a storage folder that is removed. Errors: RunError, the fit failed."""
        from jobs.checks.training import run_fit

        local, name = self._cluster.local, f".raytrain-check-{secrets.token_hex(8)}"
        storage = os.path.join(self._cluster.folder, "t") if local else join(self._save_dir, name)
        place: Any = {"local": local, "interface": self._spec.cluster.interface, "storage": storage}
        try:
            return run_fit(jobs, workers=workers, on_gpu=bool(self._inventory.devices()), **place)
        finally:
            if not local:
                open_store(self._save_dir).delete_tree(name)

    def _formats(self) -> list[str]:
        devices = [one for found in self.report.rates.values() for one in found]
        return [name for name in ("fp32", "tf32", "bf16", "fp16") if all(name in one.flops for one in devices)]


@contextlib.contextmanager
def _token(save_dir: str, token: str) -> Iterator[str]:
    """Leaves a file for the nodes below `save_dir`; yields why that is impossible, or ""."""
    try:
        store = open_store(save_dir)
        store.write_bytes(f"{token}/driver", token.encode())
    except (OSError, ValueError, ImportError, RaytrainError) as error:
        yield f"the driver cannot write to save.dir ({first_line(error)})"
        return
    try:
        yield ""
    finally:
        store.delete_tree(token)


def _answers(tasks: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    import ray
    import ray.exceptions

    found = dict[str, Any]()
    ends = time.monotonic() + timeout_s
    for node, task in tasks.items():
        try:
            found[node] = ray.get(task, timeout=max(0.1, ends - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            why = "it may be overloaded, or other jobs hold its GPUs"
            raise RunError(f"node {node} did not answer within {timeout_s:.0f} s: {why}") from error
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"node {node}: {type(error.cause).__name__}: {first_line(error.cause)}") from error
    return found


@contextlib.contextmanager
def _timed(report: CheckReport, part: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[part] = time.perf_counter() - began


def _bundled(
    path: Path | None, overrides: Sequence[str], *, quick: bool, console: Console, bundle: str, run: str | None
) -> CheckReport:
    """The check, with everything that it found, or why it ended, in a support bundle."""
    from jobs.checks.bundle import SMALL, check_bundle_path, write_bundle

    file, loaded = check_bundle_path(bundle), load_spec(path, list(overrides))
    folder = None if run is None else run_named(run)
    ended, report = None, CheckReport()
    try:
        report = check(path, overrides=overrides, quick=quick, console=console)
    except RaytrainError as error:  # the job is right: Ray did not start, or the cluster cannot be reached
        ended = error
    checked = report.to_json() if ended is None else {"status": "failed", "error": str(ended)}
    line = report.line() if ended is None else f"FAILED: {ended}"
    names = write_bundle(file, checked=checked, line=line, loaded=loaded, run=folder)
    files = counted(len(names), "file")
    said = f"bundle    {file}: {files}; a run on five samples beside it helps: raytrain train JOB {SMALL}"
    print(said, file=sys.stderr)
    if ended is not None:
        raise ended
    return report


def run_check(
    path: Path | None, overrides: Sequence[str], *, quick: bool, as_json: bool, short: bool, bundle: str | None = None,
    run: str | None = None,
) -> int:  # fmt: skip
    """The verb; returns the exit code."""
    console = Console(quiet=as_json or short, highlight=False)
    if run is not None and bundle is None:
        raise InputError("--run", got=run, expected="--bundle FILE.zip with it", remedy="only a bundle has its records")
    if bundle is None:
        report = check(path, overrides=overrides, quick=quick, console=console)
    else:
        report = _bundled(path, overrides, quick=quick, console=console, bundle=bundle, run=run)
    if as_json:
        print(json.dumps(report.to_json(), default=str))
    elif short:
        print(report.line())
    else:
        memory = min((one.limits["memory_free_bytes"] or 0 for one in report.nodes.values()), default=0)
        took = f"{report.seconds['machines']:.1f} s for the machines, {report.seconds['all']:.1f} s in all"
        print_line(console, f"{report.line()}; {size(memory)} free; {took}")
    return 1 if report.failed else 0
