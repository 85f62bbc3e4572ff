"""Policies: EPLB's published plan, our bounds against brute force, memory, moves, and when to rebalance."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from plans import check_placement

from experts.placement.lpt import copy_counts
from experts.placement.policy import (
    PlacementRules,
    Policy,
    eplb_slots,
    new_expert_host,
    newcomer_home,
    place,
    place_first,
)
from experts.placement.rebalance import MARGIN, NEWEST, decide, predict, split_moves, step_seconds
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from raytrain.errors import InputError

COST = ExpertCost(home_bytes=16, replica_bytes=2, work=1.0)
README = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


def hosts_of(*speeds: float, memory: int | None = None) -> list[HostSpec]:
    return [HostSpec(host, speed, memory) for host, speed in enumerate(speeds)]


def loads_of(draw: random.Random, layers: int, experts: int, sigma: float = 1.0) -> list[list[float]]:
    return [[float(int(1000 * draw.lognormvariate(0, sigma))) for _ in range(experts)] for _ in range(layers)]


def costs_of(load: list[list[float]]) -> Costs:
    return [[COST] * len(row) for row in load]


# ---------------------------------------------------------------- EPLB


def test_eplb_gives_every_expert_a_slot_and_the_next_ones_to_the_largest_load_per_copy() -> None:
    """Plans worked out by hand from its description."""
    assert eplb_slots([90.0, 132.0, 40.0, 61.0], 2, each=3) == [[1, 3, 2], [1, 0, 0]]
    assert eplb_slots([4.0, 3.0, 2.0, 1.0], 2, each=2) == [[0, 3], [1, 2]]
    assert eplb_slots([9.0, 1.0], 3, each=1) == [[0], [1], [0]]


def test_eplb_fills_equal_slots_and_merges_two_copies_on_one_host() -> None:
    draw = random.Random(0)
    for _ in range(30):
        experts, number = draw.choice([(8, 4), (12, 3), (16, 8)])
        load, each = loads_of(draw, 2, experts, 2.0), experts // number + draw.randint(0, 2)
        physical = [eplb_slots(row, number, each=each) for row in load]
        for row in physical:
            assert [len(held) for held in row] == [each] * number
            assert {expert for held in row for expert in held} == set(range(experts))
        placement = place("eplb", load, hosts_of(*[1.0] * number), costs_of(load), each * number - experts)
        check_placement(placement, [experts] * 2)
        for index, row in enumerate(physical):
            copies = [sum(held.count(expert) for held in row) for expert in range(experts)]
            per_host = [sum(load[index][expert] / copies[expert] for expert in held) for held in row]
            ours = placement.host_loads(index, load[index], costs_of(load)[index], hosts_of(*[1.0] * number))
            assert ours == pytest.approx(per_host)
    one = place("eplb", [[100.0, 1.0]], hosts_of(1.0, 1.0), [[COST] * 2], 4)
    assert one.layers[0].copies == ((0, 1), (1,)) and one.layers[0].shares[0] == pytest.approx((0.6, 0.4))


def test_the_readme_case_is_even_within_two_percent() -> None:
    hosts, costs = hosts_of(*[1.0] * 8), costs_of(README)
    placement = place("lpt", README, hosts, costs, 4)
    check_placement(placement, [12, 12])
    for layer, load in enumerate(README):
        loads = placement.host_loads(layer, load, costs[layer], hosts)
        assert placement.layers[layer].replicas <= 4
        assert max(loads) / (sum(loads) / 8) <= 1.02


# ---------------------------------------------------------------- ours


def best_makespan(work: list[float], speeds: list[float]) -> float:
    """The optimum without replicas, by trying every assignment."""
    best = float("inf")
    for chosen in itertools.product(range(len(speeds)), repeat=len(work)):
        loads = [0.0] * len(speeds)
        for one, host in zip(work, chosen, strict=True):
            loads[host] += one
        best = min(best, max(load / speed for load, speed in zip(loads, speeds, strict=True)))
    return best


@pytest.mark.covers("EXP-07")
def test_unequal_hosts_are_within_four_thirds_of_the_optimum_and_round_robin_is_worse() -> None:
    draw, hosts = random.Random(2), hosts_of(4.0, 2.0, 1.0)
    ours, robin, optimum = [], [], []
    for case in range(20):
        experts = draw.randint(3, 8) if case else 8
        load = [[float(draw.choice([draw.randint(1, 20), draw.randint(1, 200)])) for _ in range(experts)]]
        costs = [[ExpertCost(16, 2, float(draw.randint(1, 4))) for _ in range(experts)]]
        work = [rows * cost.work for rows, cost in zip(load[0], costs[0], strict=True)]
        optimum.append(best_makespan(work, [4.0, 2.0, 1.0]))
        ours.append(step_seconds(place("lpt", load, hosts, costs, 0), load, hosts, costs))
        robin.append(step_seconds(place("round_robin", load, hosts, costs, 0), load, hosts, costs))
        assert optimum[-1] * (1 - 1e-9) <= ours[-1] <= 4 / 3 * optimum[-1]
        assert robin[-1] >= ours[-1] * (1 - 1e-9)
    assert sum(robin) > 1.5 * sum(ours) and robin[0] > ours[0]


def test_random_plans_are_valid_deterministic_and_never_doubled() -> None:
    draw = random.Random(4)
    for _ in range(15):
        number, experts, layers = draw.randint(1, 6), draw.randint(1, 14), draw.randint(1, 3)
        load = loads_of(draw, layers, experts, draw.choice([0.3, 1.0, 2.0]))
        if draw.random() < 0.3:
            load[0] = [0.0] * experts
        hosts = hosts_of(*(draw.choice([1.0, 2.0, 4.0]) for _ in range(number)))
        replicas = draw.randint(0, 5)
        old = place("lpt", loads_of(draw, layers, experts), hosts, costs_of(load), replicas)
        for previous in (None, old):
            placement = place("lpt", load, hosts, costs_of(load), replicas, previous, 7)
            check_placement(placement, [experts] * layers)
            again = place("lpt", load, hosts, costs_of(load), replicas, previous, 7)
            assert placement == again and placement.version == 7
            assert all(layer.replicas <= replicas for layer in placement.layers)


def test_replicas_go_to_the_hottest_and_the_slowest_host_gains() -> None:
    assert copy_counts([100.0, 10.0, 10.0, 10.0], 2, most=3) == [3, 1, 1, 1]
    assert copy_counts([100.0, 60.0, 10.0], 3, most=2) == [2, 2, 2] and copy_counts([5.0], 4, most=1) == [1]
    load, hosts = [[1000.0, 100.0, 100.0, 100.0]], hosts_of(1.0, 1.0, 1.0, 1.0)
    costs = costs_of(load)
    plain, more = (place("lpt", load, hosts, costs, replicas) for replicas in (0, 3))
    assert len(more.layers[0].copies[0]) >= 3
    assert step_seconds(plain, load, hosts, costs) == 1000.0
    assert step_seconds(more, load, hosts, costs) <= 1.01 * 1300 / 4


def test_shares_follow_the_speed_of_the_hosts() -> None:
    hosts = hosts_of(3.0, 1.0)
    placement = place("lpt", [[100.0]], hosts, [[COST]], 1)
    shares = dict(zip(placement.layers[0].copies[0], placement.layers[0].shares[0], strict=True))
    assert shares == pytest.approx({0: 0.75, 1: 0.25}, abs=0.01)


def test_idle_experts_are_spread_and_an_unknown_load_counts_all_equally() -> None:
    hosts = hosts_of(1.0, 1.0, 1.0, 1.0)
    placement = place("auto", [[0.0] * 16], hosts, [[COST] * 16], 0)
    assert [len(placement.slots(0, host)) for host in range(4)] == [4, 4, 4, 4]
    placement = place("lpt", [[100.0] * 4 + [0.0] * 12], hosts, [[COST] * 16], 0)
    assert [len(placement.slots(0, host)) for host in range(4)] == [4, 4, 4, 4]


# ---------------------------------------------------------------- memory


def test_memory_is_respected_and_used_up_to_the_last_expert() -> None:
    draw = random.Random(5)
    for _ in range(25):
        layers, experts, number = draw.randint(1, 4), draw.randint(2, 8), draw.randint(2, 4)
        load = loads_of(draw, layers, experts, 1.5)
        costs = [[ExpertCost(16 * (size := draw.randint(1, 3)), 2 * size, 1.0) for _ in row] for row in load]
        need = sum(cost.home_bytes for row in costs for cost in row)
        tight = -(-need // number) + draw.choice([48, 60, 200])
        hosts = hosts_of(*(draw.choice([1.0, 4.0]) for _ in range(number)), memory=tight)
        old = place("lpt", loads_of(draw, layers, experts), hosts, costs, 2)
        for previous in (None, old):
            placement = place("lpt", load, hosts, costs, 3, previous)
            check_placement(placement, [experts] * layers, hosts=hosts, costs=costs)
    full = hosts_of(1.0, 1.0, memory=4 * 16)
    placement = place("lpt", [[9.0, 1.0], [9.0, 1.0], [9.0, 1.0], [9.0, 1.0]], full, [[COST] * 2] * 4, 2)
    assert [placement.bytes_on(host, [[COST] * 2] * 4) for host in (0, 1)] == [64, 64]


@pytest.mark.long
def test_no_plan_exceeds_the_memory_of_any_host() -> None:
    """Hosts of unequal memory and speed, several layers, replicas, loads that drift, and hosts that go away."""
    draw, refused, moved, replicas = random.Random(8), 0, 0, 0
    for _ in range(60):
        layers, experts, number = draw.randint(2, 4), draw.randint(2, 7), draw.randint(2, 4)
        sizes = [[draw.randint(1, 4) for _ in range(experts)] for _ in range(layers)]
        costs = [[ExpertCost(16 * size, draw.choice([2, 8]) * size, float(size)) for size in row] for row in sizes]
        share = sum(cost.home_bytes for row in costs for cost in row) / number
        hosts = [
            HostSpec(
                host, draw.choice([1.0, 3.0]), int(share * draw.choice([0.9, 1.0, 1.2, 1.6])) + draw.choice([8, 64])
            )
            for host in range(number)
        ]
        previous = None
        for step in range(3):
            load = loads_of(draw, layers, experts, 1.5)
            try:
                placement = place("lpt", load, hosts, costs, draw.choice([0, 2, 6]), previous, step)
            except InputError:
                refused += 1
                break
            check_placement(placement, [experts] * layers, hosts=hosts, costs=costs)
            if previous is not None:
                found = decide(
                    previous, load, hosts, costs, "lpt", 3, steps_until_next=100, step_s=1.0, bytes_per_s=1e9
                )
                check_placement(found.placement, [experts] * layers, hosts=hosts, costs=costs)
                for part in split_moves(previous, found.placement, costs, hosts=hosts, budget=32):
                    check_placement(part, [experts] * layers, hosts=hosts, costs=costs)
                    moved += 1
            replicas += sum(layer.replicas for layer in placement.layers)
            previous = placement
    assert refused < 20 and moved > 50 and replicas > 100, (refused, moved, replicas)


@pytest.mark.parametrize(("budget", "most"), [(16, 1), (31, 1), (32, 2), (50, 3), (1, 1)])
def test_an_instalment_moves_as_many_experts_as_its_budget_has_bytes_for(budget: int, most: int) -> None:
    """One at least, however large it is."""
    before, after = (Placement(1, 2, (LayerPlacement(((host,),) * 7, ((1.0,),) * 7),)) for host in (0, 1))
    parts = split_moves(before, after, [[COST] * 7], hosts=hosts_of(1.0, 1.0), budget=budget)
    moved = [len(old.home_moves(new)) for old, new in zip([before, *parts], parts, strict=False)]
    assert moved == [most] * (7 // most) + [7 % most] * (7 % most > 0) and parts[-1].layers == after.layers


def test_an_expert_too_large_for_any_host_is_named() -> None:
    hosts = [HostSpec(0, 1.0, 10), HostSpec(1, 1.0, 15, device="T4")]
    costs = [[ExpertCost(10, 1, 1.0), ExpertCost(16, 1, 1.0)]]
    said = r"layer 0 expert 1 of 16 bytes.*15 bytes of the largest, host 1 \(T4\)"
    with pytest.raises(InputError, match=said) as told:
        place("lpt", [[1.0, 1.0]], hosts, costs, 0)
    assert told.value.key == "experts.hosts" and told.value.exit_code == 2


@pytest.mark.parametrize(
    ("policy", "key"), [("lpt", "experts.hosts"), ("round_robin", "experts.placement"), ("eplb", "experts.placement")]
)
def test_experts_that_do_not_fit_together_are_refused(policy: Policy, key: str) -> None:
    hosts, load = hosts_of(1.0, 1.0, memory=40), [[1.0] * 6]
    with pytest.raises(InputError) as told:
        place(policy, load, hosts, costs_of(load), 0)
    assert told.value.key == key


def test_wrong_hosts_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="numbered from 0"):
        place("lpt", [[1.0]], [HostSpec(1, 1.0, None)], [[COST]], 0)
    with pytest.raises(ValueError, match="do not match"):
        place("lpt", [[1.0, 2.0]], hosts_of(1.0), [[COST]], 0)


# ---------------------------------------------------------------- from one placement to the next


def test_a_placement_that_still_fits_is_kept_and_a_drift_moves_few() -> None:
    draw, hosts = random.Random(6), hosts_of(*[1.0] * 8)
    load = loads_of(draw, 3, 48)
    costs = costs_of(load)
    first = place("lpt", load, hosts, costs, 8)
    assert first.moves_to(place("lpt", load, hosts, costs, 8, first), costs) == []
    drifted = [[rows * draw.lognormvariate(0, 0.1) for rows in row] for row in load]
    again, anew = place("lpt", drifted, hosts, costs, 8, first), place("lpt", drifted, hosts, costs, 8)
    assert step_seconds(again, drifted, hosts, costs) <= 1.05 * step_seconds(anew, drifted, hosts, costs)
    sent, all_new = (sum(move.bytes for move in first.moves_to(one, costs)) for one in (again, anew))
    assert sent < 0.25 * all_new


def test_more_hosts_take_over_from_the_old_ones() -> None:
    load = [[8.0] * 8]
    first = place("lpt", load, hosts_of(1.0, 1.0), costs_of(load), 0)
    grown = place("lpt", load, hosts_of(1.0, 1.0, 1.0, 1.0), costs_of(load), 0, first, 1)
    assert [len(grown.slots(0, host)) for host in range(4)] == [2, 2, 2, 2]
    assert len(first.moves_to(grown, costs_of(load))) == 4
    shrunk = place("lpt", load, hosts_of(1.0), costs_of(load), 0, grown, 2)
    assert shrunk.slots(0, 0) == tuple(range(8))


@pytest.mark.covers("EXP-08")
def test_a_new_expert_is_placed_on_the_host_with_the_fewest_experts_or_the_least_load() -> None:
    hosts = hosts_of(1.0, 1.0, 1.0)
    placement = place("round_robin", [[1.0] * 8], hosts, [[COST] * 8], 0)
    for number in range(9, 14):
        placement = placement.with_copies(0, number - 1, (new_expert_host(placement, 0, None, hosts),))
        counts = [len(placement.slots(0, host)) for host in range(3)]
        check_placement(placement, [number])
        assert sum(counts) == number and max(counts) - min(counts) <= 1
    # by load: host 2 has the most experts and the least to do
    skewed = Placement(0, 3, (LayerPlacement(((0,), (1,), (2,), (2,), (2,)), ((1.0,),) * 5),))
    assert new_expert_host(skewed, 0, [50.0, 40.0, 1.0, 1.0, 1.0], hosts) == 2
    assert new_expert_host(skewed, 0, None, hosts) == 0
    load = [10.0] * 8
    grown = place("round_robin", [load], hosts, [[COST] * 8], 0)
    for _ in range(5):
        grown = grown.with_copies(0, len(load), (new_expert_host(grown, 0, load, hosts),))
        load.append(10.0)
        counts = [len(grown.slots(0, host)) for host in range(3)]
        assert max(counts) - min(counts) <= 1
    fast = hosts_of(1.0, 3.0, 1.0)
    assert new_expert_host(grown, 0, load, fast) == 1


# ---------------------------------------------------------------- decisions


def decision(current: Placement, load: list[list[float]], hosts: list[HostSpec], **changes: float):
    keys = {"steps_until_next": 100, "step_s": 0.1, "bytes_per_s": 1e3} | changes
    return decide(current, load, hosts, costs_of(load), "lpt", int(keys.pop("replicas", 0)), **keys)  # type: ignore[arg-type]


def test_a_skewed_load_moves_and_an_even_one_keeps() -> None:
    hosts, load = hosts_of(1.0, 1.0), [[100.0, 1.0, 100.0, 1.0]]
    current = place("round_robin", load, hosts, costs_of(load), 0)
    costs = [[ExpertCost(16, 2, 1.0, moved_bytes=12)] * 4]
    charged = decide(current, load, hosts, costs, "lpt", 0, steps_until_next=100, step_s=0.1, bytes_per_s=1e3)
    assert charged.bytes == 12 * len(charged.moves) > 0, "gradients are not sent"
    found = decision(current, load, hosts)
    assert found.action == "move" and found.gain == pytest.approx(200 / 101, rel=1e-3)
    assert found.bytes == sum(move.bytes for move in found.moves) > 0 and found.placement.version == 1
    assert found.moves == tuple(current.moves_to(found.placement, costs_of(load)))
    assert str(found.bytes) in found.reason
    kept = decision(found.placement, load, hosts)
    assert (kept.action, kept.moves, kept.placement) == ("keep", (), found.placement) and kept.gain < MARGIN


def test_bytes_that_do_not_pay_back_are_not_moved() -> None:
    hosts, load = hosts_of(1.0, 1.0), [[100.0, 1.0, 100.0, 1.0]]
    current = place("round_robin", load, hosts, costs_of(load), 0)
    found = decision(current, load, hosts, bytes_per_s=1.0, steps_until_next=10)
    assert found.action == "keep" and found.gain > 1.9 and found.bytes > 0 and "saved" in found.reason


def test_replicas_change_without_moving_a_home_where_that_is_cheaper() -> None:
    hosts, load = hosts_of(1.0, 1.0), [[200.0, 1.0, 1.0, 1.0]]
    current = Placement(4, 2, (LayerPlacement(((0,), (1,), (0,), (1,)), ((1.0,),) * 4),))
    found = decision(current, load, hosts, replicas=1)
    assert found.action == "replicas" and found.placement.version == 5
    assert found.bytes == 0, "a replica gets its weights with every commit anyway"
    assert [move.kind for move in found.moves] == ["replica_added"] and found.moves[0].bytes == COST.replica_bytes
    homes = [found.placement.home_of(0, expert) for expert in range(4)]
    assert homes == [0, 1, 0, 1] and len(found.placement.layers[0].copies[0]) == 2


def test_changed_shares_alone_have_no_cost() -> None:
    hosts, load = hosts_of(1.0, 1.0), [[100.0, 10.0]]
    current = Placement(0, 2, (LayerPlacement(((0, 1), (1,)), ((0.9, 0.1), (1.0,))),))
    found = decision(current, load, hosts, replicas=1, bytes_per_s=1e-6)
    assert (found.action, found.moves, found.bytes) == ("shares", (), 0)
    assert found.placement.layers[0].shares[0] == pytest.approx((0.55, 0.45), abs=0.01)


def test_the_forecast_weighs_windows_by_age_and_not_by_length() -> None:
    windows = [[[10.0, 30.0]], [[300.0, 100.0]]]
    assert predict(windows)[0] == pytest.approx([400 * (NEWEST * 0.75 + (1 - NEWEST) * 0.25),
                                                 400 * (NEWEST * 0.25 + (1 - NEWEST) * 0.75)])  # fmt: skip
    assert predict([[[0.0, 0.0]]]) == [[0.0, 0.0]]
    assert predict([[[1.0, 3.0]], [[0.0, 0.0]]])[0] == pytest.approx([0.25, 0.75]), (
        "an interval without rows does not count"
    )


@pytest.mark.parametrize("policy", ["auto", "fewest"])
def test_living_experts_and_empty_slots_are_both_spread_over_the_hosts(policy: Policy) -> None:
    for hosts, living, slots in ((2, 4, 8), (3, 4, 9), (4, 3, 8)):
        rules = PlacementRules(policy, living=living)
        placement = place_first(rules, [[COST] * slots] * 2, hosts_of(*[1.0] * hosts))
        check_placement(placement, [slots] * 2)
        for layer in placement.layers:
            for number in (living, slots):
                held = [sum(copies == (host,) for copies in layer.copies[:number]) for host in range(hosts)]
                assert max(held) - min(held) <= 1, (hosts, living, slots, held)


def test_a_newcomer_goes_to_the_least_loaded_host_with_room_or_to_the_one_with_the_fewest() -> None:
    hosts = hosts_of(1.0, 1.0, 1.0)
    copies = ((0,), (1,), (2,), (2,), (0,), (1,))
    placement = Placement(1, 3, (LayerPlacement(copies, ((1.0,),) * 6),))
    costs, load = [[COST] * 6], [50.0, 40.0, 1.0, 1.0, 0.0, 0.0]

    def home(*, load: list[float] | None, living: list[int], hosts: list[HostSpec] = hosts) -> int:
        return newcomer_home(placement, 0, 4, living=living, load=load, hosts=hosts, costs=costs)

    assert home(load=load, living=[0, 1, 2, 3]) == 2
    assert home(load=None, living=[0, 1, 2, 3]) == 0, "by their number, whatever they do"
    assert home(load=None, living=[0, 2, 3]) == 1, "empty slots do not count"
    full = [replace(spec, memory_bytes=2 * COST.home_bytes) for spec in hosts]
    assert home(load=load, living=[0, 1, 2, 3], hosts=full) == 0, (
        "its slot is there already, and no other host has room"
    )
