"""Whether the items of a map-style dataset differ from one reading to the next, and how long one takes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.rows import map_style as variation
from raytrain.data.rows.map_style import VARIATION_LIMIT_S, VARIATION_READINGS, VARIATION_SAMPLE, observed_facts
from raytrain.data.sources.in_memory import memory_source


class Items:
    """A map-style dataset of 100 items that `make` returns by index; it counts what is read."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.reads = make, list[int]()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.make(index)


def observed(items: Items) -> tuple[bool, float | None]:
    """`varies` and `item_s`; `items.reads` has what was read for them."""
    source = memory_source(items, None, fraction=0.1, origin="test")
    items.reads.clear()
    facts = observed_facts(source.facts, source.train)
    return facts.varies, facts.item_s


def flipped_sometimes(index: int) -> dict[str, torch.Tensor]:
    x = torch.arange(6.0) + index
    return {"x": x.flip(0) if torch.rand(()) < 0.1 else x}


def states() -> tuple[Any, ...]:
    """Of the three random generators."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # pyright: ignore


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda index: {"x": torch.zeros(2) + torch.rand(2)}, id="torch"),
        pytest.param(lambda index: (np.zeros(2) + np.random.rand(2), 1), id="numpy"),
        pytest.param(lambda index: {"x": torch.zeros(2), "labels": random.randrange(1000)}, id="python"),
        pytest.param(lambda index: {"x": {"deep": [torch.rand(2)]}}, id="nested"),
        pytest.param(lambda index: {"x": torch.zeros(1 + int(torch.randint(50, ())))}, id="length"),
        pytest.param(flipped_sometimes, id="one reading of ten"),
    ],
)
def test_random_items_vary_and_the_generators_are_restored(make: Callable[[int], Any]) -> None:
    source = memory_source(Items(make), None, fraction=0.1)
    before = states()
    facts = observed_facts(source.facts, source.train)
    assert facts.varies and facts.item_s is not None and facts.item_s > 0
    assert states() == before


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda index: {"x": torch.arange(4) + index, "labels": index % 2}, id="numbers"),
        pytest.param(lambda index: {"x": torch.full((2,), float("nan"))}, id="nan"),
        pytest.param(lambda index: {"x": torch.zeros(2), "name": object()}, id="other objects"),
    ],
)
def test_items_that_are_the_same_each_time_do_not_vary(make: Callable[[int], Any]) -> None:
    items = Items(make)
    assert observed(items)[0] is False
    assert Counter(Counter(items.reads).values()) == {VARIATION_READINGS: VARIATION_SAMPLE}
    assert max(items.reads) - min(items.reads) > 90, "spread over all"


def test_slow_items_are_read_until_the_limit_and_one_of_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(variation.time, "perf_counter", lambda: now[0])

    def slow(index: int) -> dict[str, torch.Tensor]:
        now[0] += VARIATION_LIMIT_S
        return {"x": torch.zeros(2)}

    items = Items(slow)
    varies, item_s = observed(items)
    assert (varies, item_s) == (False, pytest.approx(VARIATION_LIMIT_S)) and len(items.reads) == 2


def test_a_dataset_that_fails_or_data_in_memory_has_no_facts_of_reading() -> None:
    items = Items(lambda index: {"x": torch.zeros(2)})
    source = memory_source(items, None, fraction=0.1)
    items.make = lambda index: {"x": torch.zeros(1 // (index < 50))}
    assert observed_facts(source.facts, source.train) == source.facts and max(items.reads) > 50
    source = memory_source({"x": torch.zeros(9, 2)}, None, fraction=0.0)
    assert observed_facts(source.facts, source.train) == source.facts
