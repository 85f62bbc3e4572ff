"""When an elastic run continues with another number of workers."""

from __future__ import annotations

import pytest

from raytrain.execution.trainer import waits_for_room
from raytrain.plan.room import room_for
from raytrain.plan.shares import GROW_AFTER_S, SHRINK_AFTER_S, ElasticWorkers


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def decided(seconds: float, *rooms: int, waiting: bool, bounds: tuple[int, int] = (2, 6)) -> list[int | None]:
    """The decision of a run with 4 workers at each of these rooms, `seconds` apart."""
    clock, found = Time(), []
    elastic = ElasticWorkers(bounds, 4, clock=clock)
    for room in rooms:
        change = elastic.decide(room=room, waiting=waiting)
        found.append(None if change is None else change.workers)
        clock.now += seconds
    return found


def test_room_for_more_is_used_once_it_has_lasted() -> None:
    assert decided(GROW_AFTER_S / 2, 1, 1, 1, waiting=False) == [None, None, 5]
    assert decided(GROW_AFTER_S * 2, 0, 9, 9, waiting=False) == [None, None, 6], "at most the largest number"
    assert decided(GROW_AFTER_S * 0.9, 1, 2, 1, 2, waiting=False) == [None] * 4, "while nodes still arrive"
    assert decided(GROW_AFTER_S * 2, 0, 0, 0, waiting=False) == [None] * 3


@pytest.mark.parametrize("waiting", [False, True])
def test_room_that_comes_after_a_long_quiet_time_has_to_last_as_well(waiting: bool) -> None:
    """A node that is there for two seconds restarts nothing."""
    quiet, room = (4, 3) if waiting else (0, 1)
    lasts = int((SHRINK_AFTER_S if waiting else GROW_AFTER_S) / 2)
    changed = 3 if waiting else 5
    assert decided(2.0, *[quiet] * 20, room, room, quiet, *[quiet] * 9, waiting=waiting) == [None] * 32
    found = decided(2.0, *[quiet] * 20, *[room] * (lasts + 2), waiting=waiting)
    assert found.index(changed) == 20 + -(-int(SHRINK_AFTER_S if waiting else GROW_AFTER_S) // 2)


def test_workers_that_find_no_room_are_left_out_down_to_the_smallest_number() -> None:
    assert decided(SHRINK_AFTER_S, 3, 3, waiting=True) == [None, 3]
    assert decided(SHRINK_AFTER_S, 1, 1, 1, waiting=True) == [None] * 3, "below the smallest: wait for nodes"
    assert decided(SHRINK_AFTER_S, 4, 9, 9, waiting=True) == [None] * 3, "Ray starts them"
    assert decided(SHRINK_AFTER_S, 3, 1, 3, 3, waiting=True) == [None, None, None, 3], "room that came and went"


@pytest.mark.parametrize(
    ("nodes", "room"),
    [
        ([], 0),
        ([{"CPU": 3.0}, {"CPU": 3.0}], 2),
        ([{"CPU": 1.5}, {"CPU": 0.5}], 0),
        ([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}], 2 + 2),
    ],
)
def test_room_is_counted_node_by_node(nodes: list[dict[str, float]], room: int) -> None:
    assert room_for({"CPU": 2}, nodes) == room


def test_gpus_of_the_type_count_only() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, {"CPU": 8.0, "GPU": 4.0}]
    assert room_for({"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}, nodes) == 2


def test_only_a_group_of_the_job_that_is_not_placed_waits() -> None:
    job, other = "02000000", "03000000"
    placed, waiting = {"state": "CREATED"}, {"state": "PENDING"}
    assert not waits_for_room({}, job)
    assert not waits_for_room({f"a{job}": placed, f"b{job}": {"state": "REMOVED"}, f"c{other}": waiting}, job)
    assert waits_for_room({f"a{job}": {"state": "REMOVED"}, f"b{job}": waiting}, job)
