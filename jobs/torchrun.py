"""Training on machines without a Ray cluster: torchrun starts a process on each node, and these form a cluster.

As `ray symmetric-run` does: node 0 starts the head and carries out the command, every other node joins the head with
`ray start` and waits, and all end with the exit code of the command. Ray starts the workers, so that the first process
of a node does all this, and the others end at once. The nodes talk through torchrun's own store, which holds no secret.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raytrain.errors import InputError, RaytrainError, RunError, first_line

if TYPE_CHECKING:
    from jobs.job.spec import JobSpec

LOOK_EVERY_S = 0.5
#: All nodes have met at torchrun's rendezvous when its processes start; what remains is to start Ray.
JOIN_LIMIT_S = 300.0
#: What the other nodes get to leave the cluster after the end of the command, and Ray's daemons to end.
LEAVE_LIMIT_S = 15.0
#: Variables that torchrun sets, or their beginnings: a worker of Ray must not inherit any of them.
TORCHRUNS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_",
)  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: `ray start`, which the kernel tells to end when this process has ended in any way.
RAY_START = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from ray.scripts.scripts import main; main()"
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
    """Print the command of each node, or only that of `node_rank`, which train this job together.

    Args:
        given: the options of `torchrun_options`.
        arguments: of the verb `train`.

    Raises:
        InputError: the options do not fit each other or the job.
    """
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
    for node in range(nodes) if only is None else [only]:
        place = f"--nproc_per_node={each} --nnodes={nodes} --node_rank={node} {master}"
        print(f"torchrun {place} -m jobs train {shlex.join(arguments)}".rstrip())
    if nodes > 1:
        print(NOTE.format(nodes=nodes), end="", file=sys.stderr)


def check_launched(spec: JobSpec, *, processes: int) -> None:
    """Raise InputError if a job has another number of workers than torchrun has processes, or names a cluster."""
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


class Launch:
    """The first process of a node among those that torchrun started.

    Attributes:
        node, nodes: number of this node, and how many there are.
        processes, here: of all nodes, and of this one.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        self.node, self.nodes, self.processes, self.here, port = (int(environ[name]) for name in names)
        self.master = (environ["MASTER_ADDR"], port)
        # the keys of an earlier start of the processes must not count
        self.keys = f"raytrain/{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def store(self) -> Any:
        """A client of torchrun's store. Errors: RunError if it does not answer."""
        import torch.distributed as dist

        limit = timedelta(seconds=JOIN_LIMIT_S)
        try:
            store = dist.TCPStore(*self.master, is_master=False, timeout=limit, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        except RuntimeError as error:
            raise RunError(f"torchrun's store at {':'.join(map(str, self.master))}: {first_line(error)}") from error
        return dist.PrefixStore(self.keys, store)  # pyright: ignore[reportPrivateImportUsage]


class Leader:
    """Node 0: starts the cluster, and tells the other nodes how the command ended.

    Args:
        request_stop: stops the command with a save; False: not yet.
    """

    def __init__(self, launch: Launch, request_stop: Callable[[], bool]) -> None:
        self.launch, self._request_stop, self._parent = launch, request_stop, os.getppid()
        self._store, self._head = launch.store(), contextlib.ExitStack()
        threading.Thread(target=self._watch, args=(launch.store(),), daemon=True, name="torchrun-stop").start()

    def overrides(
        self, path: Path | None, overrides: Sequence[str], mapping: Mapping[str, Any] | None, *, resumes: bool
    ) -> list[str]:
        """The arguments of `load_spec` with a worker for each process of torchrun, unless the job says how many.

        Args:
            resumes: the job is that of a run, which may have had another number of workers.

        Raises:
            InputError: the job says another number of workers, or names a cluster.
        """
        each = f"scale.workers={self.launch.processes}"
        if resumes:
            return (
                list(overrides) if any(text.startswith("scale.workers=") for text in overrides) else [*overrides, each]
            )
        from jobs.job.spec import load_spec

        spec = load_spec(path, overrides, mapping=mapping).spec
        check_launched(spec, processes=self.launch.processes)
        return [*overrides, *([each] if spec.scale.workers == "auto" else [])]

    def start_cluster(self) -> str:
        """Start a Ray cluster of all nodes, and return `HOST:PORT` of its head.

        Raises:
            InputError: there is no token.
            RunError: a node did not join in time, or could not.
        """
        from cluster.network import address_towards

        with socket.socket() as free:
            free.bind(("", 0))
            host, port = address_towards(*self.launch.master), free.getsockname()[1]
        place = (f"--node-ip-address={host}", f"--port={port}")
        head = ray_node(self.launch, "--head", *place, "--include-dashboard=false", "--dashboard-port=0")
        self._head.enter_context(head)
        self._store.set("head", f"{host}:{port}")
        ends = time.monotonic() + JOIN_LIMIT_S
        while self._store.add("joined", 0) < self.launch.nodes - 1:
            if self._store.check(["problem"]):
                raise RunError(self._store.get("problem").decode())
            if time.monotonic() > ends:
                raise RunError(f"not all nodes of torchrun joined {host}:{port} in time: see their own output")
            time.sleep(LOOK_EVERY_S)
        return f"{host}:{port}"

    def close(self, code: int) -> None:
        """The command has ended with this exit code: the other nodes leave the cluster and end with it, then the head
        ends."""
        _ignore_signals()  # torchrun ends the processes of a node as soon as one of them fails
        with contextlib.suppress(RuntimeError):  # the store is gone, and the other nodes with it
            self._store.set("result", str(code))
            ends = time.monotonic() + LEAVE_LIMIT_S
            while self._store.add("left", 0) < self.launch.nodes - 1 and time.monotonic() < ends:
                time.sleep(LOOK_EVERY_S / 10)
        self._head.close()

    def _watch(self, store: Any) -> None:
        """Stop this command with a save once another node was told to stop, or torchrun has gone."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and torchrun with it
            while os.getppid() == self._parent and not store.check(["stop"]):
                time.sleep(LOOK_EVERY_S)
        while not self._request_stop():  # the command does not handle signals yet
            time.sleep(LOOK_EVERY_S)


def follow(launch: Launch) -> int:
    """Be a node of the cluster until the command of node 0 has ended, and return its exit code.

    A signal asks node 0 to save and stop; a second one ends this node.
    """
    arrived: list[int] = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, lambda number, frame: arrived.append(number))
    store, parent, joined = launch.store(), os.getppid(), False
    with contextlib.ExitStack() as node:
        while not store.check(["result"]):
            if len(arrived) > 1:
                return 130
            if arrived or os.getppid() != parent:  # told to stop, or torchrun was killed
                store.set("stop", "1")
            if not joined and store.check(["head"]):
                joined = True
                try:
                    node.enter_context(ray_node(launch, f"--address={store.get('head').decode()}"))
                    store.add("joined", 1)
                except RaytrainError as error:
                    store.set("problem", f"node {launch.node} of torchrun: {error}")
            time.sleep(LOOK_EVERY_S)
        _ignore_signals()
    code = int(store.get("result"))
    store.add("left", 1)
    return code


@contextlib.contextmanager
def ray_node(launch: Launch, *arguments: str) -> Iterator[None]:
    """Start a node of Ray by `ray start`, and end its processes at the end.

    They have a process group of their own: a signal to that of this process does not end them before the workers could
    save. `arguments` are those by which the head differs from the other nodes.

    Raises:
        InputError: there is no token by which the nodes of a cluster know each other.
        RunError: a daemon did not start, or the head refused this node.
    """
    from cluster.devices.inventory import local_inventory
    from cluster.ray_runtime import PATIENT, private_folder

    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not (os.environ.get("RAY_AUTH_TOKEN") or token.is_file()):
        raise InputError(
            "RAY_AUTH_TOKEN_PATH",
            got=f"{token}, which is no file",
            expected="the token of Ray that all nodes share: whoever reaches a node without one can run code on it",
            remedy="`ray get-auth-token --generate` writes ~/.ray/auth_token; copy that file to every node",
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    (machine,) = local_inventory().nodes
    options = {
        "num-cpus": max(launch.here, machine.cpus), "num-gpus": min(launch.here, len(machine.devices)),
        "dashboard-agent-listen-port": 0, "min-worker-port": 0, "max-worker-port": 0,
    }  # fmt: skip
    with private_folder() as folder, (Path(folder) / "start").open("wb") as said:
        given = [*arguments, f"--temp-dir={folder}/r", *(f"--{name}={value}" for name, value in options.items())]
        command = [sys.executable, "-c", RAY_START, "start", "--block", "--disable-usage-stats", *given]
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


_leaders: list[Leader] = []


def leader() -> Leader | None:
    """That of this process, if it is the first one of node 0; None outside torchrun."""
    return _leaders[0] if _leaders else None


def carried_out(command: Callable[[], Any], *, request_stop: Callable[[], bool]) -> Any:
    """Run the command of this process; of those that torchrun started, the first one of node 0 runs it.

    Args:
        request_stop: as for `Leader`.
    """
    environ = dict(os.environ)
    if "TORCHELASTIC_RUN_ID" not in environ:
        return command()
    for name in [name for name in environ if name in TORCHRUNS or name.startswith(TORCHRUNS[8:])]:
        del os.environ[name]
    if environ["LOCAL_RANK"] != "0":
        sys.exit(0)
    try:
        launch = Launch(environ)
        if launch.node:
            sys.exit(follow(launch))
        _leaders.append(Leader(launch, request_stop))
    except (RaytrainError, RuntimeError) as error:  # RuntimeError: of the store, which ends with node 0
        print(f"error: {error if isinstance(error, RaytrainError) else first_line(error)}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code if isinstance(error, RaytrainError) else 1)
    code = 1
    try:
        result = command()
        code = 0
        return result
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        raise
    finally:
        close(code)


def close(code: int) -> None:
    """Before this process exits with this code: the other processes of torchrun do too."""
    while _leaders:
        _leaders.pop().close(code)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
