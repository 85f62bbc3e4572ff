"""Training on machines without a Ray cluster: torchrun starts a process on each node, and these form a cluster.

As `ray symmetric-run` does: node 0 starts the head, waits for the other nodes and runs the command; every other node
joins the head with `ray start`, and all end with the exit code of the command. Ray starts the workers, so that the
first process of a node does all this, and the others end at once. The nodes talk through torchrun's own store, which
holds no secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.job.arguments import split_arguments
from raytrain.errors import InputError, RaytrainError, RunError, first_line

if TYPE_CHECKING:
    from jobs.job.spec import JobSpec

CLUSTER = "RAYTRAIN_TORCHRUN_CLUSTER"
"""The variable that says where the cluster of the nodes is; the key `cluster.address` would stay in the run."""
LOOK_EVERY_S = 0.5
JOIN_LIMIT_S = 300.0  # all nodes have met at torchrun's rendezvous: what remains is to start Ray
LEAVE_LIMIT_S = 15.0  # for the other nodes to leave the cluster after the end of the command, and for Ray's daemons
TORCHRUNS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables that torchrun sets: a worker of Ray must not inherit any of them."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENDS_WITH_US = (sys.executable, "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)  # fmt: skip
"""A Python that the kernel tells to end when this process has ended in any way."""
NOTE = """# run one on each of the {nodes} nodes, in the same folder; save.dir and the data on shared storage
# all nodes need the same token of Ray: `ray get-auth-token --generate` on one of them, then copy ~/.ray/auth_token
"""


# -- the commands: `plan --print torchrun` ---------------------------------------------------------------


def torchrun_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a verb with options of torchrun, each with dashes or with underscores; None: not given."""
    for name, kind, what in (
        ("master_port", click.IntRange(1), "a free port of node 0 (default: 29500)"),
        ("master_addr", click.STRING, "the address of node 0"),
        ("node_rank", click.IntRange(0), "only the command of this node"),
        ("nnodes", click.IntRange(1), "the number of nodes (default: 1)"),
        ("nproc_per_node", click.IntRange(1), "processes of a node, each a worker (default: 1)"),
    ):
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        metavar = "HOST" if kind is click.STRING else "N"
        verb = click.option(*names, name, type=kind, metavar=metavar, help=f"for --print torchrun: {what}")(verb)
    return verb


def print_commands(given: Mapping[str, Any], arguments: Sequence[str], spec: JobSpec) -> None:
    """Print the command of each node, or only that of `node_rank`, which train this job together: `train` with these
    arguments under torchrun with these options."""
    each, nodes, only = given["nproc_per_node"] or 1, given["nnodes"] or 1, given["node_rank"]
    if nodes > 1 and given["master_addr"] is None:
        raise InputError(
            "--master_addr", got="no value", expected="the address at which the other nodes reach node 0",
            remedy="such as --master_addr 10.0.0.4",
        )  # fmt: skip
    if only is not None and only >= nodes:
        raise InputError("--node_rank", got=str(only), expected=f"0 to {nodes - 1}, as --nnodes is {nodes}")
    check_launched(spec, processes=each * nodes)
    master = f"--master_addr={given['master_addr'] or '127.0.0.1'} --master_port={given['master_port'] or 29500}"
    train = shlex.join(["-m", "jobs", "train", *arguments])
    for node in range(nodes) if only is None else [only]:
        print(f"torchrun --nproc_per_node={each} --nnodes={nodes} --node_rank={node} {master} {train}")
    if nodes > 1:
        print(NOTE.format(nodes=nodes), end="", file=sys.stderr)


def check_launched(spec: JobSpec, *, processes: int) -> None:
    """Refuse a job that has another number of workers than torchrun has processes, or names a cluster."""
    if spec.cluster.address is not None:
        raise InputError(
            "cluster.address", got=spec.cluster.address, expected="null: the processes of torchrun form a cluster",
            remedy="to train in one that runs already, start one process without torchrun",
        )  # fmt: skip
    workers = spec.scale.workers
    if workers not in ("auto", processes) and not (isinstance(workers, tuple) and workers[0] <= processes):
        raise InputError(
            "scale.workers", got=str(workers), expected=f"{processes}, the number of torchrun's processes",
            remedy="leave scale.workers out, or change --nproc_per_node",
        )  # fmt: skip


