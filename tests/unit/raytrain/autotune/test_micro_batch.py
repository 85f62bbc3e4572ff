from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.micro_batch import choose_micro_batch, micro_batch_record, micro_batch_sizes, next_micro_batch
from raytrain.plan.choice import Resolved

FLOOR = 1000


def measured(rows: int, peak: int, budget: int | None) -> Measurement:
    fits = budget is None or peak <= budget
    outcome, reason = ("ok", "") if fits else ("out_of_memory", f"a peak of {peak}")
    return Measurement(Candidate("fp32", rows), outcome, peak_bytes=peak, floor_bytes=FLOOR, reason=reason)


def search(
    sizes: tuple[int, ...], memory: Callable[[int], int], budget: int | None
) -> tuple[Resolved | None, list[Measurement]]:
    """The loop of `raytrain.autotune.micro_batch`, over a memory that is a formula."""
    tried: list[Measurement] = []
    while (asked := next_micro_batch(sizes, tried, budget=budget)) is not None:
        assert asked not in rows_of(tried)
        tried.append(measured(asked, memory(asked), budget))
    return choose_micro_batch(sizes, tried, budget=budget), tried


def rows_of(tried: list[Measurement]) -> list[int]:
    return [one.candidate.micro_batch_size for one in tried]


@pytest.mark.parametrize(
    ("batch", "workers", "sizes"),
    [
        (32, 1, (1, 2, 4, 8, 16, 32)),
        (32, 2, (1, 2, 4, 8, 16)),
        (12, 2, (1, 2, 3, 6)),
        (20, 3, (1, 2, 4, 5, 7)),  # three do not share 20 evenly: one worker's share, and what divides the batch
        (1, 4, (1,)),
    ],
)
def test_the_sizes_share_the_batch(batch: int, workers: int, sizes: tuple[int, ...]) -> None:
    assert micro_batch_sizes(batch, workers) == sizes


def test_with_enough_memory_two_measurements_suffice_for_the_whole_share() -> None:
    chosen, tried = search(micro_batch_sizes(64, 1), lambda rows: FLOOR + 10 * rows, 10_000)
    assert rows_of(tried) == [8, 64]
    assert chosen is not None and chosen.value == 64
    assert "all of a worker's share" in chosen.reason


def test_the_result_states_what_fits_and_why_more_does_not() -> None:
    chosen, tried = search(micro_batch_sizes(64, 1), lambda rows: FLOOR + 10 * rows, FLOOR + 200)
    assert chosen is not None and chosen.value == 16
    assert "32 rows: 1.29 KiB are predicted" in chosen.reason
    record = micro_batch_record(chosen, tried, budget=FLOOR + 200, settings={"workers": 1})
    assert record["value"] == 16 and record["peak_bytes"] == FLOOR + 160
    assert [trial["predicted_bytes"] for trial in record["trials"]] == [None, FLOOR + 160]
    assert record["predicted_peaks"] == {"8": FLOOR + 80, "16": FLOOR + 160, "32": FLOOR + 320}


def test_nothing_fits() -> None:
    chosen, tried = search(micro_batch_sizes(64, 1), lambda rows: FLOOR + 10 * rows, FLOOR)
    assert chosen is None
    assert rows_of(tried) == [8, 1]


@pytest.mark.covers("TUNE-02")
def test_a_search_that_starts_small_grows_to_the_largest_size_within_the_budget() -> None:
    chosen, tried = search(micro_batch_sizes(64, 1), lambda rows: FLOOR + 10 * rows, FLOOR + 640)
    assert rows_of(tried)[0] == 8 and chosen is not None and chosen.value == 64


def test_against_brute_force_within_one_size_on_random_memories() -> None:
    """Lines with a part that is needed once, a kink at some size, and noise of 1 %: never more than the budget, and at
    most one size below the best."""
    draw = random.Random(5)
    for _ in range(300):
        sizes = micro_batch_sizes(draw.choice([24, 32, 60, 64, 128]), draw.choice([1, 2]))
        once, row, kink = draw.uniform(0, 400), draw.uniform(1, 40), draw.choice(sizes)

        def memory(rows: int, once: float = once, row: float = row, kink: int = kink) -> int:
            steep = 0.3 * row * max(0, rows - kink)
            return int(FLOOR + max(once, row * rows) + steep + 0.01 * row * rows * (rows * 7 % 3 - 1))

        budget = draw.randint(FLOOR, memory(sizes[-1]) + 50)
        best = max((size for size in sizes if memory(size) <= budget), default=None)
        chosen, tried = search(sizes, memory, budget)
        if best is None:
            assert chosen is None
            continue
        assert chosen is not None and memory(chosen.value) <= budget
        assert sizes.index(best) - sizes.index(chosen.value) <= 1
        assert len(tried) <= 6


@pytest.mark.parametrize(("spare", "chosen", "asked"), [(160, 16, [4, 16]), (159, 8, [4, 8])])
def test_a_size_fits_whose_predicted_peak_is_the_budget_itself(spare: int, chosen: int, asked: list[int]) -> None:
    found, tried = search(micro_batch_sizes(32, 1), lambda rows: FLOOR + 10 * rows, FLOOR + spare)
    assert found is not None and found.value == chosen and rows_of(tried) == asked
