"""Room for the experts, given the known memory of the hosts."""

from __future__ import annotations

from typing import Any

import pytest
from plans import check_placement

from cluster.devices.inventory import Device
from experts.config import ExpertsConfig, LayerShape
from experts.placement.policy import (
    HOME_BYTES,
    MEMORY_SHARE,
    PlacementRules,
    costs_of,
    first_placement,
    starting_placement,
    surviving_placement,
)
from experts.placement.values import HostSpec, LayerPlacement, Placement
from experts.sizes import check_room, idle_keys
from raytrain.errors import InputError
from raytrain.plan.facts import ExpertFacts

SHAPE = LayerShape(width=8, hidden_E=(32,) * 6, activation="gelu")
ONE = HOME_BYTES * SHAPE.numel(0)
RULES = PlacementRules()


def hosts(*experts: float) -> list[HostSpec]:
    """Hosts with room for these numbers of experts."""
    return [HostSpec(host, 1.0, int(room * ONE) + 1, device="T4") for host, room in enumerate(experts)]


def test_consecutive_experts_where_they_fit() -> None:
    assert starting_placement(RULES, [SHAPE, SHAPE], hosts(6, 6)) == first_placement([6, 6], hosts=2)


def test_a_small_host_gets_fewer_experts() -> None:
    placed = starting_placement(RULES, [SHAPE, SHAPE], hosts(3, 9))
    homes = [copies[0] for layer in placed.layers for copies in layer.copies]
    assert homes.count(0) == 3 and homes.count(1) == 9


def test_hosts_that_only_answer_need_room_for_the_weights_alone() -> None:
    """Four times as many experts as where they are trained."""
    answers = PlacementRules(trains=False)
    assert starting_placement(answers, [SHAPE, SHAPE], hosts(1.5, 1.5)) == first_placement([6, 6], hosts=2)
    with pytest.raises(InputError, match=r"room for the .* bytes of all experts"):
        starting_placement(answers, [SHAPE, SHAPE], hosts(1.4, 1.4))


def test_survivors_without_room_are_refused_by_memory() -> None:
    with pytest.raises(InputError, match=r"room for the .* bytes of all experts"):
        starting_placement(RULES, [SHAPE, SHAPE], hosts(5))
    with pytest.raises(InputError, match=r"layer 0 expert 0 of \d+ bytes.*host 0 \(T4\)"):
        starting_placement(RULES, [SHAPE, SHAPE], hosts(0.5, 0.5))


@pytest.mark.covers("EXP-08")
def test_experts_of_a_lost_host_go_where_the_least_is_to_do_and_the_others_stay() -> None:
    """Eight experts on three survivors, thirteen after a host with five was lost; then with a fast host."""
    wide, five = LayerShape(width=8, hidden_E=(32,) * 13, activation="gelu"), (0, 3, 6, 9, 12)
    homes = [3 if expert in five else expert % 3 for expert in range(13)]
    before = Placement(4, 4, (LayerPlacement(tuple((home,) for home in homes), ((1.0,),) * 13),) * 2)
    order = (2, 0, 1)  # the index in `before` of each survivor
    equal = [HostSpec(host, 1.0, None) for host in range(3)]
    after = surviving_placement(RULES, [wide, wide], equal, before=before, survivors=order)
    assert after.version == 5 and after.num_hosts == 3
    check_placement(after, [13, 13])
    for layer in (0, 1):
        assert all(order[after.home_of(layer, e)] == homes[e] for e in range(13) if e not in five)
        assert sorted(len(after.slots(layer, host)) for host in range(3)) == [4, 4, 5]
    fast = [HostSpec(0, 5.5, None), HostSpec(1, 1.0, None), HostSpec(2, 1.0, None)]
    after = surviving_placement(RULES, [wide], fast, before=Placement(1, 4, before.layers[:1]), survivors=order)
    # host 0 has four experts and host 1 none; it finishes eight in 1.5 times of what one takes elsewhere
    assert [len(after.slots(0, host)) for host in range(3)] == [8, 1, 4]


def test_a_replica_becomes_the_home_and_the_largest_orphan_is_placed_first() -> None:
    shape = LayerShape(width=8, hidden_E=(16, 16, 64, 32, 8), activation="gelu")
    copies, shares = ((0,), (2, 1, 0), (2,), (2,), (2,)), ((1.0,), (0.5, 0.3, 0.2), (1.0,), (1.0,), (1.0,))
    before = Placement(1, 3, (LayerPlacement(copies, shares),))
    two = [HostSpec(0, 1.0, None), HostSpec(1, 1.0, None)]
    after = surviving_placement(RULES, [shape], two, before=before, survivors=(0, 1)).layers[0]
    assert after.copies == ((0,), (1, 0), (1,), (0,), (0,))
    assert after.shares[1] == pytest.approx((0.6, 0.4))


