"""Muon: torch's own update, and what torch's does not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raytrain.train.optim import Muon, orthogonal, takes_skip_on_device

SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16)]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """DET: the same parameters for the same shapes, each with a gradient."""
    draw = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=dtype)
    return made


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], number: int = 3) -> list[Tensor]:
    """Updates whose gradients change from one to the next."""
    for index in range(number):
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1 + index).add_(parameter.detach())
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_matrices_are_updated_as_torch_does_it_bit_for_bit() -> None:
    keys = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8}
    ours, theirs = drawn(*SHAPES), drawn(*SHAPES)
    mine = steps(Muon(ours, **keys), ours)
    other = steps(torch.optim.Muon(theirs, **keys, adjust_lr_fn="match_rms_adamw"), theirs)
    for one, two, start in zip(mine, other, drawn(*SHAPES), strict=True):
        assert torch.equal(one, two) and not torch.equal(one, start)


def test_each_matrix_of_a_stack_is_orthogonalised_alone() -> None:
    (stack,) = drawn((3, 8, 24), dtype=torch.float64)
    assert stack.grad is not None
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    for parameter, gradient in zip(alone, stack.grad, strict=True):
        parameter.grad = gradient.clone()
    together = steps(Muon([stack], lr=0.02), [stack])[0]
    for one, two in zip(together, steps(Muon(alone, lr=0.02), alone), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14)


def test_an_update_is_nearly_orthogonal_for_any_gradient_scale() -> None:
    draw = torch.Generator().manual_seed(1)
    for scale in (1e-6, 1.0, 1e6):
        made = orthogonal(scale * torch.randn(5, 12, 30, generator=draw, dtype=torch.float64))
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.6 and values.max() < 1.3
    assert orthogonal(torch.randn(2, 12, 30)).dtype == torch.bfloat16
    assert not orthogonal(torch.zeros(1, 3, 4)).any()


def test_a_step_is_skipped_on_the_device_though_its_gradients_are_not_finite() -> None:
    parameters = drawn((8, 24), (2, 4, 6))
    optimizer = Muon(parameters, lr=0.1)
    assert takes_skip_on_device(optimizer)
    optimizer.found_inf = torch.zeros(())
    before = steps(optimizer, parameters)
    buffers = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in parameters]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for parameter, value, buffer in zip(parameters, before, buffers, strict=True):
        assert torch.equal(parameter, value) and torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)
    plain = drawn((8, 24), (2, 4, 6))
    for one, two in zip(before, steps(Muon(plain, lr=0.1), plain), strict=True):
        assert torch.equal(one, two), "a step that is not skipped is another one"


def test_many_matrices_are_processed_in_bounded_parts_and_a_parameter_without_a_gradient_is_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = drawn(*[(4, 6)] * 7, dtype=torch.float64), drawn(*[(4, 6)] * 7, dtype=torch.float64)
    reference = steps(Muon(whole, lr=0.1), whole)
    sizes: list[int] = []
    monkeypatch.setattr("raytrain.train.optim.BATCH_ELEMENTS", 3 * 24)
    inner = orthogonal
    monkeypatch.setattr("raytrain.train.optim.orthogonal", lambda x: [sizes.append(len(x)), inner(x)][1])
    for one, two in zip(steps(Muon(parts, lr=0.1), parts), reference, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14)
    assert sizes == [3, 3, 1] * 3
    kept = parts[0].detach().clone()
    parts[0].grad = None
    Muon(parts, lr=0.1).step()
    assert torch.equal(parts[0], kept)


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2, 2)])
def test_a_shape_that_is_not_a_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Muon takes matrices"):
        Muon([nn.Parameter(torch.ones(shape))], lr=0.1)
