"""ARCHITECTURE.md, 10 with remote experts: out of memory in the middle of a pass, on a worker or on a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from exchange import Scene, act
from expert_shortages import Fate, play, probe
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
"""An error on a host between the evaluation after step 21 and the next vote counts for step 22."""
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
ANNOUNCED = [(24, *fate[1:]) if fate[0] == 25 else fate for fate in HOSTS]
"""In a step whose vote announces a move: the step is dropped, and voted on again with the same announcement."""
TWICE = (*LOOP, ("experts", (("inflight", 2),)))
AGAIN = (("loop", (*SMALL, ("activation_checkpointing", True))),)
SCENES: dict[str, tuple[Scene, list[Fate]]] = {
    "2 workers, 2 hosts": (Scene(2, 2, steps=STEPS, sections=LOOP), WORKERS + HOSTS),
    "2 workers, 2 hosts, two in flight": (Scene(2, 2, steps=STEPS, sections=TWICE), WORKERS + HOSTS),
    "2 workers, 2 hosts, computed again": (Scene(2, 2, steps=STEPS, sections=AGAIN), WORKERS + HOSTS),
    "2 workers, 2 hosts, experts on the move": (
        Scene(2, 2, steps=STEPS, seed=1, replicas=2, moves=MOVES, sections=LOOP), WORKERS + ANNOUNCED,
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
        members = run_gang(play, list(group.values()), world_size=size, timeout=240.0)
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
def test_each_error_is_an_event_with_its_worker(runs: dict[str, list[Any]], name: str) -> None:
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


def test_a_move_is_reported_with_its_bytes_even_if_a_host_drops_its_step(runs: dict[str, list[Any]]) -> None:
    name = "2 workers, 2 hosts, experts on the move"
    told = {step: sent for (step, _), sent in zip(runs[name][0]["in force"], runs[name][0]["sent"], strict=True)}
    arrived = [step + 1 for step, _ in MOVES]
    assert 18 in arrived and HOSTS[0][0] == 18
    assert [step for step, sent in told.items() if sent] == arrived


PROBED: dict[str, tuple[Scene, dict[int, int], str]] = {
    "a host": (Scene(2, 2, steps=8), {3: 100}, "expert host 1"),
    "a worker": (Scene(2, 2, steps=8), {1: 3}, "planted"),
    "colocated experts": (Scene(2, "colocated", steps=8), {1: 100}, "the experts of rank 1"),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {}
    folder = str(tmp_path_factory.mktemp("probes"))
    for size in sorted({scene.size for scene, _, _ in PROBED.values()}):
        group = {name: one for name, one in PROBED.items() if one[0].size == size}
        scenes = [(replace(scene, run_path=folder), rooms) for scene, rooms, _ in group.values()]
        members = run_gang(probe, scenes, world_size=size)
        made |= {name: [member[index] for member in members] for index, name in enumerate(group)}
    return made


@pytest.mark.parametrize("name", list(PROBED))
def test_a_failing_pass_of_a_probe_is_a_result(probes: dict[str, list[Any]], name: str) -> None:
    """Of 6 rows; 3 are taken then, and the run is that of a process that has never probed."""
    scene, _, who = PROBED[name]
    first, second = probes[name][: scene.workers]
    outcomes = {trial["candidate"]["micro_batch_size"]: trial["outcome"] for trial in first["probe"]["trials"]}
    assert outcomes == {1: "ok", 6: "out_of_memory", 3: "ok"}
    (failed,) = [trial for trial in first["probe"]["trials"] if trial["outcome"] != "ok"]
    assert who in failed["reason"] or (failed["reason"] == "on another worker" and who == "planted")
    assert first["micro"] == second["micro"] == 3
    assert first["refused"] and second["refused"], "the precision that was compared with 6 rows"
    check_equal(probes[name], act(0, Scene(1, 0, steps=8)), workers=scene.workers, where=name)
