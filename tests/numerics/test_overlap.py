"""`scale.overlap` changes when sums begin and nothing else: every number is the same to the last bit."""

from __future__ import annotations

from typing import Any

import overlaps
import pytest
from gang import run_gang
from overlaps import MOE_CASE, STEPS, TWICE_CASE

SHARES = {"micro_batch": 2, "rows": [2, 2, 2], "pass_s": [0.1, 0.2, 0.4]}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "one pass a step": {"loop": {"micro_batch_size": 16}},
    "unequal shares": {"shares": SHARES},
    "experts in every worker": MOE_CASE,
    "frozen, tied, unused": {"model": {"builder": "sharded:odd"}},
    "recomputed": {"loop": {"activation_checkpointing": True}},
    "in two parts": TWICE_CASE,
    "fp16": {"precision": "fp16"},
    "one bucket": {"bucket": 1 << 30},
}


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    """Of three workers, whose sums show in their last bits in which order they were made."""
    return run_gang(overlaps.both, CASES, world_size=3)


@pytest.mark.parametrize("name", CASES)
def test_overlap_changes_only_when_reductions_start(three: list[dict[str, Any]], name: str) -> None:
    for rank in three:
        plain, made = rank[name]["without"], rank[name]["with"]
        for what in ("losses", "norms", "scales", "skipped", "digest"):
            assert made[what] == plain[what], what
        assert len(made["losses"]) == STEPS and not plain["overlaps"] and sum(plain["inside"]) == 0
        assert set(made["skipped"]) == {0} and made["outcome"] == "done"
        assert made["overlaps"] == (name != "one bucket")
        assert made["order"] == three[0][name]["with"]["order"], "every worker begins the same buckets in one order"
        every = sorted(made["order"][0])
        assert all(sorted(order) == every and order[-1] == 0 for order in made["order"])
        assert len({tuple(order) for order in made["order"][1:]}) == 1
        assert made["inside"][0] == 0, "the first step shows the order"


def test_all_buckets_but_the_first_begin_inside_the_last_backward(three: list[dict[str, Any]]) -> None:
    for rank in three:
        count = len(rank["gpt"]["with"]["order"][0])
        assert count > 10 and set(rank["gpt"]["with"]["inside"][1:]) == {count - 1}
        odd = rank["frozen, tied, unused"]["with"]
        assert set(odd["inside"][1:]) == {len(odd["order"][0]) - 2}, "the one with the unused parameter waits"
        parts = rank["in two parts"]["with"]
        assert 0 < parts["inside"][1] < len(parts["order"][0]) - 1


def test_workers_without_passes_start_the_same_reductions(three: list[dict[str, Any]]) -> None:
    """Unequal shares: the last window of an epoch has 6 rows, none of which is the slowest worker's."""
    inside = [rank["unequal shares"]["with"]["inside"] for rank in three]
    assert inside[0][3] > 0 and inside[2][3] == 0 and inside[2][2] > 0


PLANTED = [(2, 1, 0, "backward"), (4, 0, 1, "forward"), (6, 0, 0, "backward"), (9, 3, 1, "backward")]


def test_a_shortage_on_one_worker_drops_the_step_of_all_with_sums_on_their_way() -> None:
    ranks = run_gang(overlaps.short, PLANTED, world_size=2)
    for rank in ranks:
        assert rank["with"]["digest"] == rank["without"]["digest"]
        assert rank["with"]["losses"] == rank["without"]["losses"] and len(rank["with"]["losses"]) == STEPS
        assert rank["at the end"]["model"] == ranks[0]["at the end"]["model"]
        assert rank["at the end"]["losses"][:2] == rank["with"]["losses"][:2]
        assert rank["at the end"]["outcome"] == "done"
    assert sorted(place for rank in ranks for place in rank["with"]["met"]) == PLANTED
    assert ranks[1]["at the end"]["met"] > 0, "buckets were on their way when memory ran out"
    (event,) = ranks[0]["at the end"]["events"]
    assert event["step"] == 3 and event["who"] == ["rank 1"]


def test_an_exception_inside_a_backward_ends_everybody() -> None:
    assert run_gang(overlaps.broken, world_size=2, timeout=40.0) == ["CollectiveFailed", "ValueError"]


def test_a_session_prepared_again_keeps_overlap_and_collectives_inside_backward_exclude_it() -> None:
    for rank in run_gang(overlaps.kept, world_size=2):
        assert rank == {"again": True, "batch norm": False}
