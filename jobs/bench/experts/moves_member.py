"""The processes of bench `moves`: one worker that trains, and hosts of different speed.

    python -m jobs.bench.experts.moves_member SETTINGS.json RANK

The worker obeys the bench's orders; the hosts obey the worker.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from experts.exchange.host import HostServer
from experts.exchange.membership import Membership
from experts.member.shard import ExpertShard
from experts.placement.starting import PlacementRules, starting_placement
from experts.placement.values import Placement, equal_hosts
from experts.routing.router import TopKRouter
from experts.shapes import LayerShape
from experts.transport.process_group import JointGroup
from jobs.bench.harness.lines import dial
from jobs.bench.harness.sessions import Losses, session_of
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.trainable import Notice

TIMEOUT_S = 170.0


@dataclass(frozen=True)
class FileConnection:
    """Joins the only generation of an arm, on a store in a file."""

    settings: dict[str, Any]

    def close(self) -> None:
        """Nothing was started."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        """Meet the hosts."""
        placement = first_of(self.settings, shapes, rules)
        membership = Membership(1, 0, 1, placement=placement, run_path="unused")
        return joint_group(self.settings, 0), membership


def joint_group(settings: dict[str, Any], rank: int) -> JointGroup:
    """This member's end."""
    size = 1 + len(settings["slowness"])
    return JointGroup(
        dist.FileStore(settings["store"], size),  # pyright: ignore[reportPrivateImportUsage]
        name="bench-moves", rank=rank, size=size, workers=1,
        holders=list(range(1, size)), device=torch.device("cpu"), interface="lo", timeout_s=TIMEOUT_S,
    )  # fmt: skip


def first_of(settings: dict[str, Any], shapes: list[LayerShape], rules: PlacementRules) -> Placement:
    """The placement that every member begins with: of nobody's speed is anything known."""
    return starting_placement(rules, shapes, equal_hosts(len(settings["slowness"])))


class Rows(Losses):
    """Keeps what became of the placement too."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[Notice] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.notices.append((kind, fields))


class MovesTrainer:
    """The worker: a real session whose routers are pushed towards some experts, others after every shift."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.session, _ = session_of(settings["job"], connection=FileConnection(settings))
        self.session.prepare("fp32")
        self.rows = Rows()
        self.loop = self.session.loop(reporter=self.rows, should_stop=lambda: False)
        self.routers = [part for part in self.session.trainable.module.modules() if isinstance(part, TopKRouter)]
        self._skew, self._shift = settings["skew"], settings["shift_steps"]
        self._draw = np.random.default_rng(settings["seed"])

    def run(self, steps: int) -> list[float]:
        """So many steps; the seconds of each."""
        state, times = self.session.state, []
        for _ in range(steps):
            if state.step % self._shift == 0:
                self._new_topic()
            self.loop.limits = replace(self.loop.limits, max_steps=state.step + 1)
            began = time.perf_counter()
            self.loop.run(state)
            times.append(time.perf_counter() - began)
        return times

    def _new_topic(self) -> None:
        """Other experts are liked, in every layer: added to their scores like the loss-free bias."""
        for router in self.routers:
            ranks = self._draw.permutation(router.num_experts) + 1
            router.bias_E.copy_(torch.tensor(self._skew / ranks, dtype=router.bias_E.dtype))


def slow_down(factor: int) -> None:
    """Make this host's experts compute everything `factor` times: a forward of the same rows for each forward, two for
    each backward, whose results nobody takes."""
    forward, backward = ExpertShard.forward, ExpertShard.backward

    def again(shard: ExpertShard, layer: int, rows: Tensor, counts: list[int], times: int) -> None:
        with shard.timer.measure(), torch.no_grad():
            for _ in range(times if counts else 0):
                shard.layers[layer].forward(rows, counts)

    def slow_forward(
        self: ExpertShard, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool
    ) -> Tensor:
        again(self, layer, rows, sources[0], factor - 1)
        return forward(self, layer, micro_batch, rows, sources, keep=keep)

    def slow_backward(
        self: ExpertShard, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]
    ) -> Tensor:
        again(self, layer, grads, sources[0], 2 * (factor - 1))
        return backward(self, layer, micro_batch, grads, sources)

    ExpertShard.forward, ExpertShard.backward = slow_forward, slow_backward  # type: ignore[method-assign]


def train(settings: dict[str, Any]) -> None:
    """The worker: obey the bench until it says goodbye."""
    trainer = MovesTrainer(settings)
    line = dial(arm=settings["arm"], rank=0)
    while steps := (line.receive())["steps"]:
        trainer.rows.notices.clear()
        trainer.rows.losses.clear()
        times = trainer.run(steps)
        rows = trainer.rows
        line.send({"seconds": sum(times), "times": times, "losses": rows.losses, "notices": rows.notices})
    trainer.session.full_module()


def serve(settings: dict[str, Any], rank: int) -> None:
    """A host, until the worker lets it go."""
    slow_down(settings["slowness"][rank - 1])
    shapes = [LayerShape.from_json(row) for row in settings["shapes"]]
    rules = PlacementRules.from_json(settings["rules"])
    HostServer(
        joint_group(settings, rank), host=rank - 1, generation=1, placement=first_of(settings, shapes, rules),
        device=torch.device("cpu"),
    ).serve()  # fmt: skip


def main(settings: dict[str, Any], rank: int) -> None:
    """Be this member."""
    keep_freed_memory()
    torch.set_num_threads(1)
    run: Callable[[], None] = (lambda: train(settings)) if rank == 0 else (lambda: serve(settings, rank))
    run()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
