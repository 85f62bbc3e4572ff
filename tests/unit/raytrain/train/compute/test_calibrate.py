"""Measuring the rates of this machine: every rate is present, settings stay, a kept result is not measured again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cluster.devices.calibration import CalibrationFile, MachineRates, RatesAtThreads
from cluster.devices.limits import usable_cores
from raytrain.train.compute import calibrate as measuring
from raytrain.train.compute.calibrate import calibrate, calibration_of_machine, loopback, product_flops

CPU = torch.device("cpu")


def test_a_calibration_has_every_rate_and_leaves_the_settings() -> None:
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    found = calibrate(CPU, budget_s=0.01)
    assert [one.threads for one in found.rates] == sorted({1, usable_cores()[0]})
    for one in found.rates:
        assert {"fp32", "fp64"} <= set(one.products) and all(one.products.values()), "also without time for it"
        assert all(rate > 1e6 for points in one.products.values() for _, rate in points)
        assert min(one.memory_bytes_per_s, one.elementwise_bytes_per_s) > 1e7 and 0 < one.operation_s < 1
    assert 0 < found.round_trip_s < 1 and found.wire_bytes_per_s > 1e6
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, matmul)
    assert MachineRates.from_json(found.to_json()) == found


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


def test_loopback_goes_through_another_process() -> None:
    seconds, rate = loopback()
    assert 0 < seconds < 1 and rate > 1e6


def test_a_cached_calibration_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = RatesAtThreads(1, {"fp32": ((64, 1e9),)}, 1e9, 1e9, 1e-6)
    measured = [MachineRates("cpu", (rates,), 1e-4, 1e9, busy=busy) for busy in (True, False)]
    monkeypatch.setattr(measuring, "calibrate", lambda _device: measured.pop(0))
    file = CalibrationFile.of_this_machine("cpu", folder=tmp_path)
    first = calibration_of_machine(CPU, file=file)
    assert first.busy and file.read() == first
    assert calibration_of_machine(CPU, file=file) == first, "not long ago"
    os.utime(file.path, (0, 0))
    again = calibration_of_machine(CPU, file=file)
    assert again == replace(first, busy=False), "measured while the machine was busy, so once more"
    assert calibration_of_machine(CPU, file=file) == again and not measured
