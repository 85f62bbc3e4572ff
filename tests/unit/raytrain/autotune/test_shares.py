"""Shares chosen from measured worker speeds."""

from __future__ import annotations

from raytrain.autotune.startup import choose_shares
from raytrain.plan.shares import Shares


def test_workers_of_one_speed_keep_equal_shares() -> None:
    for seconds in ((1.0, 1.0), (1.0, 1.02, 0.99), (1.0,)):
        made = choose_shares(seconds, total=64, micro_batch=4)
        assert made.value == "equal" and "would save" in made.reason
    few = choose_shares((1.0, 1.5), total=8, micro_batch=4)
    assert few.value == "equal", "with one micro-batch each there is nothing to move"


def test_a_slow_worker_gets_fewer_rows_and_the_reason_gives_the_numbers() -> None:
    made = choose_shares((1.0, 2.0), total=48, micro_batch=4)
    shares = Shares.from_json(made.value)
    assert [len(rows) for rows in shares.spans(48, micro_batch=4)] == [32, 16]
    assert "ranks 0-1: 32, 16 rows: 1.50 times as fast as equal shares" in made.reason
    assert "needs 2.00 times as long for a row" in made.reason
