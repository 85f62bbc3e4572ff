"""Experts that move, and replicas that come and go, in the middle of training: the same training to the last digits.

The placements are drawn, so that homes and replica sets change in every way; the reference never moves anything.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from exchange import Scene, act, placement_of, play
from gang import run_gang
from test_exchange import check_equal, played

from experts.placement.values import Placement

MOVES = ((3, 11), (5, 12), (8, 13), (12, 14), (13, 15))
SCENES: dict[str, Scene] = {
    "1 worker, 3 hosts, homes": Scene(1, 3, moves=MOVES),
    "1 worker, 3 hosts, homes and replicas": Scene(1, 3, replicas=3, moves=MOVES),
    "2 workers, 2 hosts, homes and replicas": Scene(2, 2, replicas=3, moves=MOVES),
    "2 workers, colocated, homes and replicas": Scene(2, "colocated", replicas=3, moves=MOVES),
}
LAST = {
    "1 worker, 3 hosts": Scene(1, 3, steps=6, moves=((6, 11),)),
    "2 workers, colocated": Scene(2, "colocated", steps=6, replicas=1, moves=((6, 11),)),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return played(SCENES)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return act(0, Scene(1, 0))


def placements(scene: Scene) -> list[Placement]:
    """All that are in force one after the other."""
    return [placement_of(replace(scene, seed=seed), [4, 4]) for seed in (None, *dict(scene.moves).values())]


@pytest.mark.parametrize("name", list(SCENES))
def test_a_run_with_moves_is_the_run_without(runs: dict[str, list[Any]], reference: dict[str, Any], name: str) -> None:
    scene, made = SCENES[name], runs[name]
    check_equal(made, reference, workers=scene.workers, where=name)
    versions = dict(made[0]["in force"])
    assert [versions[step] for step in (3, 4, 5, 6, 8, 9, 12, 13, 14, 20)] == [1, 2, 2, 3, 3, 4, 4, 5, 6, 6]
    assert made[0]["refused"] == []


def test_the_moves_are_worth_the_name() -> None:
    """At least three of them change homes, and at least two replica sets."""
    scene = SCENES["1 worker, 3 hosts, homes and replicas"]
    each = [
        ([c[0] for layer in p.layers for c in layer.copies], [set(c[1:]) for layer in p.layers for c in layer.copies])
        for p in placements(scene)
    ]
    assert sum(before[0] != after[0] for before, after in pairwise(each)) >= 3
    assert sum(before[1] != after[1] for before, after in pairwise(each)) >= 2


def test_hosts_hold_the_experts_of_the_last_placement(runs: dict[str, list[Any]]) -> None:
    scene = SCENES["1 worker, 3 hosts, homes and replicas"]
    last = placements(scene)[-1]
    for host, member in enumerate(runs["1 worker, 3 hosts, homes and replicas"][1:]):
        assert {tuple(key) for key in member["held"]} == {(n, e) for n in range(2) for e in last.slots(n, host)}


def test_without_replicas_moves_change_no_bit(runs: dict[str, list[Any]], reference: dict[str, Any]) -> None:
    still = run_gang(play, [Scene(1, 3)], world_size=4)[0][0]
    moved = runs["1 worker, 3 hosts, homes"][0]
    assert moved["loss"] == still["loss"] and moved["grad_norm"] == still["grad_norm"]
    for name, value in still["weights"].items():
        assert np.array_equal(moved["weights"][name], value), name


def test_a_corrupted_move_is_refused_by_all_and_training_continues(reference: dict[str, Any]) -> None:
    scene = Scene(1, 3, moves=((3, 11), (5, 12)), spoil=1)
    made = run_gang(play, [scene], world_size=4)
    check_equal([made[0][0]], reference, workers=1, where="spoilt")
    homes = [[layer.copies[e][0] for layer in p.layers for e in range(4)] for p in placements(scene)]
    arrives = any(old != new == 1 for old, new in zip(homes[0], homes[1], strict=True))
    assert arrives, "nothing was on its way to the host whose bytes are spoilt"
    assert dict(made[0][0]["in force"])[4] == 1, "the placement that arrived spoilt came into force"
    assert "digest" in made[0][0]["refused"][0]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Any]]:
    return played(LAST)


@pytest.mark.parametrize("name", list(LAST))
def test_a_run_may_end_while_experts_are_moving(ended: dict[str, list[Any]], name: str) -> None:
    scene = LAST[name]
    check_equal(ended[name], act(0, Scene(1, 0, steps=6)), workers=scene.workers, where=name)
    assert dict(ended[name][0]["in force"])[6] == 1, "the move was announced with the last vote"
    assert ended[name][0]["refused"] == []
    assert [member["unfinished"] for member in ended[name]] == [0] * scene.size, "what was on its way has arrived"


def test_every_host_reports_its_compute_time(runs: dict[str, list[Any]]) -> None:
    busy = runs["1 worker, 3 hosts, homes"][0]["busy"]
    assert len(busy) == 20 and all(len(row) == 3 and all(seconds > 0 for seconds in row) for row in busy)
