"""Halved where memory runs out, grown back where it goes well."""

from __future__ import annotations

from raytrain.train.memory.retry import MicroBatchSize


def clean(size: MicroBatchSize, steps: int) -> list[int]:
    """The sizes after each of so many clean steps."""
    return [size.after_clean_step() or size.now for _ in range(steps)]


def test_half_of_an_odd_size_covers_a_window_in_twice_as_many() -> None:
    size = MicroBatchSize(5, grow_after=1)
    assert [size.after_shortage() for _ in range(4)] == [3, 2, 1, None]
    assert clean(size, 4) == [2, 3, 5, 5], "back over the same sizes"


def test_a_size_that_fails_again_is_retried_later() -> None:
    size = MicroBatchSize(8, grow_after=2)
    assert clean(size, 5) == [8] * 5 and size.wait is None
    waits = []
    for _ in range(4):
        assert size.after_shortage() == 4
        waits.append(size.wait)
        assert clean(size, size.wait or 0)[-1] == 8
    assert waits == [2, 4, 8, 16]


def test_a_size_that_worked_long_enough_resets_the_waiting_time() -> None:
    size = MicroBatchSize(8, grow_after=2)
    size.after_shortage()
    clean(size, 2)
    size.after_shortage()
    assert size.wait == 4
    clean(size, 4)
    assert clean(size, 4) == [8] * 4
    size.after_shortage()
    assert size.wait == 2


def test_it_never_grows_where_it_must_not() -> None:
    size = MicroBatchSize(8, grow_after=None)
    size.after_shortage()
    assert clean(size, 500) == [4] * 500 and size.wait is None
