"""Workers and expert hosts as plain processes of one gang: what each of them does, and what is compared afterwards.

The gang's default group holds all members; workers use their own group, as in a run, and the joint group is
built on the gang's store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import nccl_stand_in
import numpy as np
import torch
import torch.distributed as dist
from lab import MOE, Rows, make_job, saver_of, token_rows, train

from experts.config import ExpertsConfig, LayerShape
from experts.exchange.host_server import HostServer
from experts.exchange.membership import Membership
from experts.member.commit import VoteResult
from experts.models import moe_gpt
from experts.placement.policy import PlacementRules, first_placement
from experts.placement.values import LayerPlacement, Placement
from experts.transport import Header, JointGroup, Op, gloo
from raytrain.checkpoint.reader import load
from raytrain.runs.folder import RunFolder
from raytrain.train.device import process_settings
from raytrain.train.parallel.collectives import Workers, WorkersGroup
from raytrain.train.session import Session
from raytrain.trainable import Trainable


def padded(rows: dict[str, torch.Tensor], *, visible: int) -> dict[str, torch.Tensor]:
    """These rows with padding: that many tokens after the last label of a row are visible, the others padding."""
    labelled, places = rows["labels"] != -100, torch.arange(rows["labels"].shape[1])
    last = torch.where(labelled, places, 0).amax(1, keepdim=True)
    return rows | {"attention_mask": (places <= last + visible).long()}


DATA = {"train": padded(token_rows(70, ragged=True, empty=(3, 11)), visible=2), "eval": token_rows(20, seed=5)}


@dataclass(frozen=True)
class Scene:
    """What a gang plays.

    Attributes:
        workers, hosts: how many; hosts 0 is the reference in one process, "colocated" shares out over the workers.
        micro: rows of a micro-batch; the window has 12 rows.
        seed: of a random placement with replicas; None is the placement a run begins with.
        replicas: extra copies per layer in that.
        sections: over the job's.
        number: of the scene, which separates the groups of scenes.
        run_path, every, from_step: save to that path every so many steps; resume from the checkpoint of that step.
        inject: an infinite gradient, ("worker" or "expert", at that step).
        moves: {step: seed}, at whose vote another random placement is sent.
        spoil: the host for which the bytes of a move are corrupted.
        frozen: patterns of the names of weights that are not trained.
        nccl: rows travel by a stand-in with the rules of NCCL; set by `on_nccl`, in all members' processes.
        through_host: rows are copied to and from buffers of the host, as where members share a GPU.
    """

    workers: int
    hosts: int | str
    micro: int = 4
    steps: int = 20
    seed: int | None = None
    replicas: int = 0
    precision: str = "fp64"
    sections: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    number: int = 0
    run_path: str = "unused"
    every: int = 0
    from_step: int = 0
    inject: tuple[str, int] = ("", 0)
    moves: tuple[tuple[int, int], ...] = ()
    spoil: int | None = None
    frozen: tuple[str, ...] = ()
    nccl: bool = False
    through_host: bool = False

    @property
    def size(self) -> int:
        """Processes of the gang."""
        return self.workers + (self.hosts if isinstance(self.hosts, int) else 0)


def placement_of(scene: Scene, num_experts: list[int]) -> Placement:
    """The scene's placement: the first one, or a random one in which some hosts may hold nothing."""
    hosts = scene.hosts if isinstance(scene.hosts, int) else scene.workers
    if scene.seed is None:
        return first_placement(num_experts, hosts=hosts)
    draw, layers = np.random.default_rng(scene.seed), []
    for number in num_experts:
        copies = [[int(draw.integers(hosts))] for _ in range(number)]
        for _ in range(scene.replicas):
            expert = int(draw.integers(number))
            free = [host for host in range(hosts) if host not in copies[expert]]
            if free:
                copies[expert].append(int(draw.choice(free)))
        parts = [draw.dirichlet(np.ones(len(held))) for held in copies]
        shares = tuple(tuple(float(part) for part in row) for row in parts)
        layers.append(LayerPlacement(tuple(map(tuple, copies)), shares))
    return Placement(version=1, num_hosts=hosts, layers=tuple(layers))


class Script:
    """Decides as the scene prescribes; in place of a `LoadRebalancer` and records its calls."""

    def __init__(self, scene: Scene, placement: Placement) -> None:
        self._sizes = [len(layer.copies) for layer in placement.layers]
        self._scene, self._version = scene, placement.version
        self.in_force: list[tuple[int, int]] = []
        self.refused: list[str] = []
        self.busy: list[list[float]] = []
        self.sent: list[float] = []

    def next_placement(self, step: int) -> Placement | None:
        seed = dict(self._scene.moves).get(step)
        if seed is None:
            return None
        self._version += 1
        return replace(placement_of(replace(self._scene, seed=seed), self._sizes), version=self._version)

    def committed(self, step: int, agreed: VoteResult, placement: Placement, *, refused: str) -> None:
        self.in_force.append((step, placement.version))
        self.busy.append(agreed.busy_s)
        self.sent.append(sum(agreed.sent_bytes))
        if refused:
            self.refused.append(refused)

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        return []


