"""From a model with experts in it to one whose experts live on hosts, or are shared out over the workers.

The model is built whole first, so that every weight is drawn as in one process; then its experts are taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experts.dispatch import PooledExperts
from experts.expert import GroupedExperts
from experts.layer import MoELayer
from experts.pool import ExpertPool
from experts.save import locate
from experts.shard import LayerShape
from raytrain.checkpoint_read import read_manifest
from raytrain.config import OptimConfig
from raytrain.errors import InputError
from raytrain.optim import build_optimizers
from raytrain.trainable import Trainable


def distribute(trainable: Trainable, connection: Any) -> Trainable:
    """Join a generation, hand the experts over, and hook the pool into the training. Collective over the workers.

    Args:
        trainable: built in this process, with `GroupedExperts` in its MoELayers; changed in place.
        connection: see `experts.membership.Connection`.

    Raises:
        InputError: experts of another kind, or none at all.
    """
    layers = [part for part in trainable.module.modules() if isinstance(part, MoELayer)]
    if not layers:
        raise InputError(
            "experts.hosts", seen="a model without a MoELayer", expected="0", remedy="nothing of it can live elsewhere"
        )
    shapes = [_shape(layer.experts) for layer in layers]
    group, membership = connection.join(shapes)
    keeps = membership.rank == 0 or membership.host is not None
    first = [_weights(layer.experts) if keeps else {} for layer in layers]
    pool = ExpertPool(group, membership, shapes=shapes, first=first)
    for number, layer in enumerate(layers):
        layer.experts = PooledExperts(pool, number)
    experts = DistributedExperts(pool, layers, trainable.module)
    trainable.optimizers = experts.optimizers
    trainable.agree = pool.agree
    trainable.discard = pool.discard
    trainable.elsewhere = experts
    trainable.workers_group = membership.workers_group
    trainable.log_metrics = experts.with_transport(trainable.log_metrics)
    trainable.idle = experts.idle
    trainable.whole = experts.whole
    return trainable


def _shape(experts: nn.Module) -> LayerShape:
    if not isinstance(experts, GroupedExperts):
        raise InputError(
            "model.builder", seen=f"{type(experts).__name__} as the experts of a MoELayer",
            expected="experts.expert:GroupedExperts, whose weights can live elsewhere",
            remedy="experts.hosts 0 keeps any module inside the workers",
        )  # fmt: skip
    number, hidden, width = experts.w1.shape
    return LayerShape(number, width, hidden, experts.activation)


def _weights(experts: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in experts.named_parameters()}


class DistributedExperts:
    """The hooks of a distributed model; implements `StateElsewhere`."""

    def __init__(self, pool: ExpertPool, layers: list[MoELayer], module: nn.Module) -> None:
        self.pool, self.layers, self.module = pool, layers, module
        self.note = pool.member.note
        self._width = pool.shapes[0].width
        self._told = (0.0, 0)

    def optimizers(self, module: nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
        """Of the trunk; the experts have theirs where they live, set up with the same section."""
        parameter = next(module.parameters())
        self.pool.configure(optim, dtype=parameter.dtype, device=parameter.device)
        return build_optimizers(module, optim, lr=optim.lr)

    def idle(self) -> Tensor:
        """No rows through every layer, in the order of the layers."""
        parameter = next(self.module.parameters())
        rows = [
            layer.experts.idle(self._width, dtype=parameter.dtype, device=parameter.device)
            for layer in self.layers
            if isinstance(layer.experts, PooledExperts)
        ]
        return torch.stack([row.double() for row in rows]).sum()

    def with_transport(self, metrics: Callable[[], dict[str, Tensor]] | None) -> Callable[[], dict[str, Tensor]]:
        """These metrics and `transport_s`, this worker's seconds in the exchange for each step since the last row."""

        def both() -> dict[str, Tensor]:
            spent, steps = self.pool.group.seconds - self._told[0], self.pool.steps - self._told[1]
            self._told = (self.pool.group.seconds, self.pool.steps)
            own = {"transport_s": torch.tensor(spent / max(1, steps), dtype=torch.float64)}
            return (metrics() if metrics is not None else {}) | own

        return both

    def begin_save(self, step: int) -> None:
        """See `StateElsewhere`."""
        self.pool.begin_save(step)

    def finish_save(self, folder: str) -> dict[str, Any]:
        """See `StateElsewhere`."""
        return self.pool.finish_save(folder)

    def restore(self, folder: str, *, step: int) -> None:
        """See `StateElsewhere`."""
        locate(read_manifest(folder), [shape.num_experts for shape in self.pool.shapes])
        self.pool.restore(folder, step=step)

    def whole(self) -> nn.Module | None:
        """The module with its experts in it again; the pool is of no more use to it."""
        for number, layer in enumerate(self.layers):
            weights = self.pool.fetch(number)
            if weights is None:
                continue
            shape = self.pool.shapes[number]
            with torch.device("meta"):
                grouped = GroupedExperts(shape.num_experts, shape.width, shape.hidden, activation=shape.activation)  # type: ignore[arg-type]
            grouped.load_state_dict(weights, assign=True)
            layer.experts = grouped.to(next(self.module.parameters()).device)
        self.pool.end()
        return self.module if self.pool.member.rank == 0 else None
