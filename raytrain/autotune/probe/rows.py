"""Which rows a probe computes: those the run would take next, and with them the longest there are."""

from __future__ import annotations

import numpy as np

from raytrain.data.rows.batches import Cursor
from raytrain.data.rows.contract import Split
from raytrain.data.rows.longest import longest_row
from raytrain.train.loader import BatchLoader
from raytrain.train.parallel.collectives import Workers


class RowChoice:
    """Rows of one worker.

    Args:
        cursor: position in the data from which on rows are used; it stays where it is.
        eval_split: placed, or None where nothing is evaluated.
    """

    def __init__(self, loader: BatchLoader, *, cursor: Cursor, workers: Workers, eval_split: Split | None) -> None:
        self._loader, self._cursor, self._workers = loader, cursor, workers
        self._longest = {id(split): longest_row(split) for split in (loader.batches.split, eval_split) if split}

    def rows(self, micro: int, *, passes: int, longest: bool) -> list[np.ndarray]:
        """This worker's micro-batches: rows of the epoch from the cursor on, again from the front where it ends.

        `passes` times `micro` rows; by a budget of tokens each of these is several micro-batches, as many on every
        worker. `longest`: of these only the two largest there can be, the longest row's and the one of most tokens.
        """
        batches, world_size, rank = self._loader.batches, self._workers.world_size, self._workers.rank
        taken = np.split(batches.rows_from(self._cursor, micro * passes * world_size), passes * world_size)
        own = slice(rank * passes, (rank + 1) * passes)
        cut = [batches.cut(part) for part in taken]
        if longest:
            first = [self.longest_first(batches.split, part) for part in taken[own]]
            if batches.tokens_per_batch is None:
                return first
            heavy = [max(parts, key=self._tokens) for parts in cut[own]]
            return [part for pair in zip(first, heavy, strict=True) for part in pair]
        most = max(map(len, cut))
        return [part for parts in cut[own] for part in [*parts, *parts[:1] * (most - len(parts))]]

    def _tokens(self, rows: np.ndarray) -> int:
        lengths = self._loader.batches.split.lengths(rows)
        return 0 if lengths is None else len(rows) * int(lengths.max())

    def longest_first(self, split: Split, rows: np.ndarray, *, times: int = 1) -> np.ndarray:
        """With the longest row of all among them, to which the others are padded; of these as many as `times` the
        budget of tokens allows."""
        longest = self._longest[id(split)]
        rows = rows if longest is None else np.concatenate([[longest.index], rows[1:]])
        return self._loader.batches.fitting(rows, split, times=times)
