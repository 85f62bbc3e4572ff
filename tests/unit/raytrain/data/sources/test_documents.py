"""Documents as rows: what is learned, what is cut, who shares a row."""

from __future__ import annotations

import numpy as np
import pytest

from raytrain.data.sources.tokenised import Document, Row, packed, padded, share_rows, to_row


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("same", "given", "read", "said"),
    [
        (True, 0, [5, 6, 7, 8], [-100, 6, 7, 8]),
        (True, 2, [5, 6, 7, 8], [-100, -100, 7, 8]),
        (False, 0, [5, 6, 7, 8], [6, 7, 8, 9]),
        (False, 2, [5, 6, 7, 8], [-100, 7, 8, 9]),
    ],
)
def test_a_row_learns_what_comes_after_the_prompt(same: bool, given: int, read: list[int], said: list[int]) -> None:
    """Both ways to write labels learn the same tokens from the same context; what is longer is cut."""
    row = to_row(Document(ids(5, 6, 7, 8, 9), given), max_length=4, same_labels=same)
    assert row is not None and row.ids.tolist() == read and row.labels.tolist() == said


@pytest.mark.parametrize("document", [Document(ids()), Document(ids(5)), Document(ids(5, 6, 7, 8, 9), 5)])
def test_a_document_without_labels_gives_no_row(document: Document) -> None:
    for same in (True, False):
        assert to_row(document, max_length=4, same_labels=same) is None


def test_padded_rows_keep_their_lengths() -> None:
    columns = padded([Row(ids(1, 2), ids(-100, 2)), Row(ids(3, 4, 5), ids(-100, 4, 5))])
    values, offsets = columns.ragged["input_ids"]
    assert values.tolist() == [1, 2, 3, 4, 5] and offsets.tolist() == [0, 2, 5]
    assert columns.ragged["labels"][0].tolist() == [-100, 2, -100, 4, 5]


def test_packed_documents_begin_at_position_0_and_never_learn_each_others_first_token() -> None:
    rows = [Row(ids(1, 2), ids(-100, 2)), Row(ids(3, 4, 5), ids(-100, 4, 5)), Row(ids(6, 7), ids(-100, 7))]
    columns = packed(rows, length=6, pad=9).dense
    assert columns["input_ids"].tolist() == [[3, 4, 5, 1, 2, 9], [6, 7, 9, 9, 9, 9]]
    assert columns["labels"].tolist() == [[-100, 4, 5, -100, 2, -100], [-100, 7, -100, -100, -100, -100]]
    assert columns["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]


def test_every_document_has_one_place_and_rows_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, size=2000)
    held = share_rows(lengths, room=64)
    assert sorted(document for row in held for document in row) == list(range(2000))
    assert max(lengths[row].sum() for row in held) <= 64
    assert len(held) <= -(-lengths.sum() // 64) * 1.02
    assert held == share_rows(lengths, room=64)
