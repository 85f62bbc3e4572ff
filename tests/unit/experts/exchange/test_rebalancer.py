"""The events of rank 0's rebalancer about a change of placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from experts.exchange.rebalancer import LEAST_BYTES, LoadInterval, LoadRebalancer
from experts.member.commit import VoteResult
from experts.placement.policy import PlacementRules
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement

HOSTS = [HostSpec(host, 1.0, None) for host in range(2)]
COSTS: Costs = [[ExpertCost(16, 8, 1.0, moved_bytes=12)] * 2]


def vote_result(placement: Placement, counts: list[float], *, sent: float = 0.0) -> VoteResult:
    """A step in which equal hosts computed in proportion to their rows, and host 0 sent `sent` bytes."""
    busy = list(placement.host_loads(0, counts, COSTS[0], HOSTS))
    return VoteResult(
        torch.tensor(1.0), torch.tensor(False), torch.tensor([*counts, 0.0], dtype=torch.float64), 1.0, 1e-3, 0,
        busy_s=busy, moving_s=[0.5 if sent else 0.0, 0.0], sent_bytes=[sent, 0.0], shortages=[0.0, 0.0],
        nonfinite=[],
    )  # fmt: skip


Row = tuple[str, dict[str, Any]]


def events(start: Placement, counts: list[float], *, replicas: int, sent: float = 0.0) -> list[Row]:
    """The events of one decision, made after step 2 and in force with step 4."""
    rebalancer = LoadRebalancer(PlacementRules("lpt", replicas, every=2), COSTS, HOSTS)
    placement = start
    for step in (1, 2):
        assert rebalancer.next_placement(step) is None
        rebalancer.committed(step, vote_result(placement, counts), placement, refused="")
    assert rebalancer._thread is not None
    rebalancer._thread.join()
    following = rebalancer.next_placement(3)
    rebalancer.committed(3, vote_result(placement, counts), placement, refused="")
    if following is not None:
        rebalancer.committed(4, vote_result(following, counts, sent=sent), following, refused="")
    return rebalancer.notices()


def test_another_division_of_the_rows_is_recorded_with_the_old_and_the_new_shares() -> None:
    start = Placement(1, 2, (LayerPlacement(((0, 1), (1,)), ((0.9, 0.1), (1.0,))),))
    (kind, decision), (done, row) = events(start, [100.0, 10.0], replicas=1)
    assert (kind, decision["value"], decision["bytes"]) == ("decision", "shares", 0)
    assert (done, row["what"], row["changes"], row["bytes"]) == ("shares", "shares", [], 0)
    ((layer, expert, old, new),) = row["shares"]
    assert (layer, expert, old) == (0, 0, {"0": 0.9, "1": 0.1})
    assert abs(new["0"] - 0.55) < 0.01 and abs(sum(new.values()) - 1) < 1e-9


def test_a_move_is_recorded_with_the_bytes_that_were_sent() -> None:
    start = Placement(1, 2, (LayerPlacement(((0,), (0,)), ((1.0,), (1.0,))),))
    (kind, decision), (done, row) = events(start, [100.0, 90.0], replicas=0, sent=14.0)
    assert (kind, decision["value"], decision["bytes"]) == ("decision", "move", 12), "predicted"
    assert (done, row["what"], row["bytes"], row["seconds"], row["shares"]) == ("move", "move", 14, 0.5, []), "measured"
    assert [change[0] for change in row["changes"]] == ["home"]


def test_after_a_refused_move_nothing_more_of_the_decision_is_announced() -> None:
    """What follows was computed from the placement that the refused instalment would have led to."""
    size = 2 * LEAST_BYTES  # each expert moves alone
    start = Placement(1, 2, (LayerPlacement(((0,),) * 4, ((1.0,),) * 4),))
    rebalancer = LoadRebalancer(PlacementRules("lpt", 0, every=1), [[ExpertCost(size, size, 1.0)] * 4], HOSTS)
    smaller = Placement(1, 2, (LayerPlacement(((0,), (0,)), ((1.0,), (1.0,))),))
    counts = torch.tensor([90.0] * 4 + [0.0], dtype=torch.float64)
    result = replace(vote_result(smaller, [180.0, 180.0]), counts=counts)

    def announced(step: int) -> Placement:
        if rebalancer._thread is not None:
            rebalancer._thread.join()
        found = rebalancer.next_placement(step)
        assert found is not None
        return found

    rebalancer.committed(1, result, start, refused="")
    first = announced(2)
    assert len(start.home_moves(first)) == 1, "the first of two"
    rebalancer.committed(2, result, start, refused="")
    rebalancer.committed(3, result, start, refused="rank 1 received data with another digest than what was sent")
    assert rebalancer.notices()[-1][0] == "move_refused"
    assert len(start.home_moves(announced(4))) == 1, "decided anew, from the placement in force"


def test_the_load_of_each_layer_is_its_own_and_leaves_out_the_drops() -> None:
    interval = LoadInterval.empty([*COSTS, [ExpertCost(16, 8, 1.0)] * 3], 2)
    one = vote_result(Placement(1, 2, (LayerPlacement(((0,), (1,)), ((1.0,), (1.0,))),)), [1.0, 2.0])
    counts = torch.tensor([1, 2, 90, 3, 4, 5, 80], dtype=torch.float64)  # two layers, each with its drops
    for _ in range(2):
        interval.add(replace(one, counts=counts))
    assert interval.load == [[2.0, 4.0], [6.0, 8.0, 10.0]] and interval.steps == 2
