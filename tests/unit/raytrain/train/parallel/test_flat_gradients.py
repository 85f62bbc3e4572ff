"""Flat gradient buffers. (The verbs of several workers: tests/numerics/test_workers.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain.errors import RunError
from raytrain.train.parallel.flat_gradients import GradientBuffers


def module_of(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def backward(module: nn.Sequential) -> None:
    x = torch.linspace(-1, 1, 12, dtype=module[0].weight.dtype).reshape(2, 6)
    module(x).square().sum().backward()


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(1 << 20, [74]), (140, [35, 24, 15]), (4, [30, 5, 20, 4, 12, 3])])
def test_gradients_are_views_in_registration_order_for_any_buckets(bucket_bytes: int, sizes: list[int]) -> None:
    plain, module = module_of(), module_of()
    backward(plain)
    buffers = GradientBuffers(module.parameters(), bucket_bytes=bucket_bytes)
    backward(module)
    buffers.check()
    assert [flat.numel() for flat in buffers.buffers] == sizes
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert torch.equal(torch.cat(buffers.buffers), expected)
    squares = float(expected.double().square().sum())
    assert buffers.sum_of_squares().dtype is torch.float64
    assert float(buffers.sum_of_squares()) == pytest.approx(squares, rel=3e-7)
    buffers.scale_(torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(module[1].weight.grad, plain[1].weight.grad * 0.5)


def test_a_new_buffer_begins_where_the_dtype_changes() -> None:
    module = module_of()
    module[1].double()
    assert [flat.dtype for flat in GradientBuffers(module.parameters()).buffers] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]


def test_backward_adds_up_and_zeroing_puts_the_views_back() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    once = buffers.buffers[0].clone()
    backward(module)
    assert torch.allclose(buffers.buffers[0], 2 * once)
    module.zero_grad(set_to_none=True)  # somebody's habit
    buffers.zero_()
    backward(module)
    buffers.check()
    assert torch.equal(buffers.buffers[0], once)


def test_a_parameter_without_a_gradient_keeps_zeros() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    module[0](torch.ones(1, 6)).sum().backward()
    assert float(module[2].weight.grad.abs().sum()) == 0.0 and float(module[0].weight.grad.sum()) != 0.0
    buffers.check()


def test_a_replaced_gradient_is_an_error_that_names_the_parameter() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    module[1].weight.grad = module[1].weight.grad.clone()
    with pytest.raises(RunError, match=r"shape \(4, 5\) was replaced"):
        buffers.check()


def test_a_mark_makes_the_sum_non_finite_only_if_requested() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    before = buffers.buffers[0].clone()
    buffers.mark_(torch.tensor(False))
    assert torch.equal(buffers.buffers[0], before) and buffers.nonfinite(module) == []
    buffers.mark_(torch.tensor(True))
    assert not torch.isfinite(buffers.sum_of_squares())


def test_parameters_with_gradients_that_are_not_finite_are_named() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    module[2].bias.grad[1] = torch.inf
    module[0].weight.grad[0, 0] = torch.nan
    assert buffers.nonfinite(module) == ["0.weight", "2.bias"]
