"""What a sleep cycle measures of the experts of a layer, from the rows that it replays: pure functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def output_similarity(outputs_ERD: Tensor) -> Tensor:
    """Cosine of the outputs of each pair of experts on the same rows, (E, E); weights are not compared, since experts
    with permuted hidden units compute the same.

    Args:
        outputs_ERD: of each expert on each row.

    Example:
        >>> import torch
        >>> from experts.lifecycle.measures import output_similarity
        >>> outputs = torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[0.0, 1.0]]])  # 3 experts, 1 row
        >>> output_similarity(outputs)[0].tolist()
        [1.0, 1.0, 0.0]
    """
    flat = outputs_ERD.double().flatten(1)
    norms = flat.norm(dim=1).clamp(min=1e-300)
    return (flat @ flat.T) / (norms[:, None] * norms[None, :])


def coactivation(chosen_TK: Tensor, experts: int) -> Tensor:
    """For each pair of experts the rows that both answered over those that either did, (E, E), from 0 to 1; with one
    choice per row all pairs are 0."""
    chose_TE = torch.zeros(len(chosen_TK), experts, dtype=torch.float64)
    chose_TE.scatter_(1, chosen_TK.cpu(), 1.0)
    both_EE = chose_TE.T @ chose_TE
    alone_E = both_EE.diagonal().clone()
    return both_EE / (alone_E[:, None] + alone_E[None, :] - both_EE).clamp(min=1)


def shared_rows(scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """How much two experts compete for the same rows, (E, E), from 0 to 1: of the router's mass on the rows that either
    answered first, the share that both have in common, min over max. 1: the router cannot tell them apart."""
    scores = scores_TE.detach().double().cpu()
    first_T = chosen_TK[:, 0].cpu()
    E = scores.shape[1]
    overlap = torch.eye(E, dtype=torch.float64)
    for one in range(E):
        for other in range(one + 1, E):
            rows = (first_T == one) | (first_T == other)
            a, b = scores[rows, one], scores[rows, other]
            both = torch.minimum(a, b).sum() / torch.maximum(a, b).sum().clamp(min=1e-300)
            overlap[one, other] = overlap[other, one] = both if bool(rows.any()) else 0.0
    return overlap


def clusters(rows_RD: Tensor, number: int, *, seed: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """k-means with k-means++'s first centres: (centres (C, D), cluster of each row (R,)). Fewer clusters than asked
    for where there are not as many distinct rows; none is empty."""
    rows = rows_RD.detach().double().cpu()
    draw = torch.Generator().manual_seed(seed)
    centres = rows[torch.randint(len(rows), (1,), generator=draw)]
    while len(centres) < number:
        nearest = torch.cdist(rows, centres).square().amin(1)
        if float(nearest.sum()) <= 1e-24 * len(rows):
            break
        centres = torch.cat([centres, rows[torch.multinomial(nearest, 1, generator=draw)]])
    belongs = torch.cdist(rows, centres).argmin(1)
    for _ in range(rounds):
        sums = torch.zeros_like(centres).index_add_(0, belongs, rows)
        counts = torch.bincount(belongs, minlength=len(centres))
        centres = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centres)
        before, belongs = belongs, torch.cdist(rows, centres).argmin(1)
        if torch.equal(before, belongs):
            break
    used = torch.bincount(belongs, minlength=len(centres)) > 0
    return centres[used], (used.cumsum(0) - 1)[belongs]


def specialisation(chosen_T: Tensor, group_T: Tensor, experts: int) -> Tensor:
    """How narrow the rows of each expert are, (E,), from 0 (its rows are of all groups as all rows are) to 1 (all of
    one group): the divergence of its groups from those of all rows, over the largest that this can be.

    Args:
        chosen_T: the first choice of each row. group_T: its cluster or class.
    """
    groups = int(group_T.max()) + 1 if len(group_T) else 1
    counts = torch.zeros(experts, groups, dtype=torch.float64)
    counts.index_put_((chosen_T.cpu(), group_T.cpu()), torch.ones(len(group_T), dtype=torch.float64), accumulate=True)
    overall = counts.sum(0) / counts.sum().clamp(min=1)
    own = counts / counts.sum(1, keepdim=True).clamp(min=1)
    ratio = torch.where(own > 0, own / overall.clamp(min=1e-300), 1.0)
    most = -torch.log(overall[overall > 0].amin()) if groups > 1 else torch.tensor(1.0, dtype=torch.float64)
    return ((own * ratio.log()).sum(1) / most.clamp(min=1e-12)).clamp(0, 1)
