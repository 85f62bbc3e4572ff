"""Form micro-batches by a token budget: sort a global batch's rows by length and limit tokens including padding.

The rows of a step and the divisor of its loss do not change, only their grouping into micro-batches. Like fairseq's
`--max-tokens` (Ott et al. 2019), but within one global batch, so that row order and exact resume are preserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raytrain.data.rows.contract import Split
from raytrain.errors import InputError


def cut_by_tokens(lengths: np.ndarray, *, budget: int, most_rows: int) -> list[np.ndarray]:
    """Return the positions of the rows of each micro-batch, shortest rows first.

    The number of rows times the longest row is at most `budget`; a row longer than that is a micro-batch by itself.
    A pure function with the same result on every worker.

    Args:
        lengths: tokens of each row.
        most_rows: maximum rows of one micro-batch.
    """
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
    by_budget = [part for window in windows for part in _parts(window, budget, most_rows)]
    by_rows = [window[at : at + fixed_rows] for window in windows for at in range(0, len(window), fixed_rows)]
    return PaddingWaste(_waste(by_budget), _waste(by_rows), len(by_budget), len(by_rows))


def _parts(window: np.ndarray, budget: int, most_rows: int) -> list[np.ndarray]:
    return [window[part] for part in cut_by_tokens(window, budget=budget, most_rows=most_rows)]


def _waste(parts: Sequence[np.ndarray]) -> float:
    computed = sum(len(part) * int(part.max()) for part in parts)
    return 1.0 - sum(int(part.sum()) for part in parts) / computed if computed else 0.0


def check_budget(train: Split, evaluation: Split | None, budget: int | None) -> None:
    """Check that rows of these splits can be grouped by tokens.

    Raises:
        InputError: row lengths are not known in advance, or a training row is longer than the budget.
    """
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
