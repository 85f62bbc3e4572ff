"""Which dtype computes, which owns the weights, and who scales the loss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lab import MLP, class_rows, make_session, train
from torch import Tensor

from raytrain.train.precision import HIGHER_PRECISION, LossScale, apply_matmul, policy_for

CPU = torch.device("cpu")
COMPUTES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def matmul_restored() -> Iterator[None]:
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


@pytest.mark.covers("PREC-01", "CLI-01")
@pytest.mark.parametrize("precision", COMPUTES)
def test_a_linear_layer_computes_in_the_requested_precision(precision: str) -> None:
    session = make_session(
        MLP,
        {"train": class_rows(32), "eval": class_rows(8)},
        precision=precision,
        loop={"max_steps": 2, "global_batch_size": 16},
    )
    linear, seen = session.trainable.module.layers[0], []
    linear.register_forward_hook(lambda module, inputs, output: seen.append((module.training, output.dtype)))
    losses: list[torch.dtype] = []
    inner = session.trainable.loss
    session.trainable.loss = lambda module, batch: (losses.append((out := inner(module, batch)).loss.dtype), out)[1]
    train(session)
    assert set(seen) == {(True, COMPUTES[precision]), (False, COMPUTES[precision])}, "training or evaluation differs"
    masters = torch.float64 if precision == "fp64" else torch.float32
    assert set(losses) == {masters}
    assert {p.dtype for p in session.trainable.module.parameters()} == {masters}
    assert {flat.dtype for flat in session.step.gradients.buffers} == {masters}
    assert {v.dtype for s in session.optimizers[0].state.values() for k, v in s.items() if k != "step"} == {masters}
    seen.clear()
    session.trainable.module(torch.zeros(2, 12, dtype=masters))  # outside the step there is no autocast
    assert [dtype for _, dtype in seen] == [masters]


@pytest.mark.covers("PREC-11")
@pytest.mark.usefixtures("matmul_restored")
@pytest.mark.parametrize(
    ("precision", "matmul", "tf32"), [("fp32", "highest", False), ("tf32", "high", True), ("bf16", "highest", False)]
)
def test_the_matmul_setting_is_read_back_and_recorded(precision: str, matmul: str, tf32: bool) -> None:
    torch.set_float32_matmul_precision("medium")
    session = make_session(MLP, {"train": class_rows(32), "eval_fraction": 0.0}, prepare=False)
    session.prepare(precision)  # a plan for this machine would not take tf32
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is tf32 and torch.backends.cuda.matmul.allow_tf32 is tf32
    assert session.matmul == {  # what the attempt's event holds
        "float32_matmul": matmul,
        "cuda_matmul_tf32": tf32,
        "cudnn_tf32": tf32,
        "autocast": "bfloat16" if precision == "bf16" else None,
        "loss_scale": False,
    }


@pytest.mark.usefixtures("matmul_restored")
def test_a_fallback_in_a_run_changes_the_computation_but_not_the_state() -> None:
    session = make_session(MLP, {"train": class_rows(32), "eval_fraction": 0.0}, precision="fp16")
    weights = [p.data_ptr() for p in session.trainable.module.parameters()]
    assert session.step.scale.enabled and "scaler" in session.parts()
    session.use_precision("fp32")
    assert not session.step.scale.enabled and "scaler" not in session.parts()
    assert session.step.policy is policy_for("fp32")
    assert [p.data_ptr() for p in session.trainable.module.parameters()] == weights
    train(session)


def test_each_fallback_has_more_bits_or_more_range() -> None:
    order = ["fp16", "bf16", "fp32"]
    assert [HIGHER_PRECISION[name] for name in order[:-1]] == order[1:]
    assert HIGHER_PRECISION["tf32"] == "fp32" and "fp32" not in HIGHER_PRECISION
    for name in HIGHER_PRECISION:
        assert apply_matmul(policy_for(HIGHER_PRECISION[name]))["loss_scale"] is False


def skip(value: bool) -> Tensor:
    return torch.tensor(value)


def test_the_scale_halves_after_a_bad_step_and_doubles_after_a_long_run_of_good_ones() -> None:
    scale = LossScale(CPU, enabled=True, initial=8.0, growth_interval=3)
    values = []
    for bad in [False, False, True, False, False, False, False, False, False, True]:
        scale.update(skip(bad))
        values.append(float(scale.value))
    assert values == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8]


def test_scaling_and_unscaling_are_exact() -> None:
    scale = LossScale(CPU, enabled=True)
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    scaled = [flat * scale.value for flat in gradients]
    for flat in scaled:
        flat.mul_(scale.inverse)
    assert all(torch.equal(a, b) for a, b in zip(scaled, gradients, strict=True))
    loss = torch.tensor(0.3)
    assert float(scale.scale(loss)) == float(loss) * 2**16


def test_a_loss_scale_is_saved_and_restored() -> None:
    first = LossScale(CPU, enabled=True, growth_interval=3)
    for bad in (True, False, False):
        first.update(skip(bad))
    second = LossScale(CPU, enabled=True, growth_interval=3)
    second.load_state_dict(first.state_dict())
    second.update(skip(False))  # the third good one in a row
    assert float(second.value) == 2.0**16 and float(first.value) == 2.0**15
    off = LossScale(CPU, enabled=False)
    off.load_state_dict(first.state_dict())
    off.update(skip(True))
    loss = torch.tensor(2.0)
    assert off.state_dict() == {} and float(off.value) == 1.0 and off.scale(loss) is loss