# -- a process of torchrun -------------------------------------------------------------------------------


def launched(arguments: Sequence[str], train: click.Command) -> int:
    """Do what this process of torchrun is for, and return its exit code; `train` parses the command line."""
    from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

    environ = dict(os.environ)
    for name in environ:
        if TORCHRUNS.fullmatch(name):
            del os.environ[name]
    if environ["LOCAL_RANK"] != "0":
        return 0
    try:
        node = LaunchedNode(environ)
        return node.follow() if node.number else node.lead(arguments, train)
    except DistError as error:
        raise RunError(f"torchrun's store, which ends with node 0: {first_line(error)}") from error


class LaunchedNode:
    """The first process of a node among those that torchrun started; all nodes share torchrun's store."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        import torch.distributed as dist

        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        self.number, self.nodes, self.processes, self.here, port = (int(environ[name]) for name in names)
        self.master = (environ["MASTER_ADDR"], port)
        self._parent, self._signals = os.getppid(), list[int]()
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
                signal.signal(number, lambda number, frame: self._signals.append(number))
        limit = timedelta(seconds=JOIN_LIMIT_S)
        store = dist.TCPStore(*self.master, is_master=False, timeout=limit, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        # the keys of an earlier start of the processes must not count
        keys = f"raytrain/{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.store: Any = dist.PrefixStore(keys, store)  # pyright: ignore[reportPrivateImportUsage]

    def told_to_stop(self) -> bool:
        """Whether a signal came, torchrun has gone, or another node was told."""
        if self._signals or os.getppid() != self._parent:
            return True
        try:
            return self.store.check(["stop"])
        except RuntimeError:  # the store is gone, and torchrun with it
            return True

    def lead(self, arguments: Sequence[str], train: click.Command) -> int:
        """Be node 0: run the command, in a cluster of all nodes if there are several, and tell them its exit code."""
        code = 1
        with contextlib.ExitStack() as head:
            try:
                command = ["-m", "jobs", *arguments, *own_workers(arguments, train, processes=self.processes)]
                place = {CLUSTER: self.start_cluster(head)} if self.nodes > 1 else {}
                # a process group of its own: torchrun signals that of this process, and a second signal ends a command
                child = subprocess.Popen([*ENDS_WITH_US, *command], env=os.environ | place, process_group=0)
                while child.poll() is None and not self.told_to_stop():
                    time.sleep(LOOK_EVERY_S)
                child.terminate()  # does nothing if it has ended
                code = child.wait()
                code = 128 - code if code < 0 else code
            except (RaytrainError, click.ClickException) as error:
                code = error.exit_code
                raise
            finally:
                ignore_signals()
                with contextlib.suppress(RuntimeError):  # the store is gone, and the other nodes with it
                    self.store.set("result", str(code))
                    ends = time.monotonic() + LEAVE_LIMIT_S
                    while self.store.add("left", 0) < self.nodes - 1 and time.monotonic() < ends:
                        time.sleep(LOOK_EVERY_S / 10)
        return code

    def start_cluster(self, head: contextlib.ExitStack) -> str:
        """Start a Ray cluster of all nodes, and return `HOST:PORT` of its head, which `head` ends."""
        from cluster.network import address_towards

        print(f"starting Ray on the {self.nodes} nodes of torchrun", file=sys.stderr, flush=True)
        with socket.socket() as free:
            free.bind(("", 0))
            host, port = address_towards(*self.master), free.getsockname()[1]
        place = ("--head", f"--node-ip-address={host}", f"--port={port}")
        head.enter_context(ray_node(self.here, *place, "--include-dashboard=false", "--dashboard-port=0"))
        self.store.set("head", f"{host}:{port}")
        ends = time.monotonic() + JOIN_LIMIT_S
        while self.store.add("joined", 0) < self.nodes - 1:
            late = time.monotonic() > ends
            if late or self.told_to_stop():
                why = "not all nodes joined in time" if late else "a node was stopped or could not join"
                raise RunError(f"{why} the head at {host}:{port}: see the output of each node of torchrun")
            time.sleep(LOOK_EVERY_S)
        return f"{host}:{port}"

    def follow(self) -> int:
        """Be a node of the cluster until the command of node 0 has ended, and return its exit code. Once this node is
        told to stop, or cannot join, node 0 saves and stops."""
        joined, store = False, self.store
        with contextlib.ExitStack() as cluster:
            while not store.check(["result"]):
                if self.told_to_stop():
                    store.set("stop", "1")
                elif not joined and store.check(["head"]):
                    try:
                        cluster.enter_context(ray_node(self.here, f"--address={store.get('head').decode()}"))
                    except RunError:
                        store.set("stop", "1")
                        raise
                    joined = store.add("joined", 1) > 0
                time.sleep(LOOK_EVERY_S)
            ignore_signals()
        code = int(store.get("result"))
        store.add("left", 1)
        return code


def ignore_signals() -> None:
    """From now on: torchrun ends the processes of a node as soon as another one has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def own_workers(arguments: Sequence[str], train: click.Command, *, processes: int) -> list[str]:
    """The key by which a command has a worker for each process of torchrun; none if it says how many itself."""
    verb = next(iter(arguments), "")
    if verb != "train":
        raise InputError(
            "torchrun", got=f"-m jobs {verb} in {processes} processes", expected="-m jobs train",
            remedy=f"run `raytrain {verb}` once, without torchrun: it starts the processes that it needs",
        )  # fmt: skip
    with train.make_context(verb, list(arguments[1:])) as context:
        options = context.params
    if options["debug"]:
        raise InputError("--debug", got="under torchrun", expected="a command of its own on this machine")
    path, overrides = split_arguments(options["arguments"])
    each = f"scale.workers={processes}"
    if options["sweep"] or options["resume"] not in (None, "auto"):  # where it may have been another number
        return [] if any(text.startswith("scale.workers=") for text in overrides) else [each]
    from jobs.job.spec import load_spec

    spec = load_spec(path, overrides).spec
    check_launched(spec, processes=processes)
    return [each] if spec.scale.workers == "auto" else []