@dataclass(frozen=True)
class GangConnection:
    """Joins the generation on the gang's own store."""

    scene: Scene
    rank: int
    group: WorkersGroup | None

    def join(self, shapes: list[LayerShape], _rules: PlacementRules) -> tuple[JointGroup, Membership]:
        placement = placement_of(self.scene, [shape.num_experts for shape in shapes])
        colocated = self.scene.hosts == "colocated"
        membership = Membership(
            generation=1,
            rank=self.rank,
            workers=self.scene.workers,
            placement=placement,
            run_path=self.scene.run_path,
            host=self.rank if colocated else None,
            workers_group=self.group,
            rebalancer=Script(self.scene, placement) if self.scene.moves and self.rank == 0 else None,
        )
        return joint_group(self.scene, self.rank), membership


IN_FLIGHT: dict[int, list[Any]] = {}
"""Of this process: the number of a scene with moves -> exchanges of bytes, such as experts on the move, that were begun
and that nobody has waited for."""


def joint_group(scene: Scene, rank: int) -> JointGroup:
    if scene.nccl:
        nccl_stand_in.install()
    colocated = scene.hosts == "colocated"
    group = JointGroup(
        dist.distributed_c10d._get_default_store() if dist.is_initialized() else dist.HashStore(),
        name=f"scene-{scene.number}",
        rank=rank,
        size=scene.size,
        workers=scene.workers,
        holders=list(range(scene.workers)) if colocated else list(range(scene.workers, scene.size)),
        device=torch.device("cpu"),
        through_host=scene.through_host,
        interface="lo",
        timeout_s=60.0,
    )
    if scene.moves:
        keep_in_flight(group, IN_FLIGHT.setdefault(scene.number, []))
    return group


def keep_in_flight(group: JointGroup, unfinished: list[Any]) -> None:
    """Have `unfinished` list the exchanges of bytes between their begin and their `wait`."""
    inner = group.exchange

    def exchange(send: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        pending = inner(send, *arguments, **named)
        if send.dtype != torch.uint8:
            return pending
        wait = pending.wait
        unfinished.append(pending)

        def waited() -> torch.Tensor:
            unfinished[:] = [other for other in unfinished if other is not pending]
            return wait()

        pending.wait = waited  # type: ignore[method-assign]
        return pending

    group.exchange = exchange  # type: ignore[method-assign]


def play(rank: int, world_size: int, scenes: list[Scene]) -> list[Any]:
    """Each scene in turn (all of one size); what this member made of it."""
    return [act(rank, replace(scene, number=number)) for number, scene in enumerate(scenes)]


def act(rank: int, scene: Scene) -> Any:
    """One scene: a worker's record, or a host's."""
    if rank >= scene.workers:
        return serve(rank, scene)
    session = session_of(scene, rank)
    if scene.inject[0] == "worker" or (scene.inject[0] == "expert" and scene.hosts == 0):
        inject_into(session, scene)
    if scene.from_step:
        session.restore(load(RunFolder(scene.run_path).checkpoint_dir(scene.from_step)))
    saver = None
    if scene.every:
        saver = saver_of(session, RunFolder(scene.run_path), every=scene.every)
    reporter, _ = train(session, saver=saver)
    if saver is not None:
        saver.close()
    made = record(session, reporter)
    return made | {"unfinished": len(IN_FLIGHT.get(scene.number, ()))}


def inject_into(session: Session, scene: Scene) -> None:
    """At that step this worker's own gradient of the first trunk weight, or of the first expert, is infinite."""
    inner, (where, at) = session.step.gradients.check, scene.inject
    named = dict(session.trainable.module.named_parameters())
    chosen = next(value for name, value in named.items() if (".experts." in name) == (where == "expert"))

    def check() -> None:
        inner()
        if session.state.step + 1 == at and session.workers.rank == session.workers.world_size - 1:
            chosen.grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]

    session.step.gradients.check = check  # type: ignore[method-assign]


def serve(rank: int, scene: Scene) -> dict[str, Any]:
    number = scene_experts(scene)
    server = HostServer(
        joint_group(scene, rank),
        host=rank - scene.workers,
        generation=1,
        placement=placement_of(scene, number),
        device=torch.device("cpu"),
    )
    if scene.inject[0] == "expert" and rank == scene.workers:
        inject_into_host(server, scene)
    if scene.spoil == rank - scene.workers:
        spoil_moves(server)
    server.serve()
    held = server.shard.held()
    parts = [part for layer in server.shard.layers for part in (layer.homes, layer.replicas)]
    names = {name for part in parts if part is not None for name, _ in part.named_parameters()}
    return {
        "steps": server.steps, "held": held, "names": names, "unfinished": len(IN_FLIGHT.get(scene.number, ())),
        "process": process_settings(),
    }  # fmt: skip


