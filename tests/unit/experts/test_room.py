"""Room for the experts, by what is known of the hosts' memory."""

from __future__ import annotations

from typing import Any

import pytest

from experts.config import ExpertsConfig
from experts.room import FREE, HOME_BYTES, check_room, placement_for
from experts.shard import LayerShape
from experts.starting import first_placement
from raytrain.errors import InputError

SHAPE = LayerShape(num_experts=6, width=8, hidden=32, activation="gelu")
ONE = HOME_BYTES * SHAPE.numel
KEYS = {"layers": 2, "heads": 2, "width": 8, "context": 4}


def host(experts: float) -> dict[str, Any]:
    """A host with room for so many experts."""
    return {"name": "T4", "node": "a", "memory_bytes": int(experts * ONE / FREE) + 1}


def test_consecutive_experts_where_they_fit_or_nothing_is_known() -> None:
    first = first_placement([6, 6], hosts=2, version=3)
    assert placement_for([SHAPE, SHAPE], [{}, {"memory_bytes": None}], version=3) == first
    assert placement_for([SHAPE, SHAPE], [host(6), host(6)], version=3) == first


def test_a_small_host_takes_fewer() -> None:
    placed = placement_for([SHAPE, SHAPE], [host(3), host(9)])
    homes = [copies[0] for layer in placed.layers for copies in layer.copies]
    assert homes.count(0) == 3 and homes.count(1) == 9


def test_survivors_without_room_refuse_by_memory() -> None:
    with pytest.raises(InputError, match=r"room for the .* bytes of all experts"):
        placement_for([SHAPE, SHAPE], [host(5)])
    with pytest.raises(InputError, match=r"layer 0 expert 0 of \d+ bytes.*host 0 \(T4\)"):
        placement_for([SHAPE, SHAPE], [host(0.5), host(0.5)])


def test_a_built_in_model_is_refused_before_the_start() -> None:
    experts = ExpertsConfig(num_experts=6, hidden=32)
    small, large = ("T4", int(0.5 * ONE / FREE)), ("A100", int(20 * ONE / FREE))
    with pytest.raises(InputError, match=r"experts\.hosts: seen layer 0 expert 0 of \d+ bytes"):
        check_room("experts.models:moe_gpt", KEYS, experts, [small, small], hosts=2)
    check_room("experts.models:moe_gpt", KEYS, experts, [small, large], hosts=1)
    check_room("experts.models:moe_gpt", KEYS, experts, [("GPU", 0), small], hosts=2)
    check_room("mine:build", {}, experts, [small, small], hosts=2)
