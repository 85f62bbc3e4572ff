"""Compares the first pass of a model in shards (`scale.strategy: fsdp`) with the same pass without, before the start.

Two more forked processes run it on the CPU, as in `jobs.driver.first_batch`; one shards the model over itself
alone, which takes it apart as several workers do.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobs.driver.first_batch import CPU, NO_ANSWER, FirstBatch, Skipped, check_first_batch
from raytrain.config.messages import abbreviated
from raytrain.errors import InputError
from raytrain.train.device import seed_everything
from raytrain.train.module_checks import SHARDS
from raytrain.train.parallel.buffers import ForwardChanges
from raytrain.train.parallel.collectives import Workers

TOLERANCES = {"fp64": 1e-9, "bf16": 0.1}
"""Of a norm, relative to it; 1e-4 in other formats."""
SMALL_GRADIENT = 0.01
"""Norms of gradients below this share of the largest may be rounding alone."""

Sizes = dict[str, tuple[float, float]]
"""(norm, sum divided by the square root of the number of values) of the loss, each gradient, and what the pass left."""


@dataclass
class ShardedPass(FirstBatch):
    """One pass over the first rows; it ends as a skipped check whose reason is the `Sizes` of what it computed."""

    sharded: bool = True

    def run(self) -> None:
        from raytrain.train.parallel.fsdp import Sharded
        from raytrain.train.parallel.fsdp_passes import explained
        from raytrain.train.placing import local

        seed_everything(self.spec.seed)
        rows, _ = self.rows()
        batch = self._batch("train", self.source.train, rows)
        trainable, policy = self._built()
        module, counts = trainable.module, self._counts(batch, rows, trainable)
        passes = contextlib.nullcontext()
        if self.sharded:
            strategy = Sharded(trainable, workers=Workers(), device=CPU)
            kept = self.spec.precision.fp32_layers
            strategy.place(policy, fp32_layers=[] if isinstance(kept, str) else kept)
            passes = strategy.passes.forward_pass(idle=False)
        changes = ForwardChanges(module, Workers())
        changes.before_passes()
        seed_everything(self.spec.seed)
        with explained():
            with policy.autocast(CPU), passes:
                output = trainable.loss(module, batch, **counts)
            total = output.loss if output.aux is None else output.loss + output.aux
            self._backward(total)
        changes.after_passes()
        found: Sizes = {"the loss": _sizes(total.detach())}
        gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        found |= {f"the gradient of {name}": _sizes(local(one)) for name, one in gradients.items()}
        state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        found |= {f"{name} after the pass": _sizes(local(value)) for name, value in state.items()}
        raise Skipped(json.dumps(found))


def check_sharded_pass(first: FirstBatch) -> None:
    from raytrain.train.parallel.fsdp_passes import unfit

    plain = _tried(first, sharded=False)
    if not isinstance(plain, dict):
        return
    try:
        other = _tried(first, sharded=True)
    except InputError as error:
        raise error if error.key == SHARDS else unfit(error.got) from error
    if other == NO_ANSWER:
        raise unfit("its process ended in the first pass")
    if not isinstance(other, dict):
        return
    tolerance = TOLERANCES.get(str(first.spec.precision.dtype), 1e-4)
    floor = SMALL_GRADIENT * max(
        (sizes[0] for name, sizes in plain.items() if name.startswith("the gradient")), default=0
    )
    wrong = [
        name for name in plain | other
        if math.dist(plain.get(name, (0.0, 0.0)), other.get(name, (0.0, 0.0)))
        > tolerance * max(plain.get(name, (0.0, 0.0))[0], floor if name.startswith("the gradient") else 0.0)
    ]  # fmt: skip
    if wrong and _tried(first, sharded=False) == plain:  # else the model itself is different each time
        raise unfit(f"it computes other values than without: {abbreviated(wrong, 3)}")


def _tried(first: FirstBatch, *, sharded: bool) -> Any:
    """The sizes that a pass found; another answer where it could not tell."""
    made = ShardedPass(first.spec, first.source, first.shapes, first.trainable, first.on_cpu, sharded=sharded)
    answer = check_first_batch(made).skipped or ""
    return json.loads(answer) if answer.startswith("{") else answer


def _sizes(tensor: Tensor) -> tuple[float, float]:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = torch.nan_to_num(values.double(), nan=0.5, posinf=1.0, neginf=-1.0)
    return float(values.norm()), float(values.sum()) / math.sqrt(max(1, values.numel()))
