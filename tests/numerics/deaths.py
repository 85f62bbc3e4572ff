"""Expert hosts that die, and failing workers, in plain processes without Ray. The test's own process acts as the
directory: it connects the members, detects deaths and ends the generation on every member.

Hosts are the product's `ExpertHost`, workers its sessions and its `RewindPolicy`; only what carries the calls is other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange import DATA, MOE, record
from gang import LIMIT_S, PRELOAD
from lab import Rows, make_job, saver_of
from torch import Tensor

import experts.hosts.host
from experts.config import LayerShape
from experts.exchange.host_server import HostServer
from experts.exchange.membership import Membership
from experts.exchange.worker import ExpertClient
from experts.hosts.generation import GenerationSpec, connect, join_as_worker, open_store
from experts.hosts.host import ExpertHost
from experts.placement.policy import PlacementRules, first_placement
from experts.placement.values import Placement
from experts.transport import Header, Op
from raytrain.errors import StateLost
from raytrain.execution.recovery import RewindPolicy
from raytrain.runs.faults import Death
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

BEFORE, BETWEEN, BACKWARD, COMMIT, SAVE, MOVE, CHANGE = (
    "before dispatch", "between dispatch and combine", "in backward", "between vote and commit", "during save",
    "while experts move", "while experts come or go",
)  # fmt: skip
Fate = tuple[str, int, int]
"""What happens, in which step, to which host or worker."""


@dataclass(frozen=True)
class Story:
    """What a gang lives through.

    Attributes:
        every: steps between checkpoints.
        deaths: of hosts, each by its own SIGKILL, at a point above; several at one point all at once.
        mistakes: of workers: a call too many ("order"), another "version" or "generation" in their headers.
        moves: steps at whose vote every layer's first expert moves to another host.
        grows: a layer of 4 experts gets another one after steps 2 and 6, and loses one of little use.
    """

    run_path: str
    workers: int = 2
    hosts: int = 2
    steps: int = 24
    every: int = 4
    deaths: tuple[Fate, ...] = ()
    mistakes: tuple[Fate, ...] = ()
    moves: tuple[int, ...] = ()
    grows: bool = False


GROWS = {
    "num_experts": 4, "top_k": 2,
    "lifecycle": {
        "max_experts": 6, "every": 2, "birth": {"uncertainty": 0.0, "cooldown_steps": 4},
        "prune": {"idle_steps": 4, "least_share": 0.2},
    },
}  # fmt: skip


@dataclass
class Told:
    """What the members made of it: each worker's record, by rank; (member, generation, error, message, seconds since
    the cause) of every end of a generation on every member; what happened, in order; rank 0's rewinds and deaths."""

    records: dict[int, Any]
    ends: list[tuple[str, int, str, str, float]]
    happened: list[Fate]
    events: list[tuple[str, dict[str, Any]]]


# ---------------------------------------------------------------- the stand-in for the directory


