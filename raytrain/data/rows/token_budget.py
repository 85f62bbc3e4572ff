"""Micro-batches by a budget of tokens: a global batch's rows by length, cut so that padding stays in the budget.

Which rows make up a step, and what its loss is divided by, stay as they are; only how they are put together changes.
Batches by tokens are fairseq's `--max-tokens` (Ott et al. 2019), here inside one window, so that order and resume hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raytrain.data.rows.contract import Split
from raytrain.errors import InputError


def cut_by_tokens(lengths: np.ndarray, *, budget: int, most_rows: int) -> list[np.ndarray]:
    """Positions of the rows of each micro-batch, shortest rows first.

    Rows times the longest of them is at most `budget`; one row that is longer goes alone. A pure function, the same on
    every worker.

    Args:
        lengths: tokens of each row.
        most_rows: of one micro-batch, whatever they weigh.
    """
    order = np.argsort(lengths, kind="stable")
    parts, first = [], 0
    for at, length in enumerate(lengths[order].tolist()):
        rows = at - first
        if rows and (rows + 1 > most_rows or (rows + 1) * length > budget):
            parts.append(order[first:at])
            first = at
    return [*parts, order[first:]] if len(order) else parts


class PaddingWaste(NamedTuple):
    """Tokens that are padding, as a part of all that is computed: by the budget, and by a number of rows."""

    budget: float
    fixed: float
    micro_batches: int
    fixed_micro_batches: int


def padding_waste(windows: Sequence[np.ndarray], *, budget: int, most_rows: int, fixed_rows: int) -> PaddingWaste:
    """What padding costs in these windows (tokens of each row) with a budget, and with `fixed_rows` rows in the order
    they come."""
    by_budget = [part for window in windows for part in _parts(window, budget, most_rows)]
    by_rows = [window[at : at + fixed_rows] for window in windows for at in range(0, len(window), fixed_rows)]
    return PaddingWaste(_waste(by_budget), _waste(by_rows), len(by_budget), len(by_rows))


def _parts(window: np.ndarray, budget: int, most_rows: int) -> list[np.ndarray]:
    return [window[part] for part in cut_by_tokens(window, budget=budget, most_rows=most_rows)]


def _waste(parts: Sequence[np.ndarray]) -> float:
    computed = sum(len(part) * int(part.max()) for part in parts)
    return 1.0 - sum(int(part.sum()) for part in parts) / computed if computed else 0.0


def check_budget(train: Split, evaluation: Split | None, budget: int | None) -> None:
    """Whether rows of these splits can be put together by tokens.

    Raises:
        InputError: nobody knows their lengths beforehand, or one to train on is longer than the budget.
    """
    if budget is None:
        return
    for name, split in (("train", train), ("eval", evaluation)):
        lengths = None if split is None else split.lengths(split.eval_order())
        if split is not None and lengths is None:
            raise InputError(
                "data.tokens_per_batch", seen=f"{budget} tokens, and {name} rows whose tokens are not known",
                expected="rows with input_ids in memory (text, a table, a dict of columns) for both",
                remedy="null leaves micro-batches to loop.micro_batch_size",
            )  # fmt: skip
        if lengths is None or name == "eval":  # a row that is longer is evaluated alone
            continue
        longest = int(np.argmax(lengths))
        if lengths[longest] > budget:
            raise InputError(
                "data.tokens_per_batch", seen=str(budget),
                expected=f"at least {int(lengths[longest])}, the tokens of row {longest}, the longest",
            )  # fmt: skip
