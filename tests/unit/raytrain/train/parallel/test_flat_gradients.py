"""Flat gradient buffers. (The verbs of several workers: tests/numerics/test_workers.py.)"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_mark_makes_the_sum_non_finite_only_for_such_a_loss(value: float) -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    before = buffers.buffers[0].clone()
    buffers.mark_(torch.tensor(-3.0))
    assert torch.equal(buffers.buffers[0], before) and buffers.nonfinite(module) == []
    buffers.mark_(torch.tensor(value))
    assert not torch.isfinite(buffers.sum_of_squares())


def test_parameters_with_gradients_that_are_not_finite_are_named() -> None:
    module = module_of()
    buffers = GradientBuffers(module.parameters())
    backward(module)
    module[2].bias.grad[1] = torch.inf
    module[0].weight.grad[0, 0] = torch.nan
    assert buffers.nonfinite(module) == ["0.weight", "2.bias"]


# ---------------------------------------------------------------- autograd's gradients, taken over


def taken(module: nn.Module, *, bucket_bytes: int, passes: Callable[[int], Tensor], number: int = 1) -> GradientBuffers:
    """Buffers after a step of some passes, and numbers of another step in them before."""
    buffers = GradientBuffers(module.parameters(), bucket_bytes=bucket_bytes, with_flags=True, takes=True)
    for flat in buffers.payloads:
        flat.fill_(torch.nan)
    step(buffers, passes=passes, number=number)
    return buffers


def step(buffers: GradientBuffers, *, passes: Callable[[int], Tensor], number: int) -> None:
    buffers.zero_()
    for at in range(number):
        loss = passes(at)
        buffers.attach()
        loss.backward()
        buffers.take()
    buffers.check()


def loss_of(module: nn.Module, at: int) -> Tensor:
    return module(torch.linspace(-1, 1 + at, 12).reshape(2, 6)).square().sum()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 140, 4])
def test_gradients_that_are_taken_over_are_those_of_a_plain_loop(bucket_bytes: int, number: int) -> None:
    plain, module = module_of(), module_of()
    for at in range(number):
        loss_of(plain, at).backward()
    buffers = taken(module, bucket_bytes=bucket_bytes, passes=lambda at: loss_of(module, at), number=number)
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    for again in (False, True):
        assert torch.equal(torch.cat(buffers.buffers), expected) and not any(buffers.unused()), again
        assert buffers.flagged() == [False] * 3
        memory = {flat.untyped_storage().data_ptr() for flat in buffers.payloads}
        assert all(p.grad.untyped_storage().data_ptr() in memory for p in module.parameters())
        step(buffers, passes=lambda at: loss_of(module, at), number=number)


def test_a_buffer_is_taken_inside_the_backward_that_completes_it() -> None:
    """So that autograd's gradients of hardly more than one buffer exist at the same time."""
    module, seen = module_of(), list[list[bool]]()
    buffers = GradientBuffers(module.parameters(), bucket_bytes=140, takes=True)
    own = {flat.untyped_storage().data_ptr() for flat in buffers.payloads}

    def look(_: Tensor) -> None:
        held = [p.grad for p in module.parameters()]
        seen.append([one is not None and one.untyped_storage().data_ptr() in own for one in held])

    module[0].weight.register_hook(look)
    step(buffers, passes=lambda at: loss_of(module, at), number=2)
    assert seen == [[False, False, True, True, True, True]] * 2


@pytest.mark.parametrize("number", [1, 2])
def test_gradients_that_share_memory_are_added_up_apart(number: int) -> None:
    module = nn.ParameterList([torch.ones(2, 2), torch.full((2, 2), 2.0)])

    def loss(_: int) -> Tensor:
        return (module[0].view(4) + module[1].view(4)).square().sum()

    loss(0).backward()
    assert module[0].grad.data_ptr() == module[1].grad.data_ptr(), "torch hands out one memory"
    buffers = taken(module, bucket_bytes=1 << 20, passes=loss, number=number)
    buffers.scale_(torch.tensor(0.5))
    assert all((p.grad == 3.0 * number).all() for p in module)


def test_what_no_pass_has_reached_is_zero_and_unused() -> None:
    module = module_of()
    buffers = taken(module, bucket_bytes=140, passes=lambda at: module[at](torch.ones(1, 6 - at)).sum(), number=2)
    assert buffers.unused() == [False] * 4 + [True] * 2
    assert not module[2].weight.grad.any() and torch.isfinite(buffers.sum_of_squares())
    buffers.leave_out(buffers.unused())
    assert [p.grad is None for p in module.parameters()] == buffers.unused()


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 4])
def test_a_forward_that_calls_backward_or_zero_grad_loses_nothing(bucket_bytes: int) -> None:
    module, plain = module_of(), module_of()

    def passes(at: int) -> Tensor:
        module[2](torch.ones(1, 4) * (1 + at)).sum().backward()
        assert not any(buffers.unused()[4:])
        loss = loss_of(module, at)
        if at == 1:
            module.zero_grad(set_to_none=True)  # of a pass before, but for what this forward has added
        return loss

    buffers = GradientBuffers(module.parameters(), bucket_bytes=bucket_bytes, takes=True)
    step(buffers, passes=passes, number=1)
    loss_of(plain, 0).backward()
    plain[2](torch.ones(1, 4)).sum().backward()
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, rtol=1e-6, atol=1e-6)
    step(buffers, passes=passes, number=2)
    loss_of(plain, 1).backward()
    plain[2](2 * torch.ones(1, 4)).sum().backward()
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 4])
def test_a_users_hook_sees_what_has_been_accumulated(bucket_bytes: int) -> None:
    module, seen = module_of(), list[float]()
    buffers = GradientBuffers(module.parameters(), bucket_bytes=bucket_bytes, takes=True)
    module[2].bias.register_post_accumulate_grad_hook(lambda bias: seen.append(float(bias.grad[0])))
    step(buffers, passes=lambda at: module(torch.ones(1, 6))[0, 0], number=3)
    assert seen == [1.0, 2.0, 3.0] and module[2].bias.grad[0] == 3.0
    module[1].bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad * 2))
    with pytest.raises(RunError, match=r"shape \(4,\) was replaced"):
        step(buffers, passes=lambda at: loss_of(module, at), number=1)


def test_a_sparse_gradient_is_refused() -> None:
    module = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(RunError, match=r"shape \(5, 3\) has a sparse gradient"):
        taken(module, bucket_bytes=1 << 20, passes=lambda at: module(torch.tensor([1])).sum())


def test_parameters_do_not_keep_the_buffers_alive() -> None:
    module = module_of()
    kept = weakref.ref(taken(module, bucket_bytes=4, passes=lambda at: loss_of(module, at)))
    gc.collect()
    assert kept() is None
    loss_of(module, 0).backward()
