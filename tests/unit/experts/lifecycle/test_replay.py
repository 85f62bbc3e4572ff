"""The reservoir: bounded in bytes, uniform over the stream, and the same after a checkpoint."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
import torch
from torch import Tensor

from experts.lifecycle.replay import Reservoir
from raytrain.errors import InputError


def rows_of(first: int, number: int, *, width: int = 3) -> dict[str, Tensor]:
    """Rows whose content is their place in the stream."""
    place = torch.arange(first, first + number)
    return {"x": place[:, None].expand(number, width).float(), "labels": place}


def filled(limit: int, rows: int, *, seed: int = 0, batch: int = 7, width: int = 3) -> Reservoir:
    kept = Reservoir(limit, seed)
    for first in range(0, rows, batch):
        number = min(batch, rows - first)
        kept.add(rows_of(first, number, width=width), uncertainty=torch.rand(number), step=1 + first // batch)
    return kept


@pytest.mark.covers("SLP-03", "MEM-18")
@pytest.mark.parametrize(("limit", "width"), [(40_000, 3), (1_000, 9)])
def test_the_bound_in_bytes_holds_while_1e5_rows_are_streamed(limit: int, width: int) -> None:
    row = 4 * width + 8 + 12
    kept = Reservoir(limit, 1)
    for first in range(0, 100_000, 500):
        kept.add(rows_of(first, 500, width=width), uncertainty=torch.ones(500), step=1)
        assert kept.bytes <= limit
    assert len(kept) == kept.capacity == limit // row  # full to within one row
    assert kept.seen == 100_000
    expected = kept.capacity * sum(1 / n for n in range(kept.capacity + 1, 100_001))  # capacity/n of being kept each
    assert kept.evicted == pytest.approx(expected, rel=0.15)
    used = sum(
        column.untyped_storage().nbytes()
        for column in kept._columns.values()  # the memory, not our own count
    )
    assert limit - row < used <= limit
    assert {column.device.type for column in kept._columns.values()} == {"cpu"}


@pytest.mark.covers("SLP-03")
def test_every_row_of_the_stream_is_as_likely_to_be_kept() -> None:
    quarters = torch.zeros(4)
    for seed in range(40):
        kept = filled(26 * 32 + 6 * 32, 2_000, seed=seed)
        quarters += torch.histc(kept.rows(torch.arange(len(kept)))["labels"].float(), 4, 0, 2_000)
    assert len(kept) == 32
    assert quarters.sum() == 40 * 32
    assert ((quarters / quarters.sum() - 0.25).abs() < 0.05).all(), quarters  # four standard deviations


@pytest.mark.covers("SLP-03")
def test_a_saved_reservoir_goes_on_as_the_first_would_have() -> None:
    whole, half = filled(1_000, 900), filled(1_000, 450 - 450 % 7)
    torch.manual_seed(3)
    loaded = Reservoir(1_000, 0)
    loaded.load_state_dict(half.state_dict())
    for first in range(450 - 450 % 7, 900, 7):
        loaded.add(rows_of(first, min(7, 900 - first)), uncertainty=torch.rand(min(7, 900 - first)), step=9)
    everything = torch.arange(len(whole))
    assert len(loaded) == len(whole)
    assert torch.equal(loaded.rows(everything)["labels"], whole.rows(everything)["labels"])
    assert (loaded.seen, loaded.evicted) == (whole.seen, whole.evicted)


def test_a_smaller_bound_is_kept_after_a_checkpoint_of_a_larger_one() -> None:
    large, small = filled(4_000, 900), Reservoir(1_000, 0)
    small.load_state_dict(large.state_dict())
    assert small.bytes <= 1_000
    assert len(small) == 1_000 // 32
    small.add(rows_of(900, 50), uncertainty=torch.ones(50), step=9)
    assert small.bytes <= 1_000


@pytest.mark.covers("SLP-05")
def test_uncertain_rows_are_drawn_more_often_in_proportion() -> None:
    kept = Reservoir(10_000, 0)
    kept.add(rows_of(0, 200), uncertainty=torch.cat([torch.full((100,), 0.9), torch.full((100,), 0.1)]), step=1)
    counts = {True: 0, False: 0}
    for priority in counts:
        for seed in range(50):
            drawn = kept.draw(20, seed=seed, priority=priority)
            assert len(drawn.unique()) == len(drawn) == 20
            counts[priority] += int((drawn < 100).sum())
    assert counts[False] / 1_000 == pytest.approx(0.5, abs=0.06)
    assert counts[True] / 1_000 == pytest.approx(0.88, abs=0.04)  # 9 to 1, a little less as none is drawn twice
    kept.update(torch.arange(100), torch.full((100,), 0.1))
    again = sum(int((kept.draw(20, seed=seed, priority=True) < 100).sum()) for seed in range(50))
    assert again / 1_000 == pytest.approx(0.5, abs=0.06)


def test_rows_of_another_shape_and_rows_that_do_not_fit_are_refused() -> None:
    kept = filled(1_000, 20)
    with pytest.raises(InputError, match=r"experts\.lifecycle\.replay\.bytes.*x is now.*rows of one shape"):
        kept.add(rows_of(0, 2, width=4), uncertainty=torch.ones(2), step=1)
    with pytest.raises(InputError, match="at least 32, the bytes of one row"):
        filled(31, 2)


def test_what_is_added_is_copied_and_an_insert_costs_the_same_in_a_large_reservoir() -> None:
    given = rows_of(0, 4)
    kept = Reservoir(1_000, 0)
    kept.add(given, uncertainty=torch.ones(4), step=1)
    given["labels"].zero_()
    assert kept.rows(torch.arange(4))["labels"].tolist() == [0, 1, 2, 3]
    drawn = kept.rows(torch.arange(4))
    drawn["labels"].zero_()
    assert kept.rows(torch.arange(4))["labels"].tolist() == [0, 1, 2, 3]
    peaks = []
    for limit in (10_000, 1_000_000):  # nothing in an insert grows with what is kept
        large = filled(limit, 40_000, batch=1_000)
        assert len(large) == min(40_000, limit // 32)
        batch = rows_of(0, 16)
        tracemalloc.start()
        large.add(batch, uncertainty=torch.ones(16), step=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + sys.getsizeof(0) * 100
