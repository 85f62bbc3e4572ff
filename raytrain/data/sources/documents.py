"""Turn tokenized documents into rows: which tokens are learned, how rows are truncated, how documents are packed.

Torch-free, pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytrain.data.rows.contract import IGNORED_LABEL
from raytrain.data.sources.tables import TableColumns


@dataclass(frozen=True)
class Document:
    """Tokens of one document; the first `given` of them (a prompt) are not learned."""

    ids: np.ndarray
    given: int = 0


@dataclass(frozen=True)
class Row:
    """Input tokens and their labels: int32 arrays of equal length."""

    ids: np.ndarray
    labels: np.ndarray


def to_row(document: Document, *, max_length: int, same_labels: bool) -> Row | None:
    """Truncate a document to a row of at most `max_length` tokens; None if no label is left to learn.

    Args:
        same_labels: labels equal the tokens, with the first set to -100, for a model that shifts them itself;
            otherwise each label is the next token.
    """
    ids = document.ids[: max_length + (not same_labels)]
    labels = ids.copy()
    labels[: document.given] = IGNORED_LABEL
    labels[:1] = IGNORED_LABEL
    if not same_labels:
        ids, labels = ids[:-1], labels[1:]
    return Row(ids, labels) if (labels != IGNORED_LABEL).any() else None


def padded(rows: Sequence[Row]) -> TableColumns:
    """Rows of different lengths; they are padded when a batch is made."""
    return TableColumns(ragged={"input_ids": joined([row.ids for row in rows]),
                                "labels": joined([row.labels for row in rows])})  # fmt: skip


def joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the arrays; returns the values and the offset of each array."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    return np.concatenate(parts), offsets


def packed(rows: Sequence[Row], *, length: int, pad: int) -> TableColumns:
    """Pack several documents into each row of `length`: input_ids, labels, position_ids that restart per document.

    The rest of a row is padding with label -100 and positions of its own.
    """
    places = share_rows(np.array([len(row.ids) for row in rows]), room=length)
    ids = np.full((len(places), length), pad, np.int32)
    labels = np.full((len(places), length), IGNORED_LABEL, np.int32)
    positions = np.zeros((len(places), length), np.int32)
    for number, held in enumerate(places):
        at = 0
        for document in held:
            row = rows[document]
            end = at + len(row.ids)
            ids[number, at:end], labels[number, at:end] = row.ids, row.labels
            positions[number, at:end] = np.arange(end - at)
            at = end
        positions[number, at:] = np.arange(length - at)
    return TableColumns(dense={"input_ids": ids, "labels": labels, "position_ids": positions})


def share_rows(lengths: np.ndarray, *, room: int) -> list[list[int]]:
    """Assign documents to rows: longest first, each into the fullest row that still has room (best-fit decreasing).

    Args:
        lengths: none longer than `room`.
    """
    held: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # indexed by the room left
    left = 0  # bit s is set if some row has room s left, so the smallest sufficient room is found in one step
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        enough = left >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            row = rows_with[space].pop()
            if not rows_with[space]:
                left &= ~(1 << space)
        else:
            space, row = room, len(held)
            held.append([])
        held[row].append(document)
        rows_with[space - length].append(row)
        if space > length:
            left |= 1 << (space - length)
    return held
