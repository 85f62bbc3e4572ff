"""Shares chosen from measured worker speeds."""

from __future__ import annotations

from raytrain.autotune.search.shares import WorkerSpeed, choose_shares, shown
from raytrain.plan.shares import Shares

INFINITE = float("inf")


def paces(*seconds: float, micro: int = 4) -> list[WorkerSpeed]:
    return [WorkerSpeed("cpu", {micro: value}) for value in seconds]


def test_workers_of_one_speed_keep_equal_shares() -> None:
    for seconds in ((1.0, 1.0), (1.0, 1.02, 0.99), (1.0,)):
        made = choose_shares(paces(*seconds), total=64, micro_batch=4)
        assert made.value == "equal" and "would save" in made.reason
    few = choose_shares(paces(1.0, 1.5), total=8, micro_batch=4)
    assert few.value == "equal", "with one micro-batch each there is nothing to move"


def test_a_slow_worker_gets_fewer_rows_and_the_reason_gives_the_numbers() -> None:
    made = choose_shares(paces(1.0, 2.0), total=48, micro_batch=4)
    shares = Shares.from_json(made.value)
    assert [len(rows) for rows in shares.spans(48, micro_batch=4)] == [32, 16]
    assert "rank 0: 32 rows in 8 passes, rank 1: 16 rows in 4: 1.50 times as fast as equal shares" in made.reason
    assert "needs 2.00 times as long for a row" in made.reason


def test_each_kind_of_device_gets_its_own_size_if_it_fits_and_is_faster() -> None:
    big = {4: 1.0, 8: 1.1, 16: 2.1, 32: INFINITE}
    small = {4: 2.0, 8: 4.0, 16: INFINITE, 32: INFINITE}
    made = choose_shares(
        [WorkerSpeed("A", big), WorkerSpeed("B", small), WorkerSpeed("A", big)], total=160, micro_batch=4
    )
    shares = Shares.from_json(made.value)
    assert shares.rows == (16, 4, 16), "8 rows are within 5 % but not within 3 % of the best rate"
    full = WorkerSpeed("A", {**big, 16: INFINITE})
    tight = choose_shares([WorkerSpeed("A", big), WorkerSpeed("B", small), full], total=160, micro_batch=4)
    assert Shares.from_json(tight.value).rows == (8, 4, 8), "one of its kind had no room for 16"


def test_equal_neighbours_are_shown_together() -> None:
    assert shown(Shares(4, (8, 8, 4), (1.0, 1.0, 1.0)), 40) == "ranks 0-1: 16 rows in 2 passes, rank 2: 8 rows in 2"
