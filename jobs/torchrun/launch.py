"""Training on machines without a Ray cluster: the processes that `torchrun` starts form one for the run.

Rank 0 carries out the command. The first process of each node starts Ray on it, and the others wait: Ray starts the
workers. All end with the exit code of the command. The processes talk through torchrun's own store, which holds no
secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.errors import InputError, RaytrainError, RunError, first_line

if TYPE_CHECKING:
    from jobs.job.spec import JobSpec

INTERRUPTED = 130
LOOK_EVERY_S = 0.5
#: All nodes have met at torchrun's rendezvous when its processes start; what remains is to import torch and Ray.
JOIN_LIMIT_S = 300.0
#: What the other nodes get to leave the cluster, and all processes to read how the run ended.
READ_LIMIT_S = 15.0
NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
OTHERS = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_")
"""Beginnings of the other variables that torchrun sets; a worker of Ray must not inherit any of them."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Launch:
    """This process among those that torchrun started.

    Attributes:
        rank, world_size: of all processes.
        local_rank, local_world_size: of those on this node.
        node, nodes: number of this node, and how many there are.
        address, port: of torchrun's store.
        name: unique to this start of the processes.
        serves: this process has to serve the store, which torchrun itself does otherwise.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    port: int
    name: str
    serves: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch | None:
        """By the variables that torchrun sets; None in a process that it did not start."""
        if any(name not in environ for name in NAMES):
            return None
        numbers = [int(environ[name]) for name in NAMES[:6]]
        rank, local_rank, world_size, local_world_size, node, nodes = numbers
        name = f"raytrain/{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return cls(rank, world_size, local_rank, local_world_size, node, nodes, address, port, name, serves)

    def store(self) -> Any:
        """A client of torchrun's store, for the keys of this start.

        Raises:
            RunError: it does not answer.
        """
        import torch.distributed as dist

        try:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                self.address, self.port, is_master=self.serves, timeout=timedelta(seconds=JOIN_LIMIT_S),
                wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            raise RunError(f"torchrun's store at {self.address}:{self.port}: {first_line(error)}") from error
        return dist.PrefixStore(self.name, store)  # pyright: ignore[reportPrivateImportUsage]

    def own_address(self) -> str:
        """This machine's address as the machine of the store sees it; see `_towards`."""
        return _towards(self.address, self.port)


class Leader:
    """Rank 0: starts the cluster, and tells the others how the command ended.

    Args:
        request_stop: stops the command with a save; False: not yet.
    """

    def __init__(self, launch: Launch, request_stop: Callable[[], bool]) -> None:
        self.launch, self._request_stop = launch, request_stop
        self._store = launch.store()
        self._closed = False
        self._parent = os.getppid()
        threading.Thread(target=self._watch, args=(launch.store(),), daemon=True, name="torchrun-stop").start()

    def overrides(
        self, path: Path | None, overrides: Sequence[str], mapping: Mapping[str, Any] | None, *, resumes: bool
    ) -> list[str]:
        """The keys with which the command trains on the processes of torchrun: a worker for each, unless the job says
        how many.

        Args:
            path, overrides, mapping: as for `load_spec`.
            resumes: the job is that of a run, which may have had another number of workers.

        Raises:
            InputError: the job says another number of workers, or names a cluster.
        """
        each = f"scale.workers={self.launch.world_size}"
        if resumes:
            return [*overrides, *([] if any(text.startswith("scale.workers=") for text in overrides) else [each])]
        from jobs.job.spec import load_spec

        spec = load_spec(path, overrides, mapping=mapping).spec
        check_launched(spec, processes=self.launch.world_size)
        return [*overrides, *([each] if spec.scale.workers == "auto" else [])]

    def refuse(self, verb: str) -> InputError:
        """The error for another verb than `train`."""
        return InputError(
            "torchrun", got=f"-m jobs {verb} in {self.launch.world_size} processes", expected="-m jobs train",
            remedy=f"run `raytrain {verb}` once, without torchrun: it starts the processes that it needs",
        )  # fmt: skip

    @contextlib.contextmanager
    def cluster(self) -> Iterator[str]:
        """Start a Ray cluster of all nodes; the other nodes leave it when the command has ended.

        Returns:
            `HOST:PORT` of its head.

        Raises:
            InputError: the nodes have no token.
            RunError: a node did not join in time, or could not.
        """
        from cluster.private_ray import TOKEN_FILE, private_ray
        from jobs.torchrun.ray_node import NodeShare, find_token, ray_node, set_environment

        launch, store = self.launch, self._store
        others = [self._wait(f"address/{node}", node) for node in range(1, launch.nodes)]
        own = _towards(others[0], launch.port)
        loopback = all(address.startswith("127.") for address in [own, *others])
        with private_ray() as private:
            token = os.path.join(private.folder, TOKEN_FILE) if loopback else None
            if not loopback:
                find_token()
            set_environment(loopback=loopback, token_path=token)
            share = NodeShare(launch.local_world_size, launch.nodes if loopback else 1)
            with ray_node(folder=private.folder, address=own, share=share) as address:
                store.set("head", json.dumps({"address": address, "token_path": token}))
                for node in range(1, launch.nodes):
                    if problem := self._wait(f"joined/{node}", node):
                        raise RunError(f"node {node} of torchrun: {problem}")
                try:
                    yield address
                finally:
                    self._dismiss()

    def _dismiss(self) -> None:
        """Let the other nodes leave the cluster before its head ends, without which they could not end in order."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
            self._store.set("leave", "1")
            self._await("gone", self.launch.nodes - 1)

    def _await(self, key: str, count: int) -> None:
        """Wait until so many processes have counted themselves, but not for those that have died."""
        ends = time.monotonic() + READ_LIMIT_S
        while self._store.add(key, 0) < count and time.monotonic() < ends:
            time.sleep(LOOK_EVERY_S / 10)

    def close(self, code: int) -> None:
        """The command has ended with this exit code, and nothing of it is left: all processes end with it.

        torchrun ends the processes of a node as soon as one of them fails: signals are ignored from here on.
        """
        if self._closed:
            return
        self._closed = True
        _ignore_signals()
        with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
            self._store.set("result", str(code))
            self._await("left", self.launch.world_size - 1)

    def _wait(self, key: str, node: int) -> str:
        """The value of a key that the first process of a node sets."""
        ends = time.monotonic() + JOIN_LIMIT_S
        while time.monotonic() < ends:
            try:
                if self._store.check([key]):
                    return self._store.get(key).decode()
            except RuntimeError as error:
                raise RunError(f"torchrun's store does not answer: {first_line(error)}") from error
            time.sleep(LOOK_EVERY_S / 10)
        raise RunError(f"node {node} of torchrun did not start within {JOIN_LIMIT_S:.0f} s: see its own output")

    def _watch(self, store: Any) -> None:
        """Stop this command with a save once a process of another node was told to stop, or torchrun has gone."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and torchrun with it
            while os.getppid() == self._parent and not store.check(["stop"]):
                time.sleep(LOOK_EVERY_S)
        while not self._request_stop():  # the command does not handle signals yet
            time.sleep(LOOK_EVERY_S)


