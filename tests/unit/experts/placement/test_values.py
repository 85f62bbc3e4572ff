"""Placements as values: slots, validation, moves, and the split of rows."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from plans import check_placement

from experts.placement.values import ExpertCost, HostSpec, LayerPlacement, Move, Placement, divide, reshare, split_rows

COST = ExpertCost(home_bytes=16, replica_bytes=2, work=1.0)


def sample() -> Placement:
    """Two layers on three hosts: layer 0 with replicas, layer 1 without."""
    first = LayerPlacement(((0, 2), (1,), (2, 0, 1)), ((0.25, 0.75), (1.0,), (0.0, 0.5, 0.5)))
    return Placement(3, 3, (first, LayerPlacement(((1,), (0,)), ((1.0,), (1.0,)))))


def test_slots_homes_and_bytes_follow_from_the_copies() -> None:
    placement = sample()
    assert [placement.slots(0, host) for host in range(3)] == [(0, 2), (1, 2), (0, 2)]
    assert placement.slots(1, 2) == () and placement.home_of(0, 2) == 2
    costs = [[ExpertCost(100, 10, 1.0), ExpertCost(200, 20, 1.0), ExpertCost(400, 40, 1.0)], [COST, COST]]
    assert [placement.bytes_on(host, costs) for host in range(3)] == [100 + 40 + 16, 200 + 40 + 16, 10 + 400]
    hosts = [HostSpec(0, 1.0, None), HostSpec(1, 2.0, None), HostSpec(2, 4.0, None)]
    heavy = [ExpertCost(0, 0, 2.0), ExpertCost(0, 0, 1.0), ExpertCost(0, 0, 1.0)]
    assert placement.host_loads(0, [8, 6, 4], heavy, hosts) == (4.0 + 2.0, (6.0 + 2.0) / 2, 12.0 / 4)


def test_json_gives_back_the_same_placement() -> None:
    placement = sample()
    third = LayerPlacement(((0, 1, 2),), ((1 / 3, 1 / 7, 1 - 1 / 3 - 1 / 7),))
    for one in (placement, Placement(1, 3, (third,))):
        assert Placement.from_json(json.loads(json.dumps(one.to_json()))) == one


def layer(*copies: tuple[int, ...]) -> LayerPlacement:
    """Equal shares."""
    return LayerPlacement(copies, tuple((1 / len(hosts),) * len(hosts) if hosts else () for hosts in copies))


def test_moves_list_sent_experts_and_experts_that_only_change_their_role() -> None:
    old = Placement(0, 4, (layer((0,), (1, 2), (1,), (3, 0), (2,)),))
    new = Placement(1, 4, (layer((3,), (2, 1), (1, 3), (3,), (2,)),))
    assert old.moves_to(new, [[COST] * 5]) == [
        Move(0, 0, "home", 0, 3, 16),
        Move(0, 1, "home", 1, 2, 16),
        Move(0, 1, "replica_added", 1, 1, 0),
        Move(0, 2, "replica_added", 1, 3, 2),
        Move(0, 3, "replica_dropped", 0, 0, 0),
    ]
    assert old.moves_to(old, [[COST] * 5]) == []


def test_moves_lead_from_any_placement_to_any_other() -> None:
    draw = random.Random(3)
    for _ in range(50):
        some = [
            Placement(0, 5, (layer(*(tuple(draw.sample(range(5), draw.randint(1, 4))) for _ in range(6))),))
            for _ in range(2)
        ]
        homes = [some[0].home_of(0, expert) for expert in range(6)]
        held = [set(hosts) for hosts in some[0].layers[0].copies]
        for move in some[0].moves_to(some[1], [[COST] * 6]):
            assert move.bytes == 0 or move.source in some[0].layers[0].copies[move.expert], "the source holds it"
            if move.kind == "home":
                held[move.expert].discard(move.source)
                homes[move.expert] = move.target
            (held[move.expert].discard if move.kind == "replica_dropped" else held[move.expert].add)(move.target)
        assert homes == [some[1].home_of(0, expert) for expert in range(6)]
        assert held == [set(hosts) for hosts in some[1].layers[0].copies]


# ---------------------------------------------------------------- rows and shares


def test_rows_are_split_exactly_and_the_same_every_time() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shares = []
        for _ in range(draw.randint(1, 9)):
            raw = [draw.choice([0.0, 1e-12, draw.random()]) for _ in range(draw.randint(1, 5))]
            raw[draw.randrange(len(raw))] += 0.1
            shares.append([part / sum(raw) for part in raw])
        counts = [draw.choice([0, 1, 2, 7, draw.randrange(1_000_000)]) for _ in shares]
        rows = split_rows(counts, shares)
        assert rows == split_rows(counts, shares) and len(rows) == len(counts)
        for count, parts, mine in zip(counts, shares, rows, strict=True):
            assert sum(mine) == count and min(mine) >= 0 and all(isinstance(one, int) for one in mine)
            for part, one in zip(parts, mine, strict=True):
                assert abs(one - part * count) <= 1 + 1e-6


def test_rows_of_single_copies_pass_and_empty_shares_get_nothing() -> None:
    assert split_rows([3, 0, 5], [(1.0,), (1.0,), (1.0,)]) == [(3,), (0,), (5,)]
    assert split_rows([10, 4], [(0.0, 1.0), (1.0,)]) == [(0, 10), (4,)]
    assert split_rows([10], [(0.25, 0.0, 0.75)]) == [(3, 0, 7)] and split_rows([], []) == []
    assert split_rows([8, 5, 3], sample().layers[0].shares)[0] == (2, 6)


def least_level(work: list[float], copies: list[tuple[int, ...]], speeds: list[float]) -> float:
    """Brute force over all sets of hosts: work that can go nowhere else, over the speed of the set."""
    worst = 0.0
    for mask in range(1, 1 << len(speeds)):
        inside = sum(w for w, hosts in zip(work, copies, strict=True) if all(mask >> host & 1 for host in hosts))
        worst = max(worst, inside / sum(speed for host, speed in enumerate(speeds) if mask >> host & 1))
    return worst


def test_shares_reach_the_least_possible_level_of_the_slowest_host() -> None:
    draw = random.Random(1)
    for _ in range(200):
        number = draw.randint(2, 6)
        speeds = [draw.choice([1.0, 2.0, 4.0, 0.3]) for _ in range(number)]
        copies = [tuple(draw.sample(range(number), draw.randint(1, min(3, number)))) for _ in range(draw.randint(1, 9))]
        work = [draw.choice([0.0, draw.random(), draw.lognormvariate(0, 2)]) for _ in copies]
        least = least_level(work, copies, speeds)
        assert divide(work, copies, speeds).level == pytest.approx(least, rel=1e-7, abs=1e-12)
        assert divide(work, copies, speeds, slack=0.05).level <= 1.05 * least * (1 + 1e-7) + 1e-12
        costs = [ExpertCost(0, 0, 1.0)] * len(copies)
        start = LayerPlacement(tuple(copies), tuple((1 / len(hosts),) * len(hosts) for hosts in copies))
        shared = reshare(start, work, costs, speeds)
        check_placement(Placement(0, number, (shared,)), [len(copies)])
        assert max(shared.loads(work, costs, speeds)) == pytest.approx(least, rel=1e-7, abs=1e-12)


def test_a_long_chain_of_shared_experts_evens_out() -> None:
    """All work is at one end; every host along the chain must pass the rest on."""
    number = 40
    copies = [(0,), *((host, host + 1) for host in range(number - 1))]
    work = [1.0, *(2.0 for _ in range(number - 1))]
    assert divide(work, copies, [1.0] * number).level == pytest.approx(sum(work) / number, rel=1e-7)


def test_placing_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, experts.placement.rebalance, experts.placement.policy, experts.placement.values\n"
        "print([name for name in ('torch', 'ray', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_work_of_very_different_sizes_is_all_there() -> None:
    draw = random.Random(9)
    for _ in range(300):
        number = draw.randint(2, 12)
        speeds = [10 ** draw.uniform(-3, 3) for _ in range(number)]
        copies = [tuple(draw.sample(range(number), draw.randint(1, number))) for _ in range(draw.randint(1, 30))]
        work = [draw.choice([0.0, 10 ** draw.uniform(-12, 12)]) for _ in copies]
        found = divide(work, copies, speeds, slack=draw.choice([0.0, 0.005]))
        assert sum(found.loads) == pytest.approx(sum(work), rel=1e-6)
        assert all(min(parts) >= 0 for parts in found.parts.values())
