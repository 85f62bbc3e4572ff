"""The sum of squares for the clip norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain.train.parallel import flat_gradients as squares
from raytrain.train.parallel.flat_gradients import PIECE, ROW, SquareSum, squares_of_each, sum_of_squares

SIZES = (0, 1, ROW - 1, ROW, PIECE, PIECE + 1, 3 * PIECE + 2 * ROW + 7)


def drawn(size: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_exact_sum_to_rounding(size: int, dtype: torch.dtype) -> None:
    """float32 rounds sums of 4,096 squares to about 1e-7."""
    numbers = drawn(size, dtype=dtype)
    exact = math.fsum(number * number for number in numbers.double().tolist())
    found = sum_of_squares([numbers])
    bound = 3e-7 if dtype is torch.float32 else 1e-13
    assert found.dtype is torch.float64 and found.item() == pytest.approx(exact, rel=bound)


@pytest.mark.parametrize("factor", [1e-38, 1e-25, 1e-15, 1e25, 3e37])
def test_squares_that_float32_cannot_hold_are_counted(factor: float) -> None:
    numbers = drawn(3 * PIECE).clamp(-10, 10) * factor
    found = sum_of_squares([numbers]).sqrt().item()
    assert found == pytest.approx(factor * sum_of_squares([drawn(3 * PIECE)]).sqrt().item(), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, PIECE - 1, 3 * PIECE + 2 * ROW + 6])
def test_one_number_that_is_not_finite_makes_the_sum_not_finite(value: float, place: int) -> None:
    numbers = drawn(SIZES[-1])
    numbers[place] = value
    assert not math.isfinite(sum_of_squares([numbers]).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_the_place_in_memory_nor_the_number_of_threads_changes_a_bit(dtype: torch.dtype) -> None:
    numbers = drawn(SIZES[-1], dtype=dtype)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for offset in (0, 1, 3, 8):
                moved = torch.cat([torch.ones(offset, dtype=dtype), numbers])[offset:]
                found.add(sum_of_squares([moved]).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("width", [1, 3, 128, ROW, ROW + 5, 2 * ROW])
def test_a_part_of_a_stack_counts_as_if_it_were_alone(width: int) -> None:
    """Experts and shards: the rows are the same, so only the order of float64 sums differs."""
    stack = drawn(6 * 5 * width).view(6, 5, width)
    whole = sum_of_squares([stack]).item()
    alone = math.fsum(sum_of_squares([expert.clone()]).item() for expert in stack)
    shards = sum(sum_of_squares([part.clone()]).item() for part in (stack[:2], stack[2:]))
    assert whole == pytest.approx(alone, rel=1e-15) and whole == pytest.approx(shards, rel=1e-15)
    buffer = torch.cat([torch.ones(7), stack.flatten()])
    neighbours = [part.view(5, width) for part in buffer[7:].split(5 * width)]
    assert sum_of_squares(neighbours).item() == pytest.approx(whole, rel=1e-15)


def test_a_sum_follows_the_values_in_memory() -> None:
    first, second, half = drawn(5000).view(50, 100), drawn(300), drawn(40, dtype=torch.bfloat16)
    total = SquareSum([first, second, half])
    before = total().item()
    first.mul_(2)
    second.zero_()
    expected = sum(float((one.double() ** 2).sum()) for one in (first, half))
    assert total().item() == pytest.approx(expected, rel=3e-7) and before < expected


def test_the_norm_is_that_of_torchs_clip() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, ROW + 3, 2 * PIECE + 1)]
    for parameter in parameters:
        parameter.grad = drawn(parameter.numel())
    mine = sum_of_squares([parameter.grad for parameter in parameters]).sqrt().item()
    assert nn.utils.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(mine, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts", [1, 7, 300])
def test_experts_on_a_gpu_are_summed_in_one_operation_for_all(dtype: torch.dtype, experts: int) -> None:
    weights = [
        drawn(experts * 64 * 8, dtype=dtype).view(experts, 64, 8),
        drawn(experts * 5, dtype=dtype).view(experts, 5),
    ]
    weights[0][0] *= 1e-25  # whose squares float32 cannot hold
    groups = [list(own) for own in zip(*(one.unbind(0) for one in weights), strict=True)]
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seen():
        found = squares._in_few_kernels(groups)
    assert sorted(name for name in seen if name != "detach") == ["_foreach_norm", "pow", "stack"]
    exact = [math.fsum(n * n for one in group for n in one.double().flatten().tolist()) for group in groups]
    assert found == pytest.approx(exact, rel=1e-13)


def test_each_group_on_a_cpu_has_the_bits_of_its_own_sum_and_other_devices_take_few_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [[drawn(size), drawn(7)] for size in SIZES[1:]]
    assert squares_of_each(groups) == [sum_of_squares(group).item() for group in groups]
    assert squares_of_each([]) == []
    monkeypatch.setattr(squares, "_in_few_kernels", lambda groups: [float(len(groups))])
    assert squares_of_each([[torch.empty(3, device="meta")]] * 2) == [2.0]
