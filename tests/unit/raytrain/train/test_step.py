"""One optimizer step: what is clipped, what is skipped, who is asked and told, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.job.keys import key_lines
from jobs.job.spec import load_spec
from raytrain.config.sections import OptimConfig
from raytrain.train.optim import Schedule, build_optimizers
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision import LossScale, policy_for
from raytrain.train.step import TrainingStep
from raytrain.trainable import GlobalStep, LocalStep, LossOutput, MicroBatch, Trainable

CPU = torch.device("cpu")
PULL = torch.tensor([3.0, 4.0, 12.0])  # the gradient of `pulled`: its norm is 13


class Vector(nn.Module):
    """Three weights, 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


def pulled(module: nn.Module, batch: dict[str, Tensor]) -> LossOutput:
    """A loss whose gradient is PULL times the mean of `x`."""
    return LossOutput((module.w * PULL).sum() * batch["x"].mean())


def step_of(
    trainable: Trainable, *, clip: float | None = None, precision: str = "fp32", optimizers: list[Any] | None = None
) -> TrainingStep:
    optim = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant")
    policy = policy_for(precision)
    return TrainingStep(
        trainable,
        optimizers=optimizers or build_optimizers(trainable.module, optim, lr=1.0),
        policy=policy,
        scale=LossScale(CPU, enabled=policy.scales_loss),
        workers=Workers(),
        schedule=Schedule(optim, lr=1.0, warmup_steps=0, max_steps=10),
        max_grad_norm=clip,
        device=CPU,
    )


def micro(value: float = 1.0, *, rows: int = 2) -> MicroBatch:
    return MicroBatch({"x": torch.full((rows,), value)}, rows)


@pytest.mark.covers("LOOP-04")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("clip", "length"), [(1.0, 1.0), (0.5, 0.5), (100.0, 13.0), (0.0, 13.0), (None, 13.0)])
def test_a_gradient_is_unscaled_before_it_is_clipped(clip: float | None, length: float, precision: str) -> None:
    trainable = Trainable(Vector(), pulled)
    output = step_of(trainable, clip=clip, precision=precision).run([micro()], global_weight=2, step=1)
    assert float(output.norm) == pytest.approx(13.0)  # as it was before the clip, without the scale
    moved = trainable.module.w.detach()
    assert float(moved.norm()) == pytest.approx(length, rel=1e-5)
    assert torch.allclose(moved, -PULL / 13.0 * length, rtol=1e-5)


def test_the_default_clip_is_one_number_in_the_section_the_command_line_and_the_help() -> None:
    assert OptimConfig().max_grad_norm == 1.0
    for overrides in ([], ["optim.lr=0.1"], ["loop.max_steps=3"]):  # keys that are not given overwrite nothing
        assert load_spec(None, overrides).spec.optim.max_grad_norm == 1.0
    assert load_spec(None, ["optim.max_grad_norm=0.25"]).spec.optim.max_grad_norm == 0.25
    assert "optim.max_grad_norm = 1.0" in key_lines("optim", width=80)


def test_micro_batches_are_weighted_by_their_content_and_empty_ones_by_zero() -> None:
    trainable = Trainable(Vector(), pulled)
    step = step_of(trainable)
    nothing = MicroBatch({"x": torch.full((2,), torch.nan)}, 0)
    output = step.run([micro(1.0, rows=6), nothing, micro(5.0, rows=2)], global_weight=8, step=1)
    assert torch.allclose(trainable.module.w.detach(), -PULL * 2.0)  # (6 * 1 + 2 * 5) / 8
    assert not bool(output.skip)


def test_a_worker_with_only_empty_micro_batches_gives_zeros() -> None:
    trainable = Trainable(Vector(), pulled)
    output = step_of(trainable).run([], global_weight=8, step=1)
    assert float(output.loss) == 0.0 and float(output.norm) == 0.0 and not bool(output.skip)


def test_a_loss_that_uses_the_global_count_is_summed_without_a_weight() -> None:
    counts: list[int] = []

    def loss(module: nn.Module, batch: dict[str, Tensor], *, num_items_in_batch: int) -> LossOutput:
        counts.append(num_items_in_batch)
        return LossOutput((module.w * PULL).sum() * batch["x"].sum() / num_items_in_batch)

    trainable = Trainable(Vector(), loss, takes_global_count=True)
    step_of(trainable).run([micro(1.0, rows=6), micro(5.0, rows=2)], global_weight=8, step=1)
    assert counts == [8, 8] and torch.allclose(trainable.module.w.detach(), -PULL * 2.0)


def test_the_auxiliary_loss_is_trained_and_reported_separately() -> None:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(module.w[0] + 2.0, aux=module.w[1] * 3.0 + 0.5)

    trainable = Trainable(Vector(), loss)
    output = step_of(trainable).run([micro(), micro()], global_weight=4, step=1)
    assert (float(output.loss), float(output.aux_loss)) == (2.0, 0.5)
    assert trainable.module.w.tolist() == [-1.0, -3.0, 0.0]


class Slow(torch.optim.SGD):
    """An optimizer of somebody's that knows nothing of `found_inf`."""

    _step_supports_amp_scaling = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self._step_supports_amp_scaling = False

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()


def test_an_optimizer_without_found_inf_support_is_not_stepped() -> None:
    module = Vector()
    optimizer = Slow(module.parameters(), lr=1.0)
    step = step_of(Trainable(module, pulled), optimizers=[optimizer])
    assert bool(step.run([micro(float("inf"))], global_weight=2, step=1).skip)
    assert optimizer.steps == 0 and module.w.tolist() == [0.0, 0.0, 0.0]
    assert not bool(step.run([micro()], global_weight=2, step=2).skip)
    assert optimizer.steps == 1 and torch.allclose(module.w.detach(), -PULL)


def test_hooks_are_called_in_order() -> None:
    told: list[Any] = []
    module = Vector()

    def agree(local: LocalStep) -> GlobalStep:
        told.append(("agree", local.step, float(local.sum_of_squares), bool(local.nonfinite), local.counts.tolist()))
        return GlobalStep(norm=torch.tensor(26.0, dtype=torch.float64), skip=local.nonfinite, counts=local.counts * 2)

    trainable = Trainable(
        module,
        pulled,
        agree=agree,
        counts=lambda: torch.tensor([7]),
        commit=lambda agreed: told.append(("commit", agreed.counts.tolist(), module.w.tolist())),
        between_steps=lambda step: told.append(("between", step)),
    )
    output = step_of(trainable, clip=2.0).run([micro()], global_weight=2, step=5)
    after = (-PULL * (2.0 / 26.0)).tolist()  # clipped by the norm that was agreed on, not by its own
    assert told[0] == ("agree", 5, pytest.approx(169.0), False, [7])
    assert told[1][:2] == ("commit", [14]) and told[1][2] == pytest.approx(after)
    assert told[2:] == [("between", 5)] and float(output.norm) == 26.0


def test_a_hook_may_assign_the_gradient_of_a_single_worker() -> None:
    module = Vector()
    step = step_of(Trainable(module, pulled))
    handle = module.w.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    step.run([micro()], global_weight=2, step=1)
    assert torch.allclose(module.w.detach(), -2 * PULL)
    handle.remove()
    step.run([micro()], global_weight=2, step=1)
    assert torch.allclose(module.w.detach(), -3 * PULL)