def test_orphans_share_the_room_that_is_left() -> None:
    shape = LayerShape(width=8, hidden_E=(32,) * 5, activation="gelu")
    before = Placement(1, 3, (LayerPlacement(((0,), (1,), (1,), (2,), (2,)), ((1.0,),) * 5),))
    tight = hosts(2, 4)  # the first orphan fills host 0
    after = surviving_placement(RULES, [shape], tight, before=before, survivors=(0, 1))
    assert [after.home_of(0, expert) for expert in range(5)] == [0, 1, 1, 0, 1]
    check_placement(after, [5], hosts=tight, costs=costs_of([shape]))


def test_survivors_without_room_for_an_orphan_place_all_experts_again() -> None:
    uneven = LayerShape(width=8, hidden_E=(32, 32, 32, 64), activation="gelu")
    before = Placement(1, 3, (LayerPlacement(((0,), (1,), (1,), (2,)), ((1.0,),) * 4),))
    tight = hosts(3, 2)  # neither can add an expert of two to what it has
    after = surviving_placement(RULES, [uneven], tight, before=before, survivors=(0, 1))
    check_placement(after, [4], hosts=tight, costs=costs_of([uneven]))
    assert after.home_of(0, 3) in (0, 1)
    with pytest.raises(InputError, match="room for"):
        surviving_placement(RULES, [uneven], hosts(2, 2), before=before, survivors=(0, 1))
    robin = PlacementRules(policy="round_robin")
    even = [HostSpec(0, 1.0, None), HostSpec(1, 1.0, None)]
    anew = surviving_placement(robin, [uneven], even, before=before, survivors=(0, 1))
    assert [copies[0] for copies in anew.layers[0].copies] == [0, 1, 0, 1]


def gpu(name: str, experts: float) -> Device:
    return Device("cuda", name, int(experts * ONE / MEMORY_SHARE) + 1, (8, 0), None, 0)


def test_a_model_is_refused_before_the_start() -> None:
    facts = ExpertFacts(((SHAPE.numel(0),) * 6,) * 2, 0, 0, 0)
    small, large, unknown = gpu("T4", 0.5), gpu("A100", 20), Device("cuda", "GPU", 0, None, None, 0)
    with pytest.raises(InputError, match=r"experts\.hosts: got layer 0 expert 0 of \d+ bytes"):
        check_room(facts, ExpertsConfig(), [small, small], hosts=2)
    check_room(facts, ExpertsConfig(), [small, large], hosts=1)
    check_room(facts, ExpertsConfig(), [unknown, small], hosts=2)
    on_t4 = ExpertsConfig(num_experts=6, hosts={"T4": 1})
    check_room(facts, on_t4, [gpu("T4", 20), small], hosts=1)
    with pytest.raises(InputError, match="T4"):
        check_room(facts, on_t4, [large, small], hosts=1)  # the largest GPU is of another type
    twice = ExpertsConfig(num_experts=6, hosts={"A100": 1, "NVIDIA A100": 1})
    one_and_none = [gpu("NVIDIA A100", 12), gpu("NVIDIA A100", 0)]
    with pytest.raises(InputError):
        check_room(ExpertFacts(((SHAPE.numel(0),) * 13,), 0, 0, 0), twice, one_and_none, hosts=2)


@pytest.mark.parametrize(
    ("place", "section", "says"),
    [
        (0, {"rebalance_every": 5}, ["rebalance_every 5 changes nothing: every worker holds all experts"]),
        (1, {"rebalance_every": 5, "replicas": 1}, ["rebalance_every 5 changes nothing: the one host", "replicas 1"]),
        ("colocated", {"replicas": 2}, ["replicas 2 changes nothing: the one worker holds all experts"]),
        (2, {"replicas": 7}, ["replicas 7 is more than 2 hosts can hold: there is room for 6 in"]),
        ({"A100": 1, "T4": 1}, {"replicas": 7}, ["replicas 7 is more than 2 hosts can hold: there is room for 6"]),
        (2, {"replicas": 6, "rebalance_every": 5}, []),
        (2, {"replicas": 1, "placement": "round_robin"}, ["replicas 1 changes nothing: experts.placement round_robin"]),
        ("none", {"replicas": 1, "rebalance_every": 5}, []),
    ],
)
def test_keys_that_change_nothing_are_reported(place: Any, section: dict[str, Any], says: list[str]) -> None:
    facts = ExpertFacts(((SHAPE.numel(0),) * 6,) * 2, 0, 0, 0)
    found = idle_keys(ExpertsConfig(**section), facts, place=place, workers=1)
    assert len(found) == len(says)
    assert all(one.startswith(f"experts.{start}") for one, start in zip(found, says, strict=True))


def test_the_message_gives_the_number_of_replicas() -> None:
    placed = starting_placement(PlacementRules(replicas=7), [SHAPE], hosts(12, 12))
    assert sum(len(copies) - 1 for copies in placed.layers[0].copies) == 6
