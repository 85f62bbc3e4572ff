"""The gradient noise scale: known answers from drawn gradients, and what it advises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raytrain.autotune.search.noise_scale import NoiseScale, NormPair, efficiency, goodput_advice, noise_scale


def drawn(*, signal: float, noise: float, draws: int, small: int = 4, big: int = 64, seed: int = 0) -> list[NormPair]:
    """Norms of means over rows whose gradients are a fixed vector of squared norm `signal` plus noise of trace
    `noise`, in 400 dimensions."""
    rng, size = np.random.default_rng(seed), 400
    mean = np.full(size, math.sqrt(signal / size))
    pairs = []
    for _ in range(draws):
        rows = mean + rng.standard_normal((big, size)) * math.sqrt(noise / size)
        norms = [float((part.mean(axis=0) ** 2).sum()) for part in (rows[:small], rows)]
        pairs.append(NormPair(small, big, *norms))
    return pairs


@pytest.mark.parametrize(("signal", "noise"), [(1.0, 20.0), (4.0, 20.0), (0.5, 200.0)])
def test_it_finds_the_ratio_that_the_rows_were_drawn_with(signal: float, noise: float) -> None:
    found = noise_scale(drawn(signal=signal, noise=noise, draws=100))
    assert found.rows == pytest.approx(noise / signal, rel=0.15)
    assert found.low < found.rows < found.high and found.draws == 100


def test_the_confidence_band_has_its_nominal_coverage() -> None:
    found = [noise_scale(drawn(signal=1.0, noise=20.0, draws=12, seed=seed)) for seed in range(100)]
    inside = sum(one.low <= 20.0 <= one.high for one in found)
    assert 75 <= inside <= 100 and all(one.high - one.low < 40.0 for one in found)


def test_more_draws_narrow_the_band() -> None:
    few, many = (noise_scale(drawn(signal=1.0, noise=20.0, draws=draws)) for draws in (8, 128))
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_a_mean_gradient_of_zero_has_no_noise_scale() -> None:
    found = noise_scale([NormPair(1, 8, 8.0, 0.9)] * 3)
    assert found.rows == found.high == math.inf and found.to_json()["rows"] is None
    assert "too large to tell" in goodput_advice(found, global_batch=32)


def test_rows_that_all_agree_have_no_noise() -> None:
    assert noise_scale([NormPair(2, 8, 3.0, 3.0)] * 4).rows == 0.0


@pytest.mark.parametrize("pairs", [[], [NormPair(4, 4, 1.0, 1.0)]])
def test_two_sizes_are_needed(pairs: list[NormPair]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        noise_scale(pairs)


def test_efficiency_falls_from_one_with_the_batch() -> None:
    assert efficiency(100.0, 32, reference=32) == 1.0 and efficiency(math.inf, 4096, reference=32) == 1.0
    assert efficiency(100.0, 300, reference=100) == 0.5 and efficiency(0.0, 64, reference=32) == 0.5


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (NoiseScale(10.0, 8.0, 12.0, 8), "a smaller one would learn as much"),
        (
            NoiseScale(10.0, 8.0, 70.0, 8),
            "(8 to 70): at twice the global batch of 32 a row is worth 57% of what it is now",
        ),
        (
            NoiseScale(60.0, 20.0, 90.0, 8),
            "(20 to 90): at twice the global batch of 32 a row is worth 74% of what it is now",
        ),
        (NoiseScale(320.0, 256.0, math.inf, 8), "(256 or more)"),
        (NoiseScale(320.0, 256.0, 400.0, 8), "worth 92% of what it is now; a larger one"),
        (NoiseScale(32.0, 16.0, 64.0, 8), "(16 to 64): at twice the global batch of 32 a row is worth 67%"),
    ],
)
def test_the_advice_states_the_waste_of_a_larger_batch(scale: NoiseScale, words: str) -> None:
    advice = goodput_advice(scale, global_batch=32)
    assert words in advice
    assert ("smaller" in advice, "larger" in advice) == (scale.high < 32, scale.low > 32), "the whole interval decides"
