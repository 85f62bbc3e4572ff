"""Room for the experts, given the known memory of the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.devices.inventory import Device
from experts.config import ExpertsConfig
from experts.placement.starting import HOME_BYTES, MEMORY_SHARE, PlacementRules, first_placement, starting_placement
from experts.placement.values import HostSpec
from experts.plan.bytes import check_room, idle_keys
from experts.shapes import LayerShape
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


def test_survivors_without_room_are_refused_by_memory() -> None:
    with pytest.raises(InputError, match=r"room for the .* bytes of all experts"):
        starting_placement(RULES, [SHAPE, SHAPE], hosts(5))
    with pytest.raises(InputError, match=r"layer 0 expert 0 of \d+ bytes.*host 0 \(T4\)"):
        starting_placement(RULES, [SHAPE, SHAPE], hosts(0.5, 0.5))


def gpu(name: str, experts: float) -> Device:
    return Device("cuda", name, int(experts * ONE / MEMORY_SHARE) + 1, (8, 0), None, 0)


def test_a_model_is_refused_before_the_start() -> None:
    facts = ExpertFacts(((SHAPE.numel(0),) * 6,) * 2, 0, 0, 0, 0)
    small, large, unknown = gpu("T4", 0.5), gpu("A100", 20), Device("cuda", "GPU", 0, None, None, 0)
    with pytest.raises(InputError, match=r"experts\.hosts: got layer 0 expert 0 of \d+ bytes"):
        check_room(facts, ExpertsConfig(), [small, small], hosts=2)
    check_room(facts, ExpertsConfig(), [small, large], hosts=1)
    check_room(facts, ExpertsConfig(), [unknown, small], hosts=2)


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
    facts = ExpertFacts(((SHAPE.numel(0),) * 6,) * 2, 0, 0, 0, 0)
    found = idle_keys(ExpertsConfig(**section), facts, place=place, workers=1)
    assert len(found) == len(says)
    assert all(one.startswith(f"experts.{start}") for one, start in zip(found, says, strict=True))


def test_the_message_gives_the_number_of_replicas() -> None:
    placed = starting_placement(PlacementRules(replicas=7), [SHAPE], hosts(12, 12))
    assert sum(len(copies) - 1 for copies in placed.layers[0].copies) == 6
