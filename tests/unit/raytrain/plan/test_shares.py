"""`Shares`: how many micro-batches of how many rows each worker gets."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from raytrain.data.rows.batches import rank_micro_batches
from raytrain.plan.shares import Shares, apportion, slowest_s


def best_of_all(units: int, unit_s: tuple[float, ...]) -> float:
    """The earliest end of any division, by trying them all."""
    ways = (way for way in product(range(units + 1), repeat=len(unit_s)) if sum(way) == units)
    return min(slowest_s(way, unit_s) for way in ways)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_division_is_done_earlier(seed: int) -> None:
    draw = np.random.default_rng(seed)
    units, unit_s = int(draw.integers(1, 20)), tuple(float(value) for value in draw.integers(1, 9, draw.integers(1, 4)))
    assert slowest_s(apportion(units, unit_s), unit_s) == best_of_all(units, unit_s)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_used_once_in_order_and_equal_shares_change_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    world_size, micro, total = int(draw.integers(1, 6)), int(draw.integers(1, 9)), int(draw.integers(1, 200))
    indices = draw.permutation(1000)[:total]
    rows = tuple(micro * int(n) for n in draw.integers(1, 5, world_size))
    unequal = Shares(micro, rows, tuple(float(value) for value in draw.uniform(0.1, 3, world_size)))
    equal = Shares(micro, (micro,) * world_size, (0.25,) * world_size)
    for shares, now in product((unequal, equal), {micro, max(1, micro // 2), 4 * micro}):
        parts = [
            rank_micro_batches(indices, micro_batch=now, rank=rank, world_size=world_size, shares=shares)
            for rank in range(world_size)
        ]
        assert np.concatenate([own for part in parts for own in part]).tolist() == indices.tolist()
        for most, part in zip(shares.rows, parts, strict=True):
            assert all(0 < len(own) <= most * now // micro for own in part)
    for rank in range(world_size):
        ways = [
            rank_micro_batches(indices, micro_batch=micro, rank=rank, world_size=world_size, shares=given)
            for given in (equal, None)
        ]
        assert [own.tolist() for own in ways[0]] == [own.tolist() for own in ways[1]]


def test_half_the_speed_gets_half_the_micro_batches() -> None:
    assert apportion(12, (1.0, 2.0)) == (8, 4)
    assert apportion(1, (3.0, 1.0, 2.0)) == (0, 1, 0)


def test_a_worker_with_enough_memory_runs_several_micro_batches_per_pass_with_equal_results() -> None:
    shares = Shares(8, (32, 8), (1.0, 1.0))
    assert [len(own) for own in shares.passes(96, rank=0, micro_batch=8)] == [32, 32, 16]
    assert [len(own) for own in shares.passes(120, rank=0, micro_batch=8)] == [32, 32, 32]
    assert [len(own) for own in shares.passes(64, rank=0, micro_batch=8)] == [32, 24]
    assert [len(own) for own in shares.passes(96, rank=1, micro_batch=8)] == [8, 8]
    assert [len(own) for own in shares.passes(96, rank=0, micro_batch=4)] == [16] * 5, "halved in the run"
    assert shares.passes(8, rank=1, micro_batch=8) == [] and Shares.from_json(shares.to_json()) == shares


@pytest.mark.parametrize(("rows", "pass_s"), [((1, 0), (1.0, 1.0)), ((1,), (1.0, 1.0)), ((1, 1), (1.0, 0.0)), ((), ())])
def test_impossible_shares_are_refused(rows: tuple[int, ...], pass_s: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares of"):
        Shares(4, rows, pass_s)