class Lead:
    """Starts and connects the members, and ends a generation on all of them when one dies or reports an error."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.store, self.address = open_store("127.0.0.1")
        self.ends: dict[str, Connection] = {}
        self.processes: dict[str, Any] = {}
        self.waiting: set[str] = set()
        self.generation, self.over = 0, True
        self.cause = 0.0
        self.deaths: list[Death] = []
        self.told = Told({}, [], [], [])

    def run(self) -> Told:
        """Until every worker has returned; the test fails where a member fails or the limit is reached."""
        for host in range(self.story.hosts):
            self._start(f"host {host}")
        for rank in range(self.story.workers):
            self._start(f"worker {rank}")
        limit = time.monotonic() + LIMIT_S
        try:
            while len(self.told.records) < self.story.workers:
                ready = wait(list(self.ends.values()), timeout=max(0.0, limit - time.monotonic()))
                if not ready:
                    pytest.fail(f"not done after {LIMIT_S} s, in generation {self.generation}: {self.told}")
                for name in [name for name, end in self.ends.items() if end in ready]:
                    try:
                        kind, *about = self.ends[name].recv()
                    except (EOFError, OSError):  # nothing, or a message that the kill cut off
                        self._died(name)
                        continue
                    getattr(self, f"_{kind}")(name, *about)
            return self.told
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()

    def _start(self, name: str) -> None:
        mine, theirs = self.context.Pipe()
        fates = self.story.deaths if name.startswith("host") else self.story.mistakes
        left = [fate for fate in fates if fate not in self.told.happened]
        environment = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS",)}
        os.environ["OMP_NUM_THREADS"] = "1"
        process = self.context.Process(target=live, args=(name, self.story, left, self.address, theirs), daemon=True)
        process.start()
        theirs.close()
        for key, value in environment.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        self.ends[name], self.processes[name] = mine, process

    def _join(self, name: str) -> None:
        """A worker asks; with the last one the next generation begins."""
        self.waiting.add(name)
        if len(self.waiting) < self.story.workers:
            return
        self.waiting, self.over = set(), False
        self.generation += 1
        placement = first_placement([6 if self.story.grows else 4] * MOE["layers"], hosts=self.story.hosts)
        spec = GenerationSpec(
            self.generation, self.story.workers, self.story.hosts, self.address, "lo", "cpu", placement,
            deaths=list(self.deaths),
        )  # fmt: skip
        for member, end in self.ends.items():
            tell(end, ("join", spec, int(member.split()[1])) if member.startswith("host") else ("join", spec))

    def _died(self, name: str) -> None:
        self.processes[name].join()
        if self.processes[name].exitcode != -signal.SIGKILL or not name.startswith("host"):
            pytest.fail(f"{name} ended with exit code {self.processes[name].exitcode}")
        del self.ends[name]
        who, pid = f"expert {name}", self.processes[name].pid
        self.deaths.append(Death(who, "here", pid, time=time.time(), why="SIGKILL"))
        self._end(f"{name} died")
        self._start(name)

    def _failed(self, name: str, generation: int, reason: str, _trace: str) -> None:
        if generation == self.generation:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.over:
            return
        self.over = True
        self.store.set(f"over/{self.generation}", reason)
        for member, end in self.ends.items():
            if member.startswith("host"):
                tell(end, ("abort", self.generation, reason))

    def _fate(self, _name: str, fate: Fate, moment: float) -> None:
        if fate in self.told.happened:
            return
        together = [other for other in self.story.deaths if other[:2] == fate[:2]]
        self.told.happened += together or [fate]
        self.cause = moment
        for other in together:
            self.processes[f"host {other[2]}"].kill()

    def _event(self, _name: str, kind: str, fields: dict[str, Any]) -> None:
        self.told.events.append((kind, fields))

    def _heard(self, _name: str, deaths: int) -> None:
        del self.deaths[:deaths]

    def _ended(self, name: str, generation: int, error: str, message: str, moment: float) -> None:
        self.told.ends.append((name, generation, error, message, moment - self.cause))

    def _returned(self, name: str, value: Any) -> None:
        self.told.records[int(name.split()[1])] = value


def tell(end: Connection, order: tuple[Any, ...]) -> None:
    """Send to a member, which may have died unnoticed."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        end.send(order)


# ---------------------------------------------------------------- the members


def live(name: str, story: Story, fates: list[Fate], address: tuple[str, int], pipe: Connection) -> None:
    """A member's process."""
    torch.set_num_threads(1)
    kind, number = name.split()
    if kind == "worker":
        work(int(number), story, fates, address, pipe)
        signal.pause()
    own = [fate for fate in fates if fate[2] == int(number)]
    experts.hosts.host.HostServer = lambda *args, **keys: Doomed(story, own, pipe, *args, **keys)  # type: ignore[assignment,misc]
    failed = SimpleNamespace(remote=lambda *about: pipe.send(("failed", *about)))
    host = ExpertHost(threads=1, device="cpu", directory=SimpleNamespace(failed=failed))
    while True:
        order, *arguments = pipe.recv()
        getattr(host, order)(*arguments)


