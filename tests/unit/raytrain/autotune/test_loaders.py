"""How many loader processes: few are measured, and the answer is that of measuring all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from raytrain.autotune.loaders import choose_count, next_count
from raytrain.autotune.measurement import Candidate, LoaderRate, LoaderRates, from_json


def searched(rate_of: Callable[[int], float], most: int) -> LoaderRates:
    """All that a search asks for."""
    rates: list[LoaderRate] = []
    while (count := next_count(rates, most=most)) is not None:
        assert 0 <= count <= most and count not in [one.count for one in rates]
        rates.append(LoaderRate(count, 10, 10 / rate_of(count)))
    return LoaderRates(Candidate("fp32", 32), most, tuple(rates))


def reading(read_s: float, compute_s: float, *, crowd_s: float = 0.0) -> Callable[[int], float]:
    """Batches a second where reading takes `read_s` in one process, and each process costs the model `crowd_s`."""
    return lambda count: 1 / (read_s + compute_s if not count else max(read_s / count, compute_s + count * crowd_s))


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize(("read_s", "compute_s", "crowd_s"), [
    (1.0, 0.001, 0.0), (1.0, 0.1, 0.0), (1.0, 0.15, 0.0), (1.0, 0.5, 0.0), (0.01, 1.0, 0.0), (0.0, 1.0, 0.1),
    (1.0, 0.1, 0.01), (1.0, 0.02, 0.002),
])  # fmt: skip
def test_the_answer_is_nearly_that_of_measuring_every_count(
    read_s: float, compute_s: float, crowd_s: float, most: int
) -> None:
    """Counts double: no more than twice as many processes as are needed, and about as fast."""
    rate_of = reading(read_s, compute_s, crowd_s=crowd_s)
    found = searched(rate_of, most)
    rates = {count: rate_of(count) for count in range(most + 1)}
    near = min(count for count, rate in rates.items() if rate >= 0.97 * max(rates.values()))
    chosen = choose_count(found).value
    assert rates[chosen] >= (0.85 if crowd_s else 0.97) * max(rates.values())
    assert chosen <= max(1, 2 * near) and len(found.rates) <= 8


def test_rows_that_are_fast_to_read_are_read_in_the_training_process() -> None:
    found = searched(reading(0.0001, 0.1), 64)
    assert [one.count for one in found.rates] == [0, 1, 2], "two in succession have brought nothing"
    assert choose_count(found).value == 0


def test_one_loader_process_without_a_gain_does_not_end_the_search() -> None:
    """Where reading is all there is, one process reads as fast as training itself would."""
    assert choose_count(searched(reading(1.0, 0.0001), 4)).value == 4


def test_the_reason_lists_all_rates_and_survives_a_round_trip() -> None:
    found = searched(reading(1.0, 0.5), 4)
    chosen = choose_count(found)
    assert chosen.value == 2
    assert chosen.reason.startswith("2 batches/s of 32 rows; 0: 0.667, 1: 1") and "0 to 4 processes" in chosen.reason
    assert from_json(LoaderRates, json.loads(json.dumps(asdict(found)))) == found
