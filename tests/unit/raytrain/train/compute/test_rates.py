"""Measuring the rates of a device: what is counted is what runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raytrain.train.compute import rates as measuring
from raytrain.train.compute.rates import formats_of, memory_rate, product_flops

CPU = torch.device("cpu")


def test_every_format_of_a_device_has_a_rate_and_settings_stay() -> None:
    matmul = torch.get_float32_matmul_precision()
    formats = formats_of(CPU)
    assert {"fp32", "fp64"} <= set(formats)
    assert all(product_flops(CPU, name, width=64, budget_s=0.01) > 1e6 for name in formats)
    assert memory_rate(CPU) > 1e7 and torch.get_float32_matmul_precision() == matmul


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_product_rate_counts_forward_and_backward_of_what_it_runs(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def one_second(work: Callable[[], object], _device: torch.device, *, budget_s: float) -> float:
        with FlopCounterMode(display=False) as counter:
            work()
        counted.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(measuring, "_best", one_second)
    assert [product_flops(CPU, dtype, width=64, rows=8)] == counted
