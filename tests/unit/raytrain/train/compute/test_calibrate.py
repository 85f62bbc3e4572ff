"""Measuring the rates of this machine: every rate is present, settings stay, a kept result is not measured again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cluster.devices.calibration import CalibrationFile, MachineRates, RatesAtThreads
from cluster.devices.limits import usable_cores
from raytrain.train.compute import calibrate as measuring
from raytrain.train.compute.calibrate import (
    calibrate,
    calibration_of_machine,
    has_waited,
    loopback,
    product_flops,
)

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
    assumed = replace(rates, memory_bytes_per_s=9e9)
    found = [MachineRates("cpu", (one,), 1e-4, 1e9, busy=one is not rates) for one in (assumed, assumed, rates)]
    measured = list(found)
    monkeypatch.setattr(measuring, "calibrate", lambda _device: measured.pop(0))
    file = CalibrationFile.of_this_machine("cpu", folder=tmp_path)

    def known(*, age_s: float, load: float) -> MachineRates:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
        if file.path.exists():
            written = time.time() - age_s
            os.utime(file.path, (written, written))
        return calibration_of_machine(CPU, file=file)

    assert known(age_s=0, load=0.0) == found[0] == file.read() and found[0].busy
    assert known(age_s=1, load=0.0) == found[0] and len(measured) == 2, "not long ago"
    assert known(age_s=300, load=1e3) == found[0] and len(measured) == 2, "the machine is still busy"
    assert known(age_s=900, load=1e3) == found[1] and len(measured) == 1, "after ten minutes in any case"
    assert known(age_s=300, load=0.0) == found[2], "idle: its rates replace what was assumed under load"
    assert known(age_s=1e9, load=0.0) == found[2] and not measured


def test_a_machine_whose_thread_waits_or_whose_threads_are_slower_than_one_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "usable_cores", lambda: (2, "a test"))
    one = RatesAtThreads(1, {"fp32": ((64, 2e9), (128, 3e9))}, 1e9, 1e9, 1e-6)

    def calibrated(
        *, two: float, narrow: float = 9e9, computed_s: float = 1.0, together_s: float = 1.0, later_load: float = 0.0
    ) -> MachineRates:
        clock = {"wall": 0.0, "cpu": 0.0}
        several = RatesAtThreads(2, {"fp32": ((64, narrow), (128, two))}, 1e9, 1e9, 1e-6)

        def rates(_device: object, threads: int, *, until: float) -> RatesAtThreads:
            clock["wall"] += 1.0
            clock["cpu"] += computed_s if threads == 1 else together_s
            return one if threads == 1 else several

        monkeypatch.setattr(os, "getloadavg", lambda: (later_load if clock["wall"] > 1 else 0.0,) * 3)
        monkeypatch.setattr(measuring, "_rates", rates)
        monkeypatch.setattr(measuring, "_loopback_or_assumed", lambda: (1e-4, 1e9))
        monkeypatch.setattr(time, "thread_time", lambda: clock["cpu"])
        monkeypatch.setattr(time, "perf_counter", lambda: clock["wall"])
        return calibrate(CPU)

    calm = calibrated(two=5e9)
    assert not calm.busy and calm.at(2).product_flops("fp32", width=128) == 5e9
    assert not calibrated(two=3.1e9, narrow=1e9).busy, "narrow products may gain nothing"
    slower = calibrated(two=2.9e9)
    assert slower.busy and slower.at(2).product_flops("fp32", width=128) == 4.5e9, "assumed: half a core more"
    assert calibrated(two=5e9, computed_s=0.2).busy, "the thread waited"
    assert not calibrated(two=5e9, together_s=0.85).busy, "threads wait for each other as well"
    waited = calibrated(two=5e9, together_s=0.67)
    assert waited.busy and waited.at(2).product_flops("fp32", width=128) == 4.5e9, "one of them waited"
    assert calibrated(two=5e9, later_load=3.0).busy, "the load came meanwhile"


@pytest.mark.parametrize(("computed_s", "waited"), [(1.0, False), (0.95, False), (0.8, True)])
def test_a_thread_that_computes_less_than_the_clock_has_waited(computed_s: float, waited: bool) -> None:
    assert has_waited(1.0, computed_s=computed_s) is waited