@contextlib.contextmanager
def ray_node(processes: int, *arguments: str) -> Iterator[None]:
    """Start a node of Ray by `ray start`, and end its processes at the end. They have a process group of their own: a
    signal to that of this process does not end them before the workers could save."""
    from cluster.devices.inventory import local_inventory
    from cluster.ray_runtime import PATIENT, private_folder

    os.environ["RAY_AUTH_MODE"] = "token"  # whoever reaches a node without one can run code on it
    (machine,) = local_inventory().nodes
    with private_folder() as folder, (Path(folder) / "start").open("wb") as said:
        command = [
            *ENDS_WITH_US, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments,
            f"--temp-dir={folder}/r", f"--num-cpus={max(processes, machine.cpus)}",
            f"--num-gpus={min(processes, len(machine.devices))}", "--dashboard-agent-listen-port=0",
            "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        env = PATIENT | os.environ  # Ray's own limits are short for several nodes of one machine
        ray = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, process_group=0, env=env)
        try:
            text, ends = "", time.monotonic() + JOIN_LIMIT_S
            while "Ray runtime started" not in text:
                if ray.poll() is not None or time.monotonic() > ends:
                    words = " / ".join(line.strip() for line in text.splitlines() if line.strip())
                    raise RunError(f"`ray start {' '.join(arguments)}`: {words}")
                time.sleep(LOOK_EVERY_S)
                text = Path(said.name).read_text(errors="replace")
            yield
        finally:
            ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                ray.wait(LEAVE_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):  # Ray's agents outlive their raylet by up to a minute
                os.killpg(ray.pid, signal.SIGKILL)
