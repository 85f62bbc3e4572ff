"""The table of GPUs: which row a name means."""

from __future__ import annotations

import pytest

from raytrain.plan.rules.rates import GPUS, PEAKS, peak_of


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12), ("NVIDIA H100 PCIe", 756e12, 2e12),
        ("NVIDIA H100 NVL", 835e12, 3.9e12), ("NVIDIA H200", 989e12, 4.8e12), ("NVIDIA H200 NVL", 835e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 1.55e12), ("NVIDIA A100 80GB PCIe", 312e12, 1.55e12),
        ("NVIDIA L40S", 362e12, 0.86e12), ("NVIDIA GeForce RTX 4090", 165e12, 1e12), ("NVIDIA B200", 2250e12, 7.7e12),
        ("AMD Instinct MI300X", 1307e12, 5.3e12), ("AMD-Instinct-MI300X-OAM", 1307e12, 5.3e12),
        ("Tesla T4", 8.1e12, 0.32e12), ("h100", 989e12, 3.35e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None), ("NVIDIA GH200 480GB", None, None), ("cpu", None, None),
    ],
)  # fmt: skip
def test_a_name_from_a_driver_or_from_ray_means_one_row(name: str, bf16: float | None, memory: float | None) -> None:
    found = peak_of(name, "bf16"), peak_of(name, "memory")
    assert found == (bf16 and pytest.approx(bf16), memory and pytest.approx(memory))


def test_exact_fp32_is_no_tf32_and_fp64_is_not_in_the_table() -> None:
    exact, rounded = peak_of("NVIDIA H100 80GB HBM3", "fp32"), peak_of("NVIDIA H100 80GB HBM3", "tf32")
    assert (exact, rounded) == (67e12, 494e12) and peak_of("NVIDIA H100 80GB HBM3", "fp64") is None
    assert peak_of("Tesla T4", "fp16") == 65e12
    assert all(len(row) == len(PEAKS) and sorted(row[:4]) == list(row[:4]) for row in GPUS.values())


def test_a_longer_name_of_a_kind_comes_before_a_shorter_one() -> None:
    assert all(peak_of(f"NVIDIA {kind} 80GB", "fp16") == 1e12 * row[3] for kind, row in GPUS.items())