class Follower:
    """Any other process: the first of a node holds its part of the cluster, all wait for the end of the command."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._signals = 0

    def run(self) -> int:
        """Wait for the exit code of the command, and return it; a second signal does not wait."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
                signal.signal(number, self._arrived)
        try:
            store = self.launch.store()
            with contextlib.ExitStack() as stack:
                return self._followed(store, stack)
        except RaytrainError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except RuntimeError as error:  # of the store
            print(f"error: rank 0 of torchrun has gone: {first_line(error)}", file=sys.stderr, flush=True)
            return 1

    def _arrived(self, number: int, frame: object) -> None:
        self._signals += 1

    def _followed(self, store: Any, stack: contextlib.ExitStack) -> int:
        """`run` with the store; a node of Ray is held by `stack`."""
        launch, parent = self.launch, os.getppid()
        asked, joined, left = False, False, False
        holds_node = launch.local_rank == 0 and launch.node > 0
        if holds_node:
            store.set(f"address/{launch.node}", launch.own_address())
        while not store.check(["result"]):
            if not asked and (self._signals or os.getppid() != parent):  # told to stop, or torchrun was killed
                store.set("stop", "1")
                asked = True
            elif self._signals > 1:
                return INTERRUPTED
            if holds_node and not joined and store.check(["head"]):
                joined = True
                self._join(store, stack, **json.loads(store.get("head")))
            elif holds_node and not left and store.check(["leave"]):
                left = True
                stack.close()
                store.add("gone", 1)
            time.sleep(LOOK_EVERY_S)
        code = int(store.get("result"))
        _ignore_signals()
        store.add("left", 1)
        return code

    def _join(self, store: Any, stack: contextlib.ExitStack, *, address: str, token_path: str | None) -> None:
        from cluster.private_ray import private_ray
        from jobs.torchrun.ray_node import NodeShare, find_token, ray_node, set_environment

        launch, loopback = self.launch, token_path is not None
        try:
            if not loopback:
                find_token()
            set_environment(loopback=loopback, token_path=token_path)
            share = NodeShare(launch.local_world_size, launch.nodes if loopback else 1)
            folder = stack.enter_context(private_ray()).folder
            own = launch.own_address()
            stack.enter_context(ray_node(folder=folder, address=own, share=share, head=address))
        except RaytrainError as error:
            store.set(f"joined/{launch.node}", str(error))
            return
        store.set(f"joined/{launch.node}", "")


_leader: list[Leader] = []
"""That of this process, if it is rank 0 of torchrun."""


def leader() -> Leader | None:
    """That of this process; None outside torchrun."""
    return _leader[0] if _leader else None


def check_launched(spec: JobSpec, *, processes: int) -> None:
    """Check that a job fits the processes that torchrun starts.

    Raises:
        InputError: it has another number of workers, or names a cluster.
    """
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


def carried_out(command: Callable[[], Any], *, request_stop: Callable[[], bool]) -> Any:
    """Run the command of this process; of several that torchrun started, rank 0 runs it, and the others wait for it.

    Args:
        request_stop: as for `Leader`.
    """
    launch = Launch.of(os.environ)
    if launch is None:
        return command()
    for name in [name for name in os.environ if name in NAMES or name.startswith(OTHERS)]:
        del os.environ[name]
    if launch.rank:
        sys.exit(Follower(launch).run())
    try:
        _leader.append(Leader(launch, request_stop))
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
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
    for one in _leader:
        one.close(code)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one of torchrun's.

    Raises:
        RunError: there is no way to it.
    """
    from cluster.network import address_towards

    try:
        return address_towards(host, port)
    except OSError as error:
        raise RunError(f"no way to {host}, a node of torchrun: {error}") from error
