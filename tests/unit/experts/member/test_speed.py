"""Speeds of the holders of experts: measured once for each kind, and only where there are several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster.devices.limits import usable_cores
from experts.config import LayerShape
from experts.exchange import rebalancer as speed
from experts.exchange.rebalancer import ALIKE, kind_of, measure_speed, recorded_speeds, speeds_by_kind
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import HostSpec
from raytrain.runs.folder import RunFolder

CPU = torch.device("cpu")


def never(_kinds: Sequence[str]) -> list[float]:
    raise AssertionError("one kind needs no measurement")


def test_each_kind_is_measured_once_and_one_kind_not_at_all() -> None:
    assert speeds_by_kind(["T4", "T4", "T4"], never) == [1.0, 1.0, 1.0]
    asked: list[list[str]] = []

    def measure(kinds: Sequence[str]) -> list[float]:
        asked.append(list(kinds))
        return [{"T4": 2e12, "A100": 9e12}[kind] for kind in kinds]

    assert speeds_by_kind(["T4", "A100", "T4", "A100"], measure) == [2e12, 9e12, 2e12, 9e12]
    assert asked == [["T4", "A100"]]


@pytest.mark.parametrize(("ratio", "equal"), [(0.99 * ALIKE, True), (1.01 * ALIKE, False)])
def test_kinds_that_differ_by_less_than_noise_count_as_equal(ratio: float, equal: bool) -> None:
    speeds = speeds_by_kind(["a", "b"], lambda _kinds: [1e9, ratio * 1e9])
    assert (speeds == [1.0, 1.0]) is equal and (speeds[0] == speeds[1]) is equal


def test_a_speed_is_that_of_products_of_the_experts_size_in_their_format(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []

    def product(_device: torch.device, dtype: str, *, width: int, budget_s: float) -> float:
        calls.append((dtype, width, torch.get_num_threads()))
        return {1: 5e9, 2: 4e9}[torch.get_num_threads()]

    monkeypatch.setattr(speed, "product_flops", product)
    before = torch.get_num_threads()
    shapes = [LayerShape(16, (64, 64), "gelu"), LayerShape(16, (4, 256), "gelu")]
    assert measure_speed(CPU, shapes, "bf16", threads=2) == 5e9, "several threads on a busy machine were slower"
    assert calls == [("bf16", 64, 1), ("bf16", 64, 2)] and torch.get_num_threads() == before
    calls.clear()
    measure_speed(CPU, [LayerShape(4096, (14336,), "swiglu")], "fp32", threads=1)
    assert calls == [("fp32", speed.WIDEST["cpu"], 1)], "a wide product would take too long on a CPU"


def test_this_process_measures_a_rate_and_names_its_kind() -> None:
    assert measure_speed(CPU, [LayerShape(8, (32,), "gelu")], "fp32", threads=1) > 1e6
    assert kind_of(CPU, threads=1).endswith(", 1 thread")
    cores = usable_cores()[0]
    assert kind_of(CPU, threads=cores) == kind_of(CPU, threads=cores + 1), "threads without a core do not count"


def test_a_run_gives_the_speeds_of_its_last_placement_back(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "speeds")
    assert recorded_speeds(run.path) == {}
    run.append_event({"kind": "placement", "kinds": ["a", "b", "b"], "speeds": [1.0, 2.0, 2.0]})
    run.append_event({"kind": "placement", "kinds": ["a", "c"], "speeds": [3.0, 4.0]})
    run.append_event({"kind": "placement", "devices": ["CPU"]})
    assert recorded_speeds(run.path) == {"a": 3.0, "c": 4.0}


@pytest.mark.parametrize(("speeds", "numbers"), [((4.0, 2.0, 1.0), (8, 4, 2)), ((1.0, 6.0), (2, 12))])
def test_a_run_starts_with_experts_in_proportion_to_the_speeds(
    speeds: tuple[float, ...], numbers: tuple[int, ...]
) -> None:
    hosts = [HostSpec(host, one, None) for host, one in enumerate(speeds)]
    placement = starting_placement(PlacementRules(), [LayerShape(8, (32,) * 14, "gelu")] * 2, hosts)
    assert [[len(placement.slots(layer, host)) for host in range(len(hosts))] for layer in (0, 1)] == [[*numbers]] * 2
