"""Which rows a probe computes: those the run would take next, and with them the longest there are."""

from __future__ import annotations

import numpy as np

from raytrain.data.batches import Cursor
from raytrain.data.contract import Split
from raytrain.data.longest import longest_row
from raytrain.feed import Feed
from raytrain.gradients import Workers


class RowChoice:
    """Rows of one worker.

    Args:
        cursor: position in the data from which on rows are used; it stays where it is.
        eval_split: placed, or None where nothing is evaluated.
    """

    def __init__(self, feed: Feed, *, cursor: Cursor, workers: Workers, eval_split: Split | None) -> None:
        self._feed, self._cursor, self._workers = feed, cursor, workers
        self._longest = {id(split): longest_row(split) for split in (feed.batches.split, eval_split) if split}

    def rows(self, micro: int, *, passes: int, longest: bool) -> list[np.ndarray]:
        """This worker's micro-batches: rows of the epoch from the cursor on, again from the front where it ends."""
        batches, world, rank = self._feed.batches, self._workers.world, self._workers.rank
        taken = batches.rows_from(self._cursor, micro * passes * world)
        parts = np.split(taken, passes * world)[rank * passes : (rank + 1) * passes]
        return [self.longest_first(batches.split, part) for part in parts] if longest else parts

    def longest_first(self, split: Split, rows: np.ndarray) -> np.ndarray:
        """With the longest row of all among them, to which the others are padded."""
        longest = self._longest[id(split)]
        return rows if longest is None else np.concatenate([[longest.handle], rows[1:]])