def inject_into_host(server: HostServer, scene: Scene) -> None:
    """The same on the first host."""
    inner = server._operations[Op.VOTE]

    def vote(header: Header, counts: list[list[int]]) -> None:
        if header.step == scene.inject[1]:
            server.shard.layers[0].gradients.buffers[0][0] = torch.inf
        inner(header, counts)

    server._operations[Op.VOTE] = vote


def spoil_moves(server: HostServer) -> None:
    """One bit of the largest uint8 payload that comes to this host is another when it arrives."""
    inner = server.group.exchange

    def exchange(send: torch.Tensor, send_counts: list[int], receive_counts: list[int], **room: Any) -> Any:
        pending = inner(send, send_counts, receive_counts, **room)
        if send.dtype == torch.uint8 and sum(receive_counts) and not receive_counts[0]:
            wait = pending.wait

            def spoilt() -> torch.Tensor:
                received = wait()
                received[len(received) // 2] ^= 1
                return received

            pending.wait = spoilt  # type: ignore[method-assign]
        return pending

    server.group.exchange = exchange  # type: ignore[method-assign]


def scene_experts(scene: Scene) -> list[int]:
    given = dict(dict(scene.sections).get("experts", ()))
    return [given.get("num_experts", 4)] * MOE["layers"]


def session_of(scene: Scene, rank: int) -> Session:
    """A worker's session, as a run's; the reference keeps its experts."""
    workers = Workers()
    workers.world_size, workers.rank = scene.workers, rank
    group = None
    if scene.workers > 1:
        store = dist.distributed_c10d._get_default_store()
        flags = gloo(store, f"workers-{scene.number}", rank, scene.workers, interface="lo", timeout_s=60.0)
        group = WorkersGroup(flags, flags, lambda: None)
        workers.use(group)
    sections: dict[str, Any] = {name: dict(keys) for name, keys in scene.sections}
    sections["loop"] = {
        "max_steps": scene.steps, "global_batch_size": 12, "micro_batch_size": scene.micro, "eval_every": 7,
        **sections.get("loop", {}),
    }  # fmt: skip
    sections["optim"] = {"max_grad_norm": 0.3, **sections.get("optim", {})}
    sections["precision"] = {"dtype": scene.precision}
    sections["experts"] = {"hosts": scene.hosts, **sections.get("experts", {})}
    model = {**MOE, "builder": "exchange:partly_frozen", "frozen": list(scene.frozen)} if scene.frozen else MOE
    job, source = make_job(model, DATA, world_size=scene.workers, **sections)
    if scene.hosts != 0:
        connection = GangConnection(scene, rank, group)
        experts = job.builder_sections["experts"].connected(connection)
        job = replace(job, builder_sections={**job.builder_sections, "experts": experts})
    session = Session(job, workers=workers, source=source)
    session.prepare(job.planned("precision"))
    return session


def partly_frozen(*, frozen: list[str], experts: ExpertsConfig, **keys: Any) -> Trainable:
    """The model of all scenes, of which its author then freezes a part."""
    made = moe_gpt(**keys, experts=experts)
    for name, parameter in made.module.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in frozen))
    return made


def record(session: Session, reporter: Rows) -> dict[str, Any]:
    """Everything that must be the same wherever the experts are."""
    made: dict[str, Any] = {
        name: reporter.of("train", name)
        for name in ("step", "loss", "aux_loss", "grad_norm", "load_imbalance", "loss_scale")
    }
    made["eval"] = reporter.of("eval", "loss")
    client = session.trainable.agree.__self__ if session.trainable.agree else None  # type: ignore[union-attr]
    if getattr(client, "rebalancer", None) is not None:
        made["in force"], made["refused"] = client.rebalancer.in_force, client.rebalancer.refused
        made["busy"], made["sent"] = client.rebalancer.busy, client.rebalancer.sent
    made["intervals"] = reporter.intervals
    made["nonfinite"] = [event["what"] for event in reporter.events if event["kind"] == "nonfinite"]
    routers = {name: value for name, value in session.trainable.module.named_parameters() if "router" in name}
    made["routers"] = {name: value.detach().clone().numpy() for name, value in routers.items()}
    made["counts"] = [part.tolist() for part in _book(session).last]
    made["process"] = process_settings()
    whole = session.full_module()
    made["frozen"] = [] if whole is None else [name for name, p in whole.named_parameters() if not p.requires_grad]
    made["weights"] = {} if whole is None else {name: value.numpy() for name, value in weights_of_module(whole).items()}
    return made


def _book(session: Session) -> Any:
    return session.trainable.state_parts()["load"]  # type: ignore[misc]


def weights_of_module(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