class Doomed(HostServer):
    """A host that kills its own process at a given point."""

    def __init__(self, story: Story, fates: list[Fate], pipe: Connection, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.story, self.fates, self.pipe = story, fates, pipe
        self.header: Header | None = None

    def serve(self) -> None:
        try:
            super().serve()
        except Exception as error:
            end = (self.generation, type(error).__name__, str(error), time.monotonic())
            self.pipe.send(("ended", *end))
            raise

    def meets(self, point: str, step: int) -> None:
        for fate in self.fates:
            if fate[:2] == (point, step):
                self.pipe.send(("fate", fate, time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    def _forward(self, header: Header, counts: list[list[int]]) -> None:
        if header.op is Op.FORWARD and header.layer == 1:
            self.meets(BEFORE, header.step)
        super()._forward(header, counts)

    def _receive(self, header: Header, sources: list[list[int]]) -> Tensor:
        rows = super()._receive(header, sources)
        if self._commit is not None and self._commit.migration.next is not None:
            self.meets(MOVE, header.step)
        if header.op in (Op.FORWARD, Op.BACKWARD):
            self.meets(BACKWARD if header.op is Op.BACKWARD else BETWEEN, header.step)
        return rows

    def _vote(self, header: Header, counts: list[list[int]]) -> None:
        inner = self.shard.commit

        def commit(agreed: Any, **options: Any) -> None:
            self.meets(COMMIT, header.step)
            inner(agreed, **options)

        assert self._commit is not None
        fetch = self._commit.migration.fetch

        def fetched(*arguments: Any) -> Any:
            self.meets(CHANGE, header.step)
            return fetch(*arguments)

        self._commit.migration.fetch = fetched  # type: ignore[method-assign]
        self.shard.commit = commit  # type: ignore[method-assign]
        super()._vote(header, counts)
        self.shard.commit = inner  # type: ignore[method-assign]
        self._commit.migration.fetch = fetch  # type: ignore[method-assign]

    def _save(self, header: Header, counts: list[list[int]]) -> None:
        if any(fate[:2] == (SAVE, header.step) for fate in self.fates):
            folder = Path(RunFolder(self.story.run_path).checkpoint_dir(header.step))
            (folder / f"experts-{self.host:05d}.safetensors").write_bytes(b"half of it")
        self.meets(SAVE, header.step)
        super()._save(header, counts)


class Moves:
    """Decides as the test prescribes; in place of a `LoadRebalancer`."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.placement: Placement | None = None
        self.in_force: list[tuple[int, int]] = []
        self.refused: list[str] = []
        self.busy: list[list[float]] = []
        self.sent: list[float] = []

    def next_placement(self, step: int) -> Placement | None:
        if step not in self.story.moves or self.placement is None:
            return None
        layers = []
        for layer in self.placement.layers:
            (home,), *others = layer.copies
            layers.append(replace(layer, copies=(((home + 1) % self.story.hosts,), *others)))
        return replace(self.placement, version=self.placement.version + 1, layers=tuple(layers))

    def committed(self, step: int, agreed: Any, placement: Placement, *, refused: str) -> None:
        self.placement = placement
        self.refused += [refused] if refused else []
        self.busy.append(agreed.busy_s)
        self.sent.append(sum(agreed.sent_bytes))
        self.in_force.append((step, placement.version))

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        return []


@dataclass
class Asks:
    """A worker's connection: asks the lead for the next generation."""

    rank: int
    story: Story
    address: tuple[str, int]
    pipe: Connection
    generation: int = 0

    def join(self, _shapes: list[LayerShape], _rules: PlacementRules) -> tuple[Any, Membership]:
        self.pipe.send(("join",))
        _, spec = self.pipe.recv()
        self.generation = spec.number
        store = connect(self.address, who="a watch", limit=LIMIT_S)
        key = f"over/{self.generation}"
        group, own, lost = join_as_worker(spec, rank=self.rank, wait=lambda: store.get(key).decode())
        return group, Membership(
            generation=self.generation, rank=self.rank, workers=self.story.workers,
            placement=spec.placement, run_path=self.story.run_path, workers_group=own,
            lost=lost, deaths=spec.deaths,
            acknowledge_deaths=lambda: self.pipe.send(("heard", len(spec.deaths))),
            rebalancer=Moves(self.story) if self.rank == 0 and self.story.moves else None,
        )  # fmt: skip


def work(rank: int, story: Story, fates: list[Fate], address: tuple[str, int], pipe: Connection) -> None:
    """Train to the end, back to the newest checkpoint whenever a generation is over, as `raytrain.execution.worker`
    does."""
    connection = Asks(rank, story, address, pipe)
    session, run, rows = session_of(rank, story, connection), RunFolder(story.run_path), Events(pipe)
    rewind_policy = RewindPolicy(run, limit=3)
    fates = [fate for fate in fates if fate[2] == rank]
    while True:
        plant(session.trainable.remote.client, fates, pipe)  # type: ignore[union-attr]
        saver = saver_of(session, run, every=story.every, reporter=rows)
        try:
            session.loop(reporter=rows, saver=saver, should_stop=lambda: False).run(session.state)
        except StateLost as error:
            end = (connection.generation, type(error).__name__, str(error), time.monotonic())
            pipe.send(("ended", *end))
            saver.abandon()
            session, decision = rewind_policy.recover(session, error)
            if rank == 0:
                pipe.send(("event", "rewind", decision))
            rows.rows = [row for row in rows.rows if row["step"] <= session.state.step]
            continue
        saver.close()
        changes = [event for event in rows.events if event["kind"].startswith("expert_")]
        pipe.send(("returned", record(session, rows) | {"changes": changes}))
        return


class Events(Rows):
    """Forwards reports of deaths."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe = pipe

    def event(self, kind: str, **fields: Any) -> None:
        super().event(kind, **fields)
        if kind == "death":
            self.pipe.send(("event", kind, fields))


def session_of(rank: int, story: Story, connection: Asks) -> Session:
    """A worker's session, as a run's."""
    workers = Workers()
    workers.world_size, workers.rank = story.workers, rank
    loop = {"max_steps": story.steps, "global_batch_size": 12, "micro_batch_size": 3, "eval_every": 7}
    job, source = make_job(
        {**MOE, "dropout": 0.1}, DATA, world_size=story.workers, run=RunFolder(story.run_path), loop=loop,
        optim={"max_grad_norm": 0.3}, precision={"dtype": "fp32"}, experts=GROWS if story.grows else {},
    )  # fmt: skip
    section = job.builder_sections["experts"].connected(connection)
    job = replace(job, builder_sections={**job.builder_sections, "experts": section})
    session = Session(job, workers=workers, source=source)
    session.prepare("fp32")
    return session


def plant(client: ExpertClient, fates: list[Fate], pipe: Connection) -> None:
    """This worker's mistakes, each once, before the first rows of its step."""
    inner = client.begin_forward

    def begin_forward(*args: Any, **keys: Any) -> Any:
        due = [fate for fate in fates if fate[1] == client.steps + 1]
        if due and keys["op"] is Op.FORWARD:
            fates.remove(due[0])
            pipe.send(("fate", due[0], time.monotonic()))
            if due[0][0] == "order":
                client.send_header(Op.DISCARD)
            elif due[0][0] == "version":
                client.placement = replace(client.placement, version=client.placement.version + 1)
            else:
                client.member = replace(client.member, generation=client.member.generation - 1)
        return inner(*args, **keys)

    client.begin_forward = begin_forward  # type: ignore[method-assign]
