"""Micro-batches by tokens: within the budget, every row once, less padding than by rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from lab import GPT, Rows, make_session, token_rows

from raytrain.autotune.step_probe import StepProbe
from raytrain.data.rows.batches import Cursor, StepBatches, check_budget, cut_by_tokens, padding_waste
from raytrain.data.sources.in_memory import object_split
from raytrain.errors import InputError
from raytrain.train.loader import BatchLoader
from raytrain.train.memory.device import Shortage, StepDropped
from raytrain.train.memory.retry import MicroBatchSize, ShortageRetry
from raytrain.train.parallel.collectives import Workers

LENGTHS = np.random.default_rng(5).integers(1, 65, size=300)


@pytest.mark.parametrize("most", [3, 1000])
def test_no_micro_batch_is_padded_beyond_the_budget_and_every_row_is_in_one(most: int) -> None:
    parts = cut_by_tokens(LENGTHS, budget=256, most_rows=most)
    assert sorted(np.concatenate(parts)) == list(range(300))
    assert all(len(part) * LENGTHS[part].max() <= 256 and len(part) <= most for part in parts)
    assert all(len(a) + 1 > most or (len(a) + 1) * LENGTHS[b[0]] > 256 for a, b in pairwise(parts))
    assert [len(part) for part in cut_by_tokens(np.array([9, 70, 8]), budget=64, most_rows=9)] == [2, 1]
    assert cut_by_tokens(np.empty(0, np.int64), budget=64, most_rows=9) == []


@pytest.mark.covers("FUT-07")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_share_a_window_by_tokens_and_its_divisor_stays_exact(world_size: int) -> None:
    rows = {
        "input_ids": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
        "labels": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
    }
    split = object_split(rows, key="data.train")
    feeds = []
    for rank in range(world_size):
        batches = StepBatches(
            split, seed=1, global_batch_size=64, micro_batch=64, rank=rank, world_size=world_size, tokens_per_batch=512
        )
        feeds.append(BatchLoader(batches, device=torch.device("cpu"), weight=None, dtype=torch.float32))
    indices = feeds[0].global_batch(Cursor()).indices
    shares = [list(loader.micro_batches(indices)) for loader in feeds]
    sizes = [micro.batch["input_ids"].numel() for share in shares for micro in share]
    assert max(sizes) <= 512 and max(len(share) for share in shares) == feeds[0].passes(indices)
    weights = sum(micro.weight for share in shares for micro in share)
    assert weights == feeds[0].global_weight(indices) == int(LENGTHS[indices].sum()), "tokens that count, not padding"
    windows = [LENGTHS[feeds[0].batches.global_batch(Cursor(0, at)).indices] for at in range(0, 256, 64)]
    waste = padding_waste(windows, budget=512, most_rows=64, fixed_rows=16)
    assert 0 < waste.budget < 0.2 < waste.fixed, "a third of a batch by rows is padding, a tenth of one by tokens"
    scored = [micro for loader in feeds for micro in loader.eval_batches(split, limit=None)]
    assert sum(micro.weight for micro in scored) == LENGTHS.sum()
    assert all(micro.batch["input_ids"].numel() <= 4 * 512 for micro in scored)
    assert max(sum(1 for _ in loader.eval_batches(split, limit=None)) for loader in feeds) == feeds[0].eval_passes(
        split, limit=None
    )


def test_rows_without_known_tokens_and_rows_beyond_the_budget_are_refused() -> None:
    plain = object_split({"x": torch.zeros(4, 2)}, key="data.train")
    unknown = r"data\.tokens_per_batch: got 8 tokens, and train rows whose tokens are not known"
    with pytest.raises(InputError, match=unknown):
        check_budget(plain, None, 8)
    long = object_split({"input_ids": [torch.zeros(3), torch.zeros(12)]}, key="data.train")
    with pytest.raises(InputError, match="expected at least 12, the tokens of row 1, the longest"):
        check_budget(long, None, 8)
    items = object_split([{"input_ids": torch.zeros(3)}], key="data.eval")
    with pytest.raises(InputError, match="got 12 tokens, and eval rows whose tokens are not known"):
        check_budget(long, items, 12)
    check_budget(long, long, 12)
    check_budget(plain, items, None)


def test_where_memory_runs_out_long_rows_are_fewer_too() -> None:
    """Of rows of twelve tokens the budget decides how many are together, not the number of rows."""
    data = {"train": token_rows(64), "eval_fraction": 0.0, "tokens_per_batch": 48}
    session = make_session(GPT, data, loop={"micro_batch_size": 16})
    memory = ShortageRetry(session.step, session.loader, sizing=MicroBatchSize(16, grow_after=1), reporter=Rows())
    indices, sizes = session.loader.global_batch(Cursor()).indices, []

    def work() -> None:
        sizes.append(max(len(micro.batch["input_ids"]) for micro in session.loader.micro_batches(indices)))
        if sizes[-1] > 1:
            raise StepDropped([Shortage("rank 0", "no memory")])

    memory.run(work, step=1)
    assert sizes == [4, 2, 1]
    memory.after_step(1)
    memory.after_step(2)
    with pytest.raises(StepDropped):
        work()
    assert sizes[-1] == 4, "grown back"
    again = session.settings.reduced_to(4)  # a restart after an out-of-memory
    assert (session.settings.tokens_per_batch, again.tokens_per_batch) == (48, 12)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_probe_computes_no_more_than_the_budget_and_as_often_on_every_worker(world_size: int) -> None:
    lengths = [*[12] * 2, *LENGTHS[:62] % 7 + 1]
    table = pa.table({name: [list(range(n)) for n in lengths] for name in ("input_ids", "labels")})
    data = {"train": table, "eval": table, "tokens_per_batch": 24}
    session = make_session(GPT, data, loop={"micro_batch_size": 16})
    loader, split = session.loader, session.loader.batches.split
    session.source = replace(session.source, eval=split)
    workers = [Workers.__new__(Workers) for _ in range(world_size)]
    for rank, one in enumerate(workers):
        one.world_size, one.rank = world_size, rank
    choices = []
    for session.workers in workers:
        choices.append(StepProbe(session))
    for longest in (True, False):
        taken = [choice.rows(16, passes=2, longest=longest) for choice in choices]
        tokens = [[loader.one(rows).batch["input_ids"].numel() for rows in own] for own in taken]
        assert len({len(own) for own in tokens}) == 1 and max(map(max, tokens)) <= 24
        assert all(24 in own for own in tokens) or not longest, "two rows of the longest"
    drawn = np.concatenate([rows for own in taken for rows in own])
    assert set(drawn.tolist()) == set(loader.batches.rows_from(Cursor(), 32 * world_size).tolist())
    assert len(choices[0].longest_first(split, split.eval_order()[:64], times=4)) == 8
    assert loader.first(split.eval_order()).batch["input_ids"].shape == (2, 12)
