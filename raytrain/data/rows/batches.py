"""Which rows each step and each rank gets: pure functions of (seed, epoch, position), also by a budget of tokens.

The loader asks for the indices of a step; a resumed run asks for those that follow its cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raytrain.data.rows.contract import Order, Split
from raytrain.errors import InputError
from raytrain.plan.shares import Shares

# ---------------------------------------------------------------- token budget
# Form micro-batches by a token budget: sort a global batch's rows by length and limit tokens including padding.


def cut_by_tokens(lengths: np.ndarray, *, budget: int, most_rows: int) -> list[np.ndarray]:
    """Return the positions of the rows of each micro-batch, shortest rows first.

    The number of rows times the longest row is at most `budget`; a row longer than that is a micro-batch by itself.
    A pure function with the same result on every worker. `lengths`: tokens of each row. `most_rows`: maximum rows of
    one micro-batch."""
    order = np.argsort(lengths, kind="stable")
    parts, first = [], 0
    for index, length in enumerate(lengths[order].tolist()):
        rows = index - first
        if rows and (rows + 1 > most_rows or (rows + 1) * length > budget):
            parts.append(order[first:index])
            first = index
    return [*parts, order[first:]] if len(order) else parts


class PaddingWaste(NamedTuple):
    """Fraction of computed tokens that is padding, with the token budget and with a fixed number of rows."""

    budget: float
    fixed: float
    micro_batches: int
    fixed_micro_batches: int


def padding_waste(windows: Sequence[np.ndarray], *, budget: int, most_rows: int, fixed_rows: int) -> PaddingWaste:
    """Compare padding in these windows (tokens of each row) with a budget and with `fixed_rows` rows in order."""
    cut = [(window, cut_by_tokens(window, budget=budget, most_rows=most_rows)) for window in windows]
    by_budget = [window[part] for window, parts in cut for part in parts]
    by_rows = [window[at : at + fixed_rows] for window in windows for at in range(0, len(window), fixed_rows)]
    return PaddingWaste(_waste(by_budget), _waste(by_rows), len(by_budget), len(by_rows))


def _waste(parts: Sequence[np.ndarray]) -> float:
    computed = sum(len(part) * int(part.max()) for part in parts)
    return 1.0 - sum(int(part.sum()) for part in parts) / computed if computed else 0.0


def known_lengths(split: Split, indices: np.ndarray) -> np.ndarray:
    """Tokens of each of these rows, where `check_budget` has found that the split knows them."""
    lengths = split.lengths(indices)
    assert lengths is not None, "checked before the start (check_budget)"
    return lengths


def check_budget(train: Split, evaluation: Split | None, budget: int | None) -> None:
    """Check that rows of these splits can be grouped by tokens. Raises InputError: row lengths are not known in
    advance, or a training row is longer than the budget."""
    if budget is None:
        return
    for name, split in (("train", train), ("eval", evaluation)):
        lengths = None if split is None else split.lengths(split.eval_order())
        if split is not None and lengths is None:
            raise InputError(
                "data.tokens_per_batch", got=f"{budget} tokens, and {name} rows whose tokens are not known",
                expected="rows with input_ids in memory (text, a table, a dict of columns) for both",
                remedy="null forms micro-batches by loop.micro_batch_size",
            )  # fmt: skip
        if lengths is None or name == "eval":  # a longer row is evaluated alone
            continue
        longest = int(np.argmax(lengths))
        if lengths[longest] > budget:
            raise InputError(
                "data.tokens_per_batch", got=str(budget),
                expected=f"at least {int(lengths[longest])}, the tokens of row {longest}, the longest",
            )  # fmt: skip


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class Cursor:
    """Position of training in the data: `position` rows of `epoch` (from 0) are consumed.

    It does not depend on ranks and micro-batches, so that a run can resume with other numbers of either.
    """

    epoch: int = 0
    position: int = 0


class GlobalBatch(NamedTuple):
    """The rows of one step over all ranks, in order, and the cursor of the next step."""

    indices: np.ndarray
    next: Cursor


def rank_micro_batches(
    indices: np.ndarray, *, micro_batch: int, rank: int, world_size: int, shares: Shares | None = None
) -> list[np.ndarray]:
    """This rank's micro-batches of one global batch, in order.

    The global batch is cut into M micro-batches of `micro_batch` rows (the last may be shorter); rank r takes
    M // world_size contiguous ones, plus one if r < M % world_size. Ranks without any return [].
    With `shares`, each rank takes its share of contiguous rows instead.
    """
    if shares is not None:
        passes = shares.passes(len(indices), rank=rank, micro_batch=micro_batch)
        return [indices[mine.start : mine.stop] for mine in passes]
    mine = part_of_rank(-(-len(indices) // micro_batch), rank=rank, world_size=world_size)
    return [indices[i * micro_batch : (i + 1) * micro_batch] for i in range(mine.start, mine.stop)]


def part_of_rank(count: int, *, rank: int, world_size: int) -> slice:
    """Return this rank's contiguous slice of `count` micro-batches; slices differ by at most one."""
    share, more = divmod(count, world_size)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))


