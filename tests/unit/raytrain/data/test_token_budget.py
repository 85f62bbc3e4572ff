"""Micro-batches by tokens: within the budget, every row once, less padding than by rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from raytrain.data.batches import Cursor, StepBatches
from raytrain.data.memory import object_split
from raytrain.data.token_budget import check_budget, cut_by_tokens, waste_of
from raytrain.errors import InputError
from raytrain.feed import Feed

LENGTHS = np.random.default_rng(5).integers(1, 65, size=300)


@pytest.mark.parametrize("most", [3, 1000])
def test_no_micro_batch_is_padded_beyond_the_budget_and_every_row_is_in_one(most: int) -> None:
    parts = cut_by_tokens(LENGTHS, budget=256, most_rows=most)
    assert sorted(np.concatenate(parts)) == list(range(300))
    assert all(len(part) * LENGTHS[part].max() <= 256 and len(part) <= most for part in parts)
    assert all(len(a) + 1 > most or (len(a) + 1) * LENGTHS[b[0]] > 256 for a, b in pairwise(parts))
    assert [len(part) for part in cut_by_tokens(np.array([9, 70, 8]), budget=64, most_rows=9)] == [2, 1]
    assert cut_by_tokens(np.empty(0, np.int64), budget=64, most_rows=9) == []


@pytest.mark.covers("DATA-21", "FUT-07")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_ranks_share_a_window_by_tokens_and_its_divisor_stays_exact(world: int) -> None:
    rows = {
        "input_ids": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
        "labels": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
    }
    split = object_split(rows, key="data.train")
    feeds = []
    for rank in range(world):
        batches = StepBatches(
            split, seed=1, global_batch=64, micro_batch=64, rank=rank, world=world, tokens_per_batch=512
        )
        feeds.append(Feed(batches, device=torch.device("cpu"), weight=None, dtype=torch.float32))
    handles = feeds[0].window(Cursor()).handles
    shares = [list(feed.micro_batches(handles)) for feed in feeds]
    sizes = [micro.batch["input_ids"].numel() for share in shares for micro in share]
    assert max(sizes) <= 512 and max(len(share) for share in shares) == feeds[0].passes(handles)
    weights = sum(micro.weight for share in shares for micro in share)
    assert weights == feeds[0].global_weight(handles) == int(LENGTHS[handles].sum()), "tokens that count, not padding"
    windows = [LENGTHS[feeds[0].batches.window(Cursor(0, at)).handles] for at in range(0, 256, 64)]
    waste = waste_of(windows, budget=512, most_rows=64, fixed_rows=16)
    assert 0 < waste.budget < 0.2 < waste.fixed, "a third of a batch by rows is padding, a tenth of one by tokens"
    scored = [micro for feed in feeds for micro in feed.eval_batches(split, limit=None)]
    assert sum(micro.weight for micro in scored) == LENGTHS.sum()
    assert all(micro.batch["input_ids"].numel() <= 4 * 512 for micro in scored)
    assert max(sum(1 for _ in feed.eval_batches(split, limit=None)) for feed in feeds) == feeds[0].eval_passes(
        split, limit=None
    )


def test_rows_without_known_tokens_and_rows_beyond_the_budget_are_refused() -> None:
    plain = object_split({"x": torch.zeros(4, 2)}, key="data.train")
    unknown = r"data\.tokens_per_batch: seen 8 tokens, and train rows whose tokens are not known"
    with pytest.raises(InputError, match=unknown):
        check_budget(plain, None, 8)
    long = object_split({"input_ids": [torch.zeros(3), torch.zeros(12)]}, key="data.train")
    with pytest.raises(InputError, match="expected at least 12, the tokens of row 1, the longest"):
        check_budget(long, None, 8)
    items = object_split([{"input_ids": torch.zeros(3)}], key="data.eval")
    with pytest.raises(InputError, match="seen 12 tokens, and eval rows whose tokens are not known"):
        check_budget(long, items, 12)
    check_budget(long, long, 12)
    check_budget(plain, items, None)
