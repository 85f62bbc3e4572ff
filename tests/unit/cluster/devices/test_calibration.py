"""The measured rates of a machine as values, and the file that keeps them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.devices.calibration import CalibrationFile, MachineRates, RatesAtThreads

ONE = RatesAtThreads(1, {"fp32": ((64, 100.0), (128, 200.0))}, 10.0, 4.0, 2e-6)
FOUR = RatesAtThreads(4, {"fp32": ((64, 300.0), (128, 500.0)), "bf16": ((64, 900.0),)}, 30.0, 16.0, 3e-6)
FOUND = MachineRates("cpu", (ONE, FOUR), 5e-5, 1e9)


@pytest.mark.parametrize(("width", "expected"), [(16, 100.0), (64, 100.0), (96, 150.0), (128, 200.0), (999, 200.0)])
def test_rates_are_interpolated_by_width(width: int, expected: float) -> None:
    assert ONE.product_flops("fp32", width=width) == expected
    assert ONE.product_flops("bf16", width=width) is None, "not measured"


def test_rates_between_the_measured_numbers_of_threads() -> None:
    assert (FOUND.at(1), FOUND.at(4), FOUND.at(64)) == (ONE, FOUR, FOUR)
    two = FOUND.at(2)
    assert two.products["fp32"] == ((64, pytest.approx(100 + 200 / 3)), (128, pytest.approx(300.0)))
    assert two.elementwise_bytes_per_s == pytest.approx(8.0) and two.memory_bytes_per_s == pytest.approx(50 / 3)


def test_threads_that_could_not_be_measured_gain_what_is_assumed() -> None:
    four = ONE.with_threads(4, gain=2.5)
    assert four.products == {"fp32": ((64, 250.0), (128, 500.0))} and four.elementwise_bytes_per_s == 10.0
    assert (four.memory_bytes_per_s, four.operation_s) == (10.0, 2e-6), "the machine's memory is no faster"


def test_several_threads_are_at_least_as_fast_as_one() -> None:
    slow = RatesAtThreads(4, {"fp32": ((64, 50.0), (256, 400.0))}, 5.0, 1.0, 1e-3).at_least(ONE)
    assert slow.products == {"fp32": ((64, 100.0), (128, 200.0), (256, 400.0))}
    assert (slow.threads, slow.memory_bytes_per_s, slow.operation_s) == (4, 10.0, 2e-6)


def test_the_better_rates_of_two_measurements_are_kept() -> None:
    busy = MachineRates(
        "cpu", (RatesAtThreads(1, {"fp32": ((64, 150.0),)}, 1.0, 1.0, 9e-6), FOUR), 9e-5, 2e9, busy=True
    )
    best = busy.better_of(FOUND)
    assert best.at(1).products == {"fp32": ((64, 150.0), (128, 200.0))} and best.at(1).memory_bytes_per_s == 10.0
    assert (best.round_trip_s, best.wire_bytes_per_s, best.busy) == (5e-5, 2e9, False)


def test_the_file_returns_the_written_values(tmp_path: Path) -> None:
    file = CalibrationFile.of_this_machine("cpu", folder=tmp_path / "new")
    assert file.read() is None
    assert file.write(FOUND) and file.read() == FOUND
    assert os.listdir(tmp_path / "new") == [file.path.name], "no temporary file is left"
    assert CalibrationFile.of_this_machine("NVIDIA T4", folder=tmp_path).path.name != file.path.name


@pytest.mark.parametrize("content", ["", "{", "[]", '{"device": "cpu"}', '{"device": "cpu", "rates": 3}'])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    file = CalibrationFile.of_this_machine("cpu", folder=tmp_path)
    file.path.write_text(content)
    assert file.read() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_not_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not CalibrationFile.of_this_machine("cpu", folder=tmp_path / "in").write(FOUND)


def test_a_path_that_is_not_a_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not CalibrationFile.of_this_machine("cpu", folder=tmp_path / "file" / "in").write(FOUND)


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "a"))
    assert CalibrationFile.of_this_machine("cpu").path.parent == tmp_path / "a"
    monkeypatch.delenv("RAYTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert CalibrationFile.of_this_machine("cpu").path.parent == tmp_path / "b" / "raytrain"


def test_reading_needs_neither_torch_nor_ray() -> None:
    code = "import cluster.devices.calibration, sys; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
