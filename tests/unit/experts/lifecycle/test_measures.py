"""What a sleep cycle measures: similarity of outputs, overlap, clusters, specialisation."""

from __future__ import annotations

import pytest
import torch

from experts.grouped import GroupedExperts, run_expert
from experts.lifecycle.measures import clusters, coactivation, output_similarity, shared_rows, specialisation


@pytest.mark.covers("SLP-06")
@pytest.mark.parametrize(("width", "hidden"), [(6, 10), (16, 7)])
def test_a_twin_with_permuted_hidden_units_is_found_and_strangers_are_not(width: int, hidden: int) -> None:
    torch.manual_seed(1)
    experts = GroupedExperts(4, width, hidden).double()
    with torch.no_grad():
        experts.w1.normal_()
        experts.w2.normal_()
        order = torch.randperm(hidden)
        experts.w1[2], experts.w2[2] = experts.w1[0][order], experts.w2[0][:, order]
    rows = torch.randn(200, width, dtype=torch.float64)
    outputs = torch.stack([run_expert(rows, experts.weights_of(e), "gelu") for e in range(4)])
    found = output_similarity(outputs)
    raw = torch.nn.functional.cosine_similarity(experts.w1[0].flatten(), experts.w1[2].flatten(), dim=0)
    assert raw.abs() < 0.6, "the weights themselves do not look alike"
    assert found[0, 2] == pytest.approx(1.0, abs=1e-12)
    assert torch.equal(found, found.T)
    strangers = found[~torch.eye(4, dtype=torch.bool)].view(4, 3)
    assert (strangers.sort().values[:, :-1].abs() < 0.8).all(), found


@pytest.mark.covers("SLP-09")
def test_coactivation_and_shared_rows_are_those_counted_by_hand() -> None:
    chosen = torch.tensor([[0, 1], [0, 1], [1, 2], [2, 3]])
    found = coactivation(chosen, 5)
    assert found[0, 1] == pytest.approx(2 / 3)
    assert found[1, 2] == pytest.approx(1 / 4)
    assert found[2, 3] == pytest.approx(1 / 2)
    assert found[0, 3] == found[4, 0] == found[4, 4] == 0
    scores = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0], [0.0, 0.1, 0.9]])
    overlap = shared_rows(scores, scores.topk(1).indices)
    assert overlap[0, 1] == pytest.approx((0.3 + 0.5) / (0.6 + 0.5))
    assert overlap[0, 2] == pytest.approx(0.1 / (0.6 + 0.5 + 0.9))
    assert torch.equal(overlap, overlap.T)


@pytest.mark.covers("KG-04")
@pytest.mark.parametrize("number", [2, 5])
def test_clusters_find_planted_groups_and_none_is_empty(number: int) -> None:
    draw = torch.Generator().manual_seed(2)
    planted = torch.arange(300) % number
    centres = 20 * torch.randn(number, 8, generator=draw)
    rows = centres[planted] + torch.randn(300, 8, generator=draw)
    found, belongs = clusters(rows, number, seed=4)
    assert len(found) == number
    assert all(len(belongs[planted == group].unique()) == 1 for group in range(number))
    again = clusters(rows, number, seed=4)
    assert torch.equal(found, again[0])
    few, belongs = clusters(rows[:3].repeat(10, 1), 6, seed=0)
    assert len(few) == 3
    assert sorted(belongs.unique().tolist()) == [0, 1, 2]


@pytest.mark.covers("SLP-11")
def test_specialisation_is_0_for_a_generalist_and_1_for_an_expert_of_one_group() -> None:
    group = torch.arange(400) % 4
    chosen = torch.where(group == 0, 0, torch.where(torch.arange(400) // 4 % 2 == 0, 1, 2))
    found = specialisation(chosen, group, 4)
    assert found[0] == pytest.approx(1.0)
    assert found[1] == found[2] == pytest.approx(torch.tensor(4 / 3).log().div(torch.tensor(4.0).log()).item())
    assert found[3] == 0  # without rows
    everything = specialisation(torch.arange(400) // 4 % 2, group, 2)
    assert everything.tolist() == pytest.approx([0.0, 0.0])
