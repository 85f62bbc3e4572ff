"""The policy of births, merges and prunes as a table, and limits that hold over hundreds of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experts.config import BirthConfig, LifecycleConfig, MergeConfig, PruneConfig
from experts.lifecycle.policy import LayerStatistics, decide, merge
from experts.lifecycle.table import Change, ExpertTable

DOUBTFUL: dict[str, Any] = {"uncertainty": 0.9, "first": 1.0, "lowest": 0.5}


def config(**keys: Any) -> LifecycleConfig:
    sections = {"birth": BirthConfig, "merge": MergeConfig, "prune": PruneConfig}
    given = {name: sections[name](**value) if name in sections else value for name, value in keys.items()}
    return LifecycleConfig(**{"max_experts": 6, **given})


def table(living: int = 3, *, step: int = 0, uses: tuple[int, ...] = (9, 5, 7)) -> ExpertTable:
    """Of one layer, whose experts were used until `step`."""
    start = ExpertTable.start(living, layers=1, slots=6)
    return start.count_uses([[*uses, 0, 0, 0][:6]], step=step, least_share=0.0)


def decided(own: LayerStatistics, given: ExpertTable, section: LifecycleConfig, *, step: int = 500) -> list[Change]:
    return decide([own], given, section, step=step, least=2)


ROWS = (9, 5, 7, 0, 0, 0)
CASES: dict[str, tuple[dict[str, Any], ExpertTable, LifecycleConfig, list[tuple[str, tuple[int, ...]]]]] = {
    "uncertain": (DOUBTFUL, table(step=500), config(), [("birth", (0, 3))]),
    "certain": ({**DOUBTFUL, "uncertainty": 0.6}, table(step=500), config(), []),
    "at the threshold": ({**DOUBTFUL, "uncertainty": 0.7}, table(step=500), config(), [("birth", (0, 3))]),
    "another threshold": (DOUBTFUL, table(step=500), config(birth={"uncertainty": 0.91}), []),
    "untrained": ({**DOUBTFUL, "lowest": 0.97}, table(step=500), config(), []),
    "trained in another run": (
        {**DOUBTFUL, "first": 0.79, "lowest": 0.79, "uncertainty": 0.79}, table(step=500), config(), [("birth", (0, 3))]
    ),
    "untrained, whenever there is room": (
        {**DOUBTFUL, "lowest": 1.0}, table(step=500), config(birth={"uncertainty": 0.0}), [("birth", (0, 3))]
    ),
    "no rows": ({**DOUBTFUL, "uncertainty": None}, table(step=500), config(), []),
    "full": (DOUBTFUL, table(6, step=500, uses=(1,) * 6), config(), []),
    "idle": ({}, table(step=400), config(prune={"idle_steps": 100}), [("prune", (1,))]),
    "idle for long, but one is needed": ({}, table(step=1), config(prune={"idle_steps": 100}), [("prune", (1,))]),
    "not idle for long enough": ({}, table(step=401), config(prune={"idle_steps": 100}), []),
    "never pruned": ({}, table(step=0), config(prune={"idle_steps": None}), []),
    "an idle one goes, and makes room": (
        {**DOUBTFUL, "rows": (9, 5, 7, 1, 0, 1)},
        ExpertTable.start(6, layers=1, slots=6).count_uses([[9, 5, 7, 1, 0, 1]], step=500, least_share=0.0),
        config(prune={"idle_steps": 300}), [("prune", (4,)), ("birth", (0, 6))],
    ),
}  # fmt: skip


@pytest.mark.covers("EXP-11")
@pytest.mark.parametrize("name", list(CASES))
def test_what_is_decided(name: str) -> None:
    values, given, section, wanted = CASES[name]
    found = decided(LayerStatistics(**{"rows": ROWS, **values}), given, section)
    assert [(change.kind, change.ids) for change in found] == wanted
    assert all(len(change.reason) > 20 and change.layer == 0 for change in found)
    given.after(found, step=501)


def test_a_merge_is_weighted_by_uses_and_the_busier_one_survives() -> None:
    change = merge(table(step=500), 0, 1, 0, "they are alike")
    assert change.ids == (0, 1) and change.share == 9 / 14


@pytest.mark.covers("EXP-13")
@pytest.mark.parametrize("cooldown", [1, 40, 95])
def test_births_are_never_closer_than_the_cooldown(cooldown: int) -> None:
    born, given = [], table(2)
    section = config(birth={"uncertainty": 0.3, "cooldown_steps": cooldown})
    for step in range(10, 501, 10):
        given = given.count_uses([[4] * 6], step=step, least_share=0.0)
        changes = decided(LayerStatistics((4,) * 6, **DOUBTFUL), given, section, step=step)
        born += [step + 1 for change in changes if change.kind == "birth"]
        given = given.after(changes, step=step + 1)
    assert len(born) == 4 and min(np.diff(born)) >= cooldown
    assert born == list(range(11, 500, -(-cooldown // 10) * 10))[:4], "as soon as the cool-down has passed"


@pytest.mark.covers("EXP-12")
def test_the_number_of_experts_stays_between_its_bounds_whatever_happens() -> None:
    """500 steps of a router that is always uncertain, then 500 of rows that all go to one expert."""
    section = config(birth={"uncertainty": 0.3, "cooldown_steps": 1}, prune={"idle_steps": 20, "least_share": 0.05})
    given, counts = table(2), []
    for step in range(1, 1001):
        rows = (4,) * 6 if step <= 500 else (24, 0, 0, 0, 0, 0)
        given = given.count_uses([rows], step=step, least_share=0.05)
        doubt = DOUBTFUL if step <= 500 else {**DOUBTFUL, "uncertainty": 0.0}
        given = given.after(decided(LayerStatistics(rows, **doubt), given, section, step=step), step=step + 1)
        counts.append(len(given.layers[0]))
    assert max(counts) == 6 == counts[499] and min(counts) == 2 == counts[-1]
    assert given.slot(0, 0) == 0, "the one with all rows is left"


def test_a_birth_counts_as_use() -> None:
    given = table(step=100).after([Change("birth", 0, (0, 3), "", slot=3)], step=300)
    section = config(prune={"idle_steps": 200})
    for step, idle in ((499, [(1,), (2,)]), (500, [(1,), (2,)]), (299, []), (300, [(1,), (2,)])):
        found = [change.ids for change in decided(LayerStatistics(ROWS), given, section, step=step)]
        assert found == idle, "the newcomer had no row yet, and is younger than those that go"
    alone = given.after([Change("prune", 0, (one,), "") for one in (1, 2)], step=301)
    alone = alone.count_uses([[9, 0, 0, 0, 0, 0]], step=499, least_share=0.0)
    for step, idle in ((499, []), (500, [(3,)])):
        found = decide([LayerStatistics(ROWS)], alone, section, step=step, least=1)
        assert [change.ids for change in found] == idle


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change("birth", 0, (0, 4), "", slot=3), "expected expert 3"),
        (Change("birth", 0, (0, 3), "", slot=1), r"empty slots \[3, 4, 5\]"),
        (Change("birth", 0, (7, 3), "", slot=3), "not all alive"),
        (Change("merge", 0, (1, 1), ""), "not all alive"),
        (Change("prune", 0, (9,), ""), "not all alive"),
    ],
)
def test_a_change_that_does_not_fit_the_table_is_refused(change: Change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table().after([change], step=1)


def test_the_hash_is_of_who_lives_where_and_not_of_statistics() -> None:
    one = table()
    assert one.hash() == table(uses=(1, 2, 3), step=9).hash() == ExpertTable.from_json(one.to_json()).hash()
    others = [
        one.after([change], step=step)
        for step in (4, 5)
        for change in (
            Change("birth", 0, (0, 3), "", slot=3), Change("birth", 0, (1, 3), "", slot=3),
            Change("birth", 0, (0, 3), "", slot=4), Change("rate", 0, (0,), "", factor=0.5),
        )
    ]  # fmt: skip
    hashes = {other.hash() for other in others}
    assert len(hashes) == 7 and one.hash() not in hashes, "a rate does not depend on the step"
    assert all(0 <= value < 1 << 40 for value in hashes)