class StepBatches:
    """The training batches, step by step, with constant-time access to any position.

    Micro-batches have at most `micro_batch` rows; by `tokens_per_batch`, if given, else in order. `drop_last` leaves
    out the rows at the end of an epoch that do not fill a global batch."""

    def __init__(
        self,
        split: Split,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        tokens_per_batch: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if min(global_batch_size, micro_batch, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"global batch {global_batch_size}, micro-batch {micro_batch}, rank {rank} of {world_size}"
            )
        self.split = split
        self.drop_last = drop_last
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.shares: Shares | None = None  # may be set to divide global batches unequally
        self.tokens_per_batch = tokens_per_batch
        self.budget_part: tuple[int, int] = (1, 1)  # (a, b) after memory ran out: the budget is multiplied by a / b
        self._epoch = -1
        self._order: Order = np.empty(0, np.int64)

    @property
    def epoch_rows(self) -> int:
        return len(self.split) - (len(self.split) % self.global_batch_size if self.drop_last else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last may be smaller than the global batch."""
        return -(-self.epoch_rows // self.global_batch_size)

    def begun(self, cursor: Cursor) -> Cursor:
        """The cursor itself, or the beginning of the next epoch where this one has no rows left."""
        return cursor if cursor.position < self.epoch_rows else Cursor(cursor.epoch + 1)

    def global_batch(self, cursor: Cursor) -> GlobalBatch:
        """The global batch at `cursor`. The last one of an epoch holds the remaining rows, unless they are dropped."""
        cursor, rows = self.begun(cursor), self.epoch_rows
        order = self._epoch_order(cursor.epoch)
        end = min(cursor.position + self.global_batch_size, rows)
        following = Cursor(cursor.epoch + 1) if end == rows else Cursor(cursor.epoch, end)
        return GlobalBatch(order[cursor.position : end], following)

    def rows_from(self, cursor: Cursor, count: int) -> np.ndarray:
        """Indices of `count` rows of the epoch from `cursor` on; wraps around at the end of the epoch."""
        order = self._epoch_order(cursor.epoch)
        begin = cursor.position % len(order)
        taken = order[begin : begin + count]
        while len(taken) < count:
            taken = np.concatenate([taken, order[: count - len(taken)]])
        return taken

    def _epoch_order(self, epoch: int) -> Order:
        if epoch != self._epoch:
            self._order, self._epoch = self.split.order(self.seed, epoch), epoch
        return self._order

    def rank_indices(self, indices: np.ndarray) -> list[np.ndarray]:
        """This rank's micro-batches of a global batch, as indices."""
        if self.tokens_per_batch is not None:
            parts = self.parts(indices, self.split)
            return parts[part_of_rank(len(parts), rank=self.rank, world_size=self.world_size)]
        return rank_micro_batches(
            indices, micro_batch=self.micro_batch, rank=self.rank, world_size=self.world_size, shares=self.shares
        )

    def parts(self, indices: np.ndarray, split: Split, *, times: int = 1) -> list[np.ndarray]:
        """Split these rows over all ranks into micro-batches by `times` the token budget."""
        lengths, budget = known_lengths(split, indices), times * self._budget
        return [indices[part] for part in cut_by_tokens(lengths, budget=budget, most_rows=times * self.micro_batch)]

    def cut(self, indices: np.ndarray) -> list[np.ndarray]:
        """Split training rows, at most one micro-batch of them, by the token budget if there is one."""
        return [indices] if self.tokens_per_batch is None else self.parts(indices, self.split)

    def fitting(self, indices: np.ndarray, split: Split, *, times: int = 1) -> np.ndarray:
        """Return the first of these rows that fit in one micro-batch by the token budget; all if there is none."""
        if self.tokens_per_batch is None:
            return indices
        longest = np.maximum.accumulate(known_lengths(split, indices))
        fit = longest * np.arange(1, 1 + len(indices)) <= times * self._budget
        return indices[: max(1, int(fit.sum()))]

    @property
    def _budget(self) -> int:
        part, whole = self.budget_part
        assert self.tokens_per_batch is not None, "only read if there is a token budget"
        return max(1, self.tokens_per_batch * part // whole)

    def epoch_indices(self, epoch: int) -> Iterator[np.ndarray]:
        """All micro-batches of this rank in one epoch; as lists, a `batch_sampler` for torch's DataLoader."""
        cursor = Cursor(epoch)
        while cursor.epoch == epoch:
            indices, cursor = self.global_batch(cursor)
            yield from self.rank_indices(indices)
