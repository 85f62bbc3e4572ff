"""Flat gradient buffers. (The verbs of several workers: tests/numerics/test_workers.py.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.train.parallel.flat_gradients import GradientBuffers, HeldGradients


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


# ---------------------------------------------------------------- autograd's gradients, held for one worker


def held(module: nn.Module, passes: Callable[[int], Tensor], *, number: int = 1) -> HeldGradients:
    """Gradients after a step of some passes; `passes` is a forward."""
    gradients = HeldGradients(module.parameters())
    step(gradients, passes, number=number)
    return gradients


def step(gradients: GradientBuffers, passes: Callable[[int], Tensor], *, number: int) -> None:
    gradients.zero_()
    for at in range(number):
        loss = passes(at)
        gradients.attach()
        loss.backward()
        gradients.take()
    gradients.check()


def loss_of(module: nn.Module, at: int) -> Tensor:
    return module(torch.linspace(-1, 1 + at, 12).reshape(2, 6)).square().sum()


@pytest.mark.parametrize("number", [1, 3])
def test_held_gradients_are_autograds_own_and_those_of_buffers_to_the_bit(number: int) -> None:
    module, other = module_of(), module_of()
    buffers = GradientBuffers(other.parameters())
    seen: list[int] = []
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.data_ptr()))
    gradients = HeldGradients(module.parameters())
    for _ in range(2):
        step(gradients, lambda at: loss_of(module, at), number=number)
        step(buffers, lambda at: loss_of(other, at), number=number)
        assert seen == [gradients.buffers[0].data_ptr()] * number, "neither copied nor zeroed, and added to in place"
        seen.clear()
        expected = [p.grad for p in other.parameters()]
        assert all(map(torch.equal, gradients.buffers, expected)) and not any(gradients.unused())
        assert gradients.sum_of_squares() == buffers.sum_of_squares()
        gradients.scale_(torch.tensor(0.3, dtype=torch.float64))
        buffers.scale_(torch.tensor(0.3, dtype=torch.float64))
        assert all(torch.equal(one.grad, two) for one, two in zip(module.parameters(), expected, strict=True))


@pytest.mark.parametrize("number", [1, 2])
def test_gradients_that_share_memory_are_added_up_apart(number: int) -> None:
    module = nn.ParameterList([torch.ones(2, 2), torch.full((2, 2), 2.0)])

    def loss(_: int) -> Tensor:
        return (module[0].view(4) + module[1].view(4)).square().sum()

    loss(0).backward()
    assert module[0].grad.data_ptr() == module[1].grad.data_ptr(), "torch hands out one memory"
    held(module, loss, number=number).scale_(torch.tensor(0.5))
    assert all((p.grad == 3.0 * number).all() for p in module)


def test_what_no_pass_has_reached_has_no_gradient() -> None:
    module = module_of()
    gradients = held(module, lambda at: module[at](torch.ones(1, 6 - at)).sum(), number=2)
    assert gradients.unused() == [False] * 4 + [True] * 2
    assert gradients.finite() == [True] * 6 and gradients.nonfinite(module) == []
    gradients.mark_(torch.tensor(torch.inf))
    assert not torch.isfinite(gradients.sum_of_squares()) and gradients.nonfinite(module) == ["0.weight"]
    gradients.leave_out(gradients.unused())
    assert [p.grad is None for p in module.parameters()] == [False] * 4 + [True] * 2
    gradients.zero_()
    assert gradients.unused() == [True] * 6 and gradients.sum_of_squares() == 0.0


def test_a_forward_that_calls_backward_or_zero_grad_loses_nothing() -> None:
    module, plain = module_of(), module_of()

    def passes(at: int) -> Tensor:
        module[2](torch.ones(1, 4) * (1 + at)).sum().backward()
        assert not any(gradients.unused()[4:])
        loss = loss_of(module, at)
        if at == 1:
            module.zero_grad(set_to_none=True)  # of the passes before too
        return loss

    gradients = HeldGradients(module.parameters())
    step(gradients, passes, number=2)
    for at in range(2):
        loss_of(plain, at).backward()
        plain[2](torch.ones(1, 4) * (1 + at)).sum().backward()
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, rtol=1e-6, atol=1e-6)


def test_a_users_hook_sees_what_has_been_accumulated_and_may_assign_it() -> None:
    module, seen = module_of(), list[float]()
    module[2].bias.register_post_accumulate_grad_hook(lambda bias: seen.append(float(bias.grad[0])))
    held(module, lambda at: module(torch.ones(1, 6))[0, 0], number=3)
    assert seen == [1.0, 2.0, 3.0]
    module[2].bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad * 2))
    gradients = held(module, lambda at: module(torch.ones(1, 6))[0, 0], number=2)
    assert (
        module[2].bias.grad[0] == (1 * 2 + 1) * 2 and gradients.buffers[-1].data_ptr() == module[2].bias.grad.data_ptr()
    )


def test_weights_of_any_strides_and_complex_ones_are_rows_of_real_numbers() -> None:
    weights = [
        torch.randn(8, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 6).t(),
        torch.randn(8, 3, 1, 1).as_strided((8, 3, 1, 1), (3, 1, 3, 3)),
        torch.randn(3, 5, dtype=torch.cfloat).t(), torch.randn((), dtype=torch.cfloat), torch.randn(3, 1),
    ]  # fmt: skip
    module, other = (nn.ParameterList([one.clone() for one in weights]) for _ in range(2))
    gradients = held(module, lambda _: sum((p * p.detach().conj()).real.sum() for p in module))
    buffers = GradientBuffers(other.parameters())
    step(buffers, lambda _: sum((p * p.detach().conj()).real.sum() for p in other), number=1)
    assert gradients.sum_of_squares() == buffers.sum_of_squares()
    gradients.scale_(2.0)
    for own, weight in zip(module, other, strict=True):
        assert torch.equal(own.grad, 2 * weight.grad) and own.grad.stride() == own.stride()


def test_a_hook_that_takes_a_gradient_away_is_refused_and_the_check_leaves_with_the_session() -> None:
    module = module_of()
    handle = module[1].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    gradients = HeldGradients(module.parameters())
    with pytest.raises(RunError, match=r"hook has taken away .* shape \(\d+, \d+\)"):
        step(gradients, lambda at: module(torch.ones(1, 6)).sum(), number=1)
    gradients.release()
    assert len(module[1].weight._post_accumulate_grad_hooks) == 1
    handle.remove()
    held(module, lambda at: module(torch.ones(1, 6)).sum())


@pytest.mark.parametrize("number", [1, 3])
def test_sparse_gradients_are_held_dense(number: int) -> None:
    module, plain = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)
    gradients = held(module, lambda at: module(torch.tensor([at, 1, 1])).square().sum(), number=number)
    plain.load_state_dict(module.state_dict())
    for at in range(number):
        plain(torch.tensor([at, 1, 1])).square().sum().backward()
    assert torch.allclose(module.weight.grad, plain.weight.grad) and module.weight.grad.layout is torch.strided
    gradients.scale_(0.5)
    assert torch.allclose(module.weight.grad, 0.5 * plain.weight.grad)


def test_conjugated_gradients_are_resolved() -> None:
    module = nn.ParameterList([torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([[2 - 1j]])])
    factors = [torch.tensor([2 + 1j, 1j]), torch.tensor([[1 - 3j]])]

    def loss(_: int) -> Tensor:
        return sum((p.conj() * f).real.sum() for p, f in zip(module, factors, strict=True))  # type: ignore[return-value]

    loss(0).backward()
    assert all(p.grad.is_conj() for p in module), "torch conjugates when it is read"
    expected = [p.grad.resolve_conj().clone() for p in module]
    gradients = held(module, loss)
    assert all(torch.equal(p.grad, one) for p, one in zip(module, expected, strict=True))
    assert float(gradients.sum_of_squares()) == pytest.approx(16.0)


def test_parts_of_a_larger_gradient_keep_their_own_memory_only() -> None:
    module = nn.ParameterList([torch.ones(2, 3), torch.full((4, 3), 2.0)])

    def loss(_: int) -> Tensor:
        return (torch.cat(list(module)) * torch.arange(18.0).view(6, 3)).sum()

    loss(0).backward()
    assert module[0].grad.untyped_storage().nbytes() == 72, "torch hands out parts of one memory"
    held(module, loss)
    assert [p.grad.untyped_storage().nbytes() for p in module] == [24, 48]
    assert module[1].grad.tolist()[0] == [6.0, 7.0, 8.0]


def test_a_loss_that_is_not_finite_marks_a_gradient_with_elements() -> None:
    module = nn.ParameterList([torch.empty(0, 8), torch.ones(2)])
    gradients = held(module, lambda _: module[0].sum() + module[1].sum())
    gradients.mark_(torch.tensor(1.5))
    assert float(gradients.sum_of_squares()) == pytest.approx(2.0)
    gradients.mark_(torch.tensor(torch.nan))
    assert torch.isnan(gradients.sum_of_squares())
