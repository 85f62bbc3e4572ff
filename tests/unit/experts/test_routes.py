"""Routes: which host gets which rows, for any placement; and the vote's vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plans import check_placement

from experts.config import LayerShape
from experts.member.commit import VoteLayout, read_vote
from experts.placement.policy import first_placement
from experts.placement.values import LayerPlacement, Placement
from experts.router import LayerRoutes
from experts.transport import HEADER_SIZE, MAGIC, Header, HeaderMismatch, Op, read_headers


def drawn(seed: int, *, experts: int, hosts: int) -> Placement:
    draw = np.random.default_rng(seed)
    copies = []
    for _ in range(experts):
        number = int(draw.integers(1, min(3, hosts) + 1))
        copies.append(tuple(int(host) for host in draw.choice(hosts, size=number, replace=False)))
    shares = tuple(tuple(float(x) for x in draw.dirichlet(np.ones(len(held)))) for held in copies)
    return Placement(version=1, num_hosts=hosts, layers=(LayerPlacement(tuple(copies), shares),))


@pytest.mark.parametrize("seed", range(20))
def test_every_row_travels_once_to_a_copy_of_its_expert(seed: int) -> None:
    placement = drawn(seed, experts=7, hosts=4)
    routes = LayerRoutes.of(placement, 0)
    counts = [int(n) for n in np.random.default_rng(seed + 100).integers(0, 9, size=7)]
    route = routes.route(counts)
    rows = [expert for expert, count in enumerate(counts) for _ in range(count)]
    travelling = rows if route.segments is None else [r for begin, end in route.segments for r in range(begin, end)]
    if route.segments is not None:
        assert sorted(travelling) == list(range(len(rows)))
        travelling = [rows[place] for place in travelling]
    assert [sum(slots) for slots in route.slot_counts] == route.host_counts and sum(route.host_counts) == len(rows)
    arrived = iter(travelling)
    for held, numbers in zip(routes.slots, route.slot_counts, strict=True):
        for (expert, _copy), number in zip(held, numbers, strict=True):
            assert [next(arrived) for _ in range(number)] == [expert] * number
    assert next(arrived, None) is None


@pytest.mark.parametrize("hosts", [1, 2, 3, 5])
def test_rows_keep_their_order_under_the_placement_a_run_begins_with(hosts: int) -> None:
    placement = first_placement([5, 4], hosts=hosts)
    check_placement(placement, [5, 4])
    for layer in (0, 1):
        assert LayerRoutes.of(placement, layer).in_order
        held = [len(placement.slots(layer, host)) for host in range(hosts)]
        assert max(held) - min(held) <= 1


def test_homes_come_before_replicas_on_a_host() -> None:
    placement = Placement(1, 2, (LayerPlacement(((1, 0), (0,), (1,)), ((0.5, 0.5), (1.0,), (1.0,))),))
    routes = LayerRoutes.of(placement, 0)
    assert routes.slots == (((1, 0), (0, 1)), ((0, 0), (2, 0))) and routes.homes == (1, 2)
    assert not routes.in_order


def test_headers_that_differ_are_named() -> None:
    header = Header(generation=3, version=1, step=7, op=Op.FORWARD, layer=2, micro_batch=1, dtype=0, width=64)
    same = [[*header.encode(), 4, 5], [*header.encode(), 0, 9]]
    assert read_headers(same, generation=3, version=1, workers=[0, 1]) == header
    other = Header(generation=3, version=1, step=7, op=Op.VOTE, layer=2, micro_batch=1, dtype=0, width=64)
    with pytest.raises(HeaderMismatch, match=r"worker 0 and worker 1 are in different operations: op 3 and 8"):
        read_headers([same[0], [*other.encode(), 0, 0]], generation=3, version=1, workers=[0, 1])
    with pytest.raises(HeaderMismatch, match="generation 3 instead of 4"):
        read_headers(same, generation=4, version=1, workers=[0, 1])
    with pytest.raises(HeaderMismatch, match="magic"):
        read_headers([[MAGIC + 1, *same[0][1:]]], generation=3, version=1, workers=[0])
    assert len(header.encode()) == HEADER_SIZE


SHAPES = [LayerShape(4, (8, 8), "gelu"), LayerShape(4, (8, 8, 8), "gelu")]


def test_the_vote_adds_each_expert_once_and_undoes_the_loss_scale() -> None:
    layout = VoteLayout.of(SHAPES, holders=2)
    members = [layout.empty(5) for _ in range(3)]
    members[0][1], members[0][3], members[0][4] = 16.0, 0.5, 1e-3  # trunk, inverse scale, learning rate
    members[0][layout.counts] = torch.arange(7, dtype=torch.float64)
    layout.put_squares(members[1], {(0, 0): 4.0, (1, 2): 8.0})
    layout.put_squares(members[2], {(0, 1): 12.0, (1, 0): 0.0, (1, 1): 12.0})
    agreed = read_vote(layout, torch.stack(members).sum(0), step=5, members=3)
    assert float(agreed.norm) == 5.0 and not bool(agreed.skip) and agreed.counts.tolist() == list(range(7))
    commit = agreed.commit(2.5)
    assert commit.coefficient == pytest.approx(0.5, rel=1e-6) and (commit.inverse_scale, commit.lr) == (0.5, 1e-3)
    assert agreed.commit(None).coefficient == 1.0


@pytest.mark.parametrize("bad", ["flag", "square"])
def test_all_workers_skip_a_step_that_is_not_finite_on_one(bad: str) -> None:
    layout = VoteLayout.of(SHAPES, holders=2)
    vector = layout.empty(1)
    vector[3] = 1.0
    if bad == "flag":
        vector[2] = 1.0
    else:
        layout.put_squares(vector, {(1, 1): float("inf")})
    assert bool(read_vote(layout, vector, step=1, members=1).skip)


def test_members_on_different_steps_are_found() -> None:
    layout = VoteLayout.of(SHAPES, holders=2)
    with pytest.raises(HeaderMismatch, match="voted on step 4"):
        read_vote(layout, layout.empty(4) + layout.empty(5), step=4, members=2)
