"""The processes of bench `moves`: one training worker, and hosts of different speed.

The worker serves requests of the bench, the hosts serve the worker.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.config import LayerShape
from experts.member.shard import ExpertShard
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import Placement, equal_hosts
from experts.router import TopKRouter
from jobs.bench.experts_arms import FileConnection, serve_host
from jobs.bench.harness.processes import serve_blocks
from jobs.bench.harness.sessions import LossLog, SessionArm
from raytrain.train.memory.device import keep_freed_memory
from raytrain.trainable import Notice


def place(settings: dict[str, Any], shapes: list[LayerShape], rules: PlacementRules) -> Placement:
    """The initial placement in all processes, before the hosts' speeds are known."""
    return starting_placement(rules, shapes, equal_hosts(settings["hosts"]))


class PlacementLog(LossLog):
    """A reporter that also records the notices about the placement."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[Notice] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.notices.append((kind, fields))


class MovesTrainer:
    """The worker: a session whose routers are biased towards some experts, and towards others after each shift."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._log = PlacementLog()
        connection = FileConnection(settings, 0, partial(place, settings))
        self._arm = SessionArm(settings["job"], precision="fp32", reporter=self._log, connection=connection)
        self.session = self._arm.session
        self._routers = [part for part in self.session.trainable.module.modules() if isinstance(part, TopKRouter)]
        self._skew, self._shift_steps = settings["skew"], settings["shift_steps"]
        self._draw = np.random.default_rng(settings["seed"])

    def run_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train a block; returns the seconds of each step, the losses and the notices."""
        self._log.notices.clear()
        self._log.losses.clear()
        times = []
        for _ in range(request["steps"]):
            if self.session.state.step % self._shift_steps == 0:
                self._shift_preference()
            times.append(self._arm.run(1))
        return {"seconds": sum(times), "times": times, "losses": self._log.losses, "notices": self._log.notices}

    def _shift_preference(self) -> None:
        """Prefer other experts in every layer, with a bias on their scores like the loss-free bias."""
        for router in self._routers:
            ranks = self._draw.permutation(router.num_experts) + 1
            router.bias_E.copy_(torch.tensor(self._skew / ranks, dtype=router.bias_E.dtype))


def slow_down(factor: int) -> None:
    """Make this host's experts compute everything `factor` times: each repetition is an unused forward of the same rows
    for a forward, and two for a backward."""
    forward, backward = ExpertShard.forward, ExpertShard.backward

    def repeat_forward(shard: ExpertShard, layer: int, rows: Tensor, counts: list[int], times: int) -> None:
        with shard.timer.measure(), torch.no_grad():
            for _ in range(times if counts else 0):
                shard.layers[layer].forward(rows, counts)

    def slow_forward(
        self: ExpertShard, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool
    ) -> Tensor:
        repeat_forward(self, layer, rows, sources[0], factor - 1)
        return forward(self, layer, micro_batch, rows, sources, keep=keep)

    def slow_backward(
        self: ExpertShard, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]
    ) -> Tensor:
        repeat_forward(self, layer, grads, sources[0], 2 * (factor - 1))
        return backward(self, layer, micro_batch, grads, sources)

    ExpertShard.forward, ExpertShard.backward = slow_forward, slow_backward  # type: ignore[method-assign]


def train(settings: dict[str, Any]) -> None:
    """Run as the worker, which lets the hosts exit at the end."""
    trainer = MovesTrainer(settings)
    serve_blocks(settings["arm"], 0, trainer.run_block)
    trainer.session.full_module()


def serve(settings: dict[str, Any], rank: int) -> None:
    """Run as a host until the worker lets it exit."""
    slow_down(settings["slowness"][rank - 1])
    shapes = [LayerShape.from_json(row) for row in settings["shapes"]]
    serve_host(settings, rank, place(settings, shapes, PlacementRules.from_json(settings["rules"])))


def main(settings: dict[str, Any], rank: int) -> None:
    """Run as the worker (rank 0) or as a host."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if rank == 0:
        train(settings)
    else:
        serve(settings, rank)
