"""DESIGN 4.10 where experts live elsewhere: memory that runs out in the middle of a pass, on a worker or on a host."""

from __future__ import annotations

from typing import Any

import pytest
from exchange import Scene, act
from expert_shortages import Fate, play
from gang import run_gang
from test_exchange import check_equal

STEPS = 30
SMALL: tuple[tuple[str, Any], ...] = (("grow_after", 1),)
LOOP = (("loop", SMALL),)
WORKERS: list[Fate] = [
    (2, 0, "before", 1), (5, 1, "under way", 0), (7, 1, "evaluation", 0), (9, 0, "backward", 0),
    (12, 0, "before", 0), (12, 1, "before", 0), (15, 1, "backward", 0), (15, 0, "under way", 1),
    (28, 1, "last", 0),
]  # fmt: skip
"""Two workers: each alone, both at one place (nobody is left in the passes), both at different ones; and one behind its
last exchange, when the other may have come through."""
HOSTS: list[Fate] = [
    (18, 2, "expert forward", 0), (20, 3, "expert backward", 1), (22, 3, "expert evaluation", 0),
    (25, 2, "expert forward", 0), (30, 2, "expert backward", 0), (30, 3, "expert backward", 0),
]  # fmt: skip
"""What a host meets between the evaluation after step 21 and the next vote counts for step 22."""
COLOCATED: list[Fate] = [
    *WORKERS, (18, 0, "expert forward", 0), (21, 1, "expert backward", 0), (22, 1, "expert evaluation", 0),
]  # fmt: skip
THREE: list[Fate] = [
    (2, 0, "before", 1), (4, 1, "under way", 0), (6, 2, "backward", 0), (9, 0, "before", 0), (9, 1, "before", 0),
    (9, 2, "before", 0), (12, 0, "expert forward", 0), (15, 1, "expert backward", 0), (19, 2, "under way", 1),
    (24, 1, "last", 1),
]  # fmt: skip
MOVES = ((8, 2), (11, 3), (14, 4), (17, 5), (24, 6))
ONE: list[Fate] = [(3, 0, "before", 1), (6, 1, "expert backward", 0), (10, 0, "under way", 2)]
TWICE = (*LOOP, ("experts", (("inflight", 2),)))
AGAIN = (("loop", (*SMALL, ("activation_checkpointing", True))),)
SCENES: dict[str, tuple[Scene, list[Fate]]] = {
    "2 workers, 2 hosts": (Scene(2, 2, steps=STEPS, sections=LOOP), WORKERS + HOSTS),
    "2 workers, 2 hosts, two in flight": (Scene(2, 2, steps=STEPS, sections=TWICE), WORKERS + HOSTS),
    "2 workers, 2 hosts, computed again": (Scene(2, 2, steps=STEPS, sections=AGAIN), WORKERS + HOSTS),
    "2 workers, 2 hosts, experts on the move": (
        Scene(2, 2, steps=STEPS, seed=1, replicas=2, moves=MOVES, sections=LOOP), WORKERS + HOSTS,
    ),
    "2 workers, colocated": (Scene(2, "colocated", steps=STEPS, sections=LOOP), COLOCATED),
    "2 workers, colocated, two in flight": (Scene(2, "colocated", steps=STEPS, sections=TWICE), COLOCATED),
    "3 workers, colocated": (Scene(3, "colocated", micro=2, steps=STEPS, sections=LOOP), THREE),
    "1 worker, 1 host": (Scene(1, 1, steps=STEPS, sections=LOOP), ONE),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {}
    for size in sorted({scene.size for scene, _ in SCENES.values()}):
        group = {name: scene for name, scene in SCENES.items() if scene[0].size == size}
        members = run_gang(play, list(group.values()), world=size, timeout=240.0)
        made |= {name: [member[index] for member in members] for index, name in enumerate(group)}
    return made


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return act(0, Scene(1, 0, steps=STEPS))


@pytest.mark.parametrize("name", list(SCENES))
def test_the_run_is_the_unbroken_one(runs: dict[str, list[Any]], reference: dict[str, Any], name: str) -> None:
    scene, fates = SCENES[name]
    happened = sorted(fate for member in runs[name] for fate in member["happened"])
    assert happened == sorted(fates)
    check_equal(runs[name], reference, workers=scene.workers, where=name)


@pytest.mark.parametrize("name", list(SCENES))
def test_each_is_an_event_that_says_who(runs: dict[str, list[Any]], name: str) -> None:
    scene, fates = SCENES[name]
    expected: dict[tuple[int, str], set[str]] = {}
    for step, rank, point, _ in fates:
        evaluation = "evaluation" in point
        number = rank if scene.hosts == "colocated" else rank - scene.workers
        where = "the experts of rank" if scene.hosts == "colocated" else "expert host"
        who = f"{where} {number}" if point.startswith("expert") else f"rank {rank}"
        step -= point == "expert evaluation"
        expected.setdefault((step, "evaluation" if evaluation else "step"), set()).add(who)
    found = runs[name][0]["events"]
    told: dict[tuple[int, str], set[str]] = {}
    for event in found:
        told.setdefault((event["step"], event["during"]), set()).update(event["who"])
        assert event["micro_batch_size"] < event["micro_batch_size_before"]
    assert told == expected
