"""What a training step dispatches beyond the model's own operations and the optimizer's, on tensors without data.

Views and metadata aside, each operation is about one kernel on a GPU. The step runs with a GPU's buckets and norm.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain.config.sections import OptimConfig
from raytrain.models.gpt import gpt
from raytrain.train.optim import Schedule, build_optimizers
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers, HeldGradients, sum_on_device
from raytrain.train.precision import LossScale, policy_for
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch

GOAL = 20
"""Half of the goal at which the audit of the GPU's step aimed."""
FREE = {
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "split", "split_with_sizes", "detach",
    "unsqueeze", "squeeze", "permute", "as_strided", "alias", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "_reshape_alias", "reshape", "unbind", "narrow", "lift_fresh", "is_same_size", "unfold",
    "device", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
OPTIMIZER = {"_fused_adamw_": 2, "_foreach_add_": 2, "_foreach_sub_": 2}
"""A group each with and without weight decay: the update, its step count, and that count taken back after a skip."""


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def of_a_step(size: dict[str, int], precision: str, passes: int) -> tuple[Counter[str], Counter[str]]:
    """Operations of the second step, and of its model's forward and backward in a plain loop."""
    device, policy = torch.device("cpu"), policy_for(precision)  # autograd would start a thread for a fake GPU
    trainable, optim = gpt(**size, vocab_size=50304), OptimConfig()
    batch = {name: torch.zeros(4, size["context"], dtype=torch.int64) for name in ("input_ids", "labels")}
    step = TrainingStep(
        trainable, optimizers=build_optimizers(trainable.module, optim, lr=1e-3), policy=policy,
        scale=LossScale(device, enabled=False), workers=Workers(), max_grad_norm=1.0, device=device,
        schedule=Schedule(optim, lr=1e-3, warmup_steps=1, max_steps=100),
    )  # fmt: skip
    micros = [MicroBatch(batch, 4, last=number == passes) for number in range(1, passes + 1)]
    for number in (1, 2):
        with Dispatched() as ours:
            step.run(micros, global_weight=4 * passes, step=number)
    for one in trainable.module.parameters():
        one.grad = None
    with Dispatched() as plain:
        for _ in range(passes):
            with policy.autocast(device):
                loss = trainable.module(**batch)["loss"]
            loss.backward()
    return ours.found, plain.found


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientBuffers, "sum_of_squares", lambda self: sum_on_device(self.buffers))
    monkeypatch.setattr(HeldGradients, "sum_of_squares", GradientBuffers.sum_of_squares)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("layers", "width", "passes", "goal"), [(12, 768, 1, GOAL), (2, 64, 1, GOAL), (2, 64, 4, GOAL + 3 * 8)]
)
def test_a_step_dispatches_few_operations_of_its_own(
    layers: int, width: int, passes: int, goal: int, precision: str
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        size = {"layers": layers, "heads": 2, "width": width, "context": 64}
        ours, plain = of_a_step(size, precision, passes)
    assert all(ours[name] >= count for name, count in OPTIMIZER.items())
    own = ours - plain - Counter(OPTIMIZER)
    assert sum(own.values()) <= goal, own.most_common()
    assert not plain - ours, "all of the model's are there"
    assert not own["_local_scalar_dense"], "nothing is read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_of_a_gpu_is_summed_in_float64(dtype: torch.dtype) -> None:
    """torch's kernel of the CPU stands in for that of the GPU."""
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, generator=draw).to(dtype) for size in (1, 1000, 70000)]
    found = sum_on_device(parts)
    assert found.dtype is torch.float64
    assert found.item() == pytest.approx(sum(float(one.double().square().sum()) for one in parts), rel=1e-12)
