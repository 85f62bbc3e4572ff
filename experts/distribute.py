"""From a model with experts in it to one whose experts live on hosts, or are shared out over the workers.

The model is built whole first, so that every weight is drawn as in one process; then its experts are taken out of it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.exchange.dispatch import PooledExperts
from experts.exchange.interval_log import LoadLog
from experts.exchange.membership import Membership
from experts.exchange.rebalancer import Balancer
from experts.exchange.worker import ExpertClient
from experts.layer import MoELayer
from experts.member.checkpoint import locate
from experts.placement.starting import PlacementRules, costs_of
from experts.placement.values import HostSpec
from experts.plan.bytes import expert_costs
from experts.routing.grouped import GroupedExperts, UnevenExperts, build_experts
from experts.shapes import LayerShape
from raytrain.checkpoint.reader import read_manifest
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.models.weights.initial import fill_offered
from raytrain.train.compute.activation_checkpointing import as_with_rows
from raytrain.train.memory.oom import Shortage
from raytrain.train.optim.build import build_optimizers, muons_blocks
from raytrain.trainable import Death, Notice, Trainable


def distribute(trainable: Trainable, config: ExpertsConfig) -> Trainable:
    """Join a generation, hand the experts over, and hook the pool into the training. Collective over the workers.

    Args:
        trainable: built in this process, with its experts in its MoELayers; changed in place.
        config: with a connection, see `experts.exchange.membership.Connection`.

    Raises:
        InputError: experts of another kind, or none at all.
    """
    layers = [part for part in trainable.module.modules() if isinstance(part, MoELayer)]
    if not layers:
        raise InputError(
            "experts.hosts",
            seen="a model without a MoELayer",
            expected="auto or 0",
            remedy="nothing of it can live elsewhere",
        )
    shapes = [_shape(layer.experts) for layer in layers]
    rules = PlacementRules(config.placement, config.replicas, config.rebalance_every)
    group, membership = config.connection.join(shapes, rules)
    fill_offered(trainable.module)
    keeps = membership.rank == 0 or membership.host is not None
    first = [_weights(layer.experts) if keeps else [] for layer in layers]
    balancer = _balancer(membership, shapes, rules) if membership.rank == 0 and rules.every else None
    pool = ExpertClient(group, membership, shapes=shapes, first=first, balancer=membership.balancer or balancer)
    for number, layer in enumerate(layers):
        layer.experts = PooledExperts(pool, number)
    experts = DistributedExperts(pool, layers, trainable, balancer=balancer)
    trainable.optimizers = experts.optimizers
    trainable.agree = pool.agree
    trainable.remote = experts
    if isinstance(trainable.interval_log, LoadLog):
        trainable.interval_log = LoadLog(trainable.interval_log.book, pool)
    return trainable


def _shape(experts: nn.Module) -> LayerShape:
    if not isinstance(experts, GroupedExperts | UnevenExperts):
        raise InputError(
            "model.builder", seen=f"{type(experts).__name__} as the experts of a MoELayer",
            expected="experts of experts.routing.grouped, whose weights can live elsewhere",
            remedy="experts.hosts 0 keeps any module inside the workers",
        )  # fmt: skip
    return LayerShape(experts.width, experts.hidden_E, experts.activation, experts.bias)


def _weights(experts: nn.Module) -> list[dict[str, Tensor]]:
    assert isinstance(experts, GroupedExperts | UnevenExperts)
    return [experts.weights_of(expert) for expert in range(len(experts.hidden_E))]


def _balancer(membership: Membership, shapes: list[LayerShape], rules: PlacementRules) -> Balancer:
    hosts = membership.hosts or [HostSpec(host, 1.0, None) for host in range(membership.placement.num_hosts)]
    return Balancer(rules, costs_of(shapes), hosts)


def death_notices(deaths: list[Death], note: str, *, step: int, now: float) -> list[Notice]:
    """A row for each death, told when `step` was committed as the first one after it."""
    found: list[Notice] = []
    for death in deaths:
        seconds = max(0.0, now - death.time)
        at = time.strftime("%H:%M:%S", time.localtime(death.time))
        said = f"{death.title} died at {at}: back to step {step - 1}, step {step} was committed {seconds:.1f} s later"
        fields = {"who": death.who, "node": death.node, "pid": death.pid, "died_at": death.time, "why": death.why}
        fields |= {"from_step": step - 1, "step": step, "seconds": seconds}
        found.append(("death", {**fields, "reason": f"{said}; {note}" if note and death is deaths[-1] else said}))
    return found


class DistributedExperts:
    """The hooks of a distributed model; implements `RemoteState`."""

    def __init__(
        self, pool: ExpertClient, layers: list[MoELayer], trainable: Trainable, *, balancer: Balancer | None = None
    ) -> None:
        self.pool, self.layers, self.trainable, self._balancer = pool, layers, trainable, balancer
        self.module = trainable.module
        self.note, self.workers_group, self.interleaver = pool.member.note, pool.member.workers_group, pool.interleaver
        self.deaths = list(pool.member.deaths)
        self._told = not self.deaths
        self._width = pool.shapes[0].width

    def optimizers(self, module: nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
        """Of the trunk; the experts have theirs where they live, set up with the same section."""
        parameter = next(module.parameters())
        self.pool.configure(optim, dtype=parameter.dtype, device=parameter.device)
        if self._balancer is not None:  # by now it is known what travels with an expert
            dtype = "fp64" if parameter.dtype == torch.float64 else "fp32"
            self._balancer.costs = expert_costs(self.pool.shapes, optim, dtype=dtype)
        return build_optimizers(module, optim, lr=optim.lr, blocks=muons_blocks(self.trainable, optim))

    def idle(self) -> Tensor:
        """No rows through every layer, in the order of the layers."""
        parameter = next(self.module.parameters())
        rows: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer.experts, PooledExperts):
                with as_with_rows(layer.experts):
                    rows.append(layer.experts.idle(self._width, dtype=parameter.dtype, device=parameter.device))
        return torch.stack([row.double() for row in rows]).sum()

    def waited_s(self) -> float:
        """See `RemoteState`; the hosts' computing included."""
        return self.pool.group.seconds

    def notices(self) -> list[Notice]:
        """See `RemoteState`."""
        found = self.pool.notices()
        if not self._told and self.pool.member.rank == 0:
            self._told = True
            found += death_notices(self.deaths, self.note, step=self.pool.steps, now=time.time())
            self.pool.member.acknowledge_deaths()
        return found

    def discard(self) -> None:
        """See `RemoteState`."""
        self.pool.discard()

    def end_passes(self, *, short: bool) -> None:
        """See `RemoteState`."""
        self.pool.end_passes(short=short)

    def shortages(self) -> list[Shortage]:
        """See `RemoteState`."""
        return self.pool.shortages()

    def begin_save(self, step: int) -> None:
        """See `RemoteState`."""
        self.pool.begin_save(step)

    def finish_save(self, folder: str) -> dict[str, Any]:
        """See `RemoteState`."""
        return self.pool.finish_save(folder)

    def restore(self, folder: str, *, step: int) -> None:
        """See `RemoteState`."""
        locate(read_manifest(folder), [shape.num_experts for shape in self.pool.shapes])
        self.pool.restore(folder, step=step)

    def whole(self) -> nn.Module | None:
        """The module with its experts in it again; the pool is of no more use to it."""
        for number, layer in enumerate(self.layers):
            weights = self.pool.fetch(number)
            if weights is None:
                continue
            shape = self.pool.shapes[number]
            parameter = next(self.module.parameters())
            with torch.device("meta"):
                whole = build_experts(shape.width, shape.hidden_E, **shape.kind)
            layer.experts = whole.to(dtype=parameter.dtype).to_empty(device=parameter.device)
            for expert, own in enumerate(weights):
                for name, view in whole.weights_of(expert).items():
                    view.copy_(own[name])
        self.pool.end()
        return self.module if self.pool.member.rank == 0 else None
