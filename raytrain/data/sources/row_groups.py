"""Parquet sets larger than memory: row groups read as their turn comes, in an order that is a pure function.

An epoch permutes the row groups by (seed, epoch), takes them `window` at a time, and permutes the rows of each such
window. So any position is reached by its number alone, by any number of workers, and only three windows are in memory:
the one in use, the next, which a thread reads meanwhile, and the one before, of which batches that are made ahead may
still want rows. Each worker reads every group: the rows of a step come from the whole window, whoever takes them.

pyarrow reads the groups itself. Ray Data's own iterator was measured at 18-33 thousand rows a second over short epochs
on one node, promises no order, and cannot begin in the middle; a Ray Dataset is therefore written as Parquet first
(`raytrain.data.sources.ray_dataset`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrain.data.rows.contract import HOLDOUT_SEED, Batch, Order, RowSplit, Split, generator, row_order
from raytrain.data.rows.ragged import Ragged, RaggedSplit
from raytrain.data.rows.residency import ReorderedSplit, full_tensor
from raytrain.data.rows.splits import TensorSplit
from raytrain.data.sources.in_memory import columns_split
from raytrain.data.sources.tables import ColumnChoice, convert
from raytrain.errors import RunError
from raytrain.runs.storage import locate

#: Rows are shuffled within so many bytes of row groups; three such windows are in memory.
WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of one row group of one file."""

    path: str
    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start


def held_out(pieces: Sequence[Piece], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """(train, eval): whole groups of a permutation that no job's seed changes, and a part of one more, so that the
    number of rows is exact and only these groups are read for an evaluation."""
    held = int(sum(piece.rows for piece in pieces) * fraction)
    train, evaluation = list(pieces), []
    for number in row_order(len(pieces), seed=HOLDOUT_SEED, epoch=0)[::-1].tolist():
        piece = pieces[number]
        if held <= 0:
            break
        taken = min(held, piece.rows)
        held -= taken
        evaluation.append((number, Piece(piece.path, piece.group, piece.stop - taken, piece.stop)))
        train[number] = Piece(piece.path, piece.group, piece.start, piece.stop - taken)
    in_order = sorted(evaluation, key=lambda pair: pair[0])
    return [piece for piece in train if piece.rows], [piece for _, piece in in_order]


class GroupOrder:
    """The order of one epoch; a slice of it is computed from the windows it touches."""

    def __init__(
        self, starts: np.ndarray, *, seed: int, epoch: int, window: int,
        expect: Callable[[list[int]], None] = lambda pieces: None,
    ) -> None:  # fmt: skip
        self._starts, self._seed, self._epoch, self._expect = starts, seed, epoch, expect
        pieces = generator(seed, epoch).permutation(len(starts) - 1)
        self._windows = [pieces[at : at + window].tolist() for at in range(0, len(pieces), window)]
        sizes = [sum(int(starts[n + 1] - starts[n]) for n in part) for part in self._windows]
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        self._known: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        first, last, _ = span.indices(len(self))
        parts, at = [], first
        while at < last:
            number = int(np.searchsorted(self._bounds, at, side="right")) - 1
            begin, end = int(self._bounds[number]), int(self._bounds[number + 1])
            parts.append(self._rows(number)[at - begin : last - begin])
            at = end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _rows(self, number: int) -> np.ndarray:
        if number not in self._known:
            self._expect([n for part in self._windows[number : number + 2] for n in part])
            spans = [(int(self._starts[n]), int(self._starts[n + 1])) for n in self._windows[number]]
            rows = np.concatenate([np.arange(start, stop) for start, stop in spans])
            draw = np.random.SeedSequence([self._seed % 2**64, self._epoch, 1 + number])
            self._known[number] = np.random.Generator(np.random.PCG64(draw)).permutation(rows)
            while len(self._known) > 2:  # that of a step, and that of the batches made ahead of it
                del self._known[next(iter(self._known))]
        return self._known[number]


class GroupSplit:
    """Rows of Parquet files, row group by row group; an index is the row's number in the order of the files.

    Args:
        pieces: what belongs to this split.
        choice, classes: which columns, and the names of string labels (`raytrain.data.sources.tables.convert`).
        row_bytes: of a row as it is kept in memory.
        weighs_rows: whether each row counts as one in a mean loss; else only a batch can tell.
        window_bytes: row groups of so many bytes are shuffled together.
    """

    tokens_per_row: int | None = None

    def __init__(
        self, pieces: Sequence[Piece], choice: ColumnChoice, *, classes: tuple[str, ...] | None, row_bytes: int,
        weighs_rows: bool, window_bytes: int = WINDOW_BYTES,
    ) -> None:  # fmt: skip
        self.pieces = list(pieces)
        self._choice, self._classes, self._row_bytes, self._weighs_rows = choice, classes, row_bytes, weighs_rows
        self._starts = np.concatenate([[0], np.cumsum([piece.rows for piece in self.pieces], dtype=np.int64)])
        mean = max(1, int(self._starts[-1]) * row_bytes // len(self.pieces))
        self.window = max(1, min(len(self.pieces), window_bytes // mean))
        self._read = _GroupReader(self.pieces, self._split_of, columns=_names(choice), most=3 * self.window + 1)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as they would be kept in memory."""
        return len(self) * self._row_bytes

    def order(self, seed: int, epoch: int) -> Order:
        """See the module; what the order comes to is read ahead."""
        return GroupOrder(self._starts, seed=seed, epoch=epoch, window=self.window, expect=self._read.expect)

    def eval_order(self) -> np.ndarray:
        return np.arange(len(self))

    def gather(self, indices: np.ndarray) -> Batch:
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        by_piece = np.argsort(numbers, kind="stable")
        parts = []
        for number in np.unique(numbers).tolist():
            mine = indices[by_piece][numbers[by_piece] == number]
            parts.append(self._read.piece(number).select(mine - self._starts[number]))
        back = np.empty(len(indices), np.int64)
        back[by_piece] = np.arange(len(indices))
        return joined(parts).gather(back)

    def weights(self, indices: np.ndarray) -> int | None:
        return len(indices) if self._weighs_rows else None

    def lengths(self, indices: np.ndarray) -> None:
        """Not known without reading the rows."""

    def to(self, device: torch.device | str) -> Split:
        """All rows read and kept on `device`, in the same order."""
        rows = joined([self._read.piece(n) for n in range(len(self.pieces))])
        starts, window = self._starts, self.window
        return ReorderedSplit(
            rows.to(device), lambda seed, epoch: GroupOrder(starts, seed=seed, epoch=epoch, window=window)
        )

    def to_partial(self, device: torch.device | str, *, rows: int) -> Split:
        """All of it: what does not fit is read from the files again."""
        return self.to(device)

    def _split_of(self, piece: Piece, table: Any) -> RowSplit:
        key = f"data.path, row group {piece.group} of {piece.path}"
        return columns_split(convert(table, self._choice, classes=self._classes, key=key))


def joined(splits: Sequence[Any]) -> Any:
    """Splits of the same columns, one after the other."""
    if len(splits) == 1:
        return splits[0]
    if isinstance(splits[0], TensorSplit):
        names = splits[0].columns
        return TensorSplit({name: torch.cat([full_tensor(split.columns[name]) for split in splits]) for name in names})
    ragged = {}
    for name in splits[0].ragged:
        columns = [split.ragged[name] for split in splits]
        lengths = np.concatenate([np.diff(column.offsets) for column in columns])
        values = torch.cat([full_tensor(column.values) for column in columns])
        ragged[name] = Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))
    dense = None if splits[0].dense is None else joined([split.dense for split in splits])
    return RaggedSplit(ragged, dense=dense, mask=splits[0].mask)


def _names(choice: ColumnChoice) -> list[str]:
    return [*choice.stacked, *choice.named, *([choice.label] if choice.label else [])]


class _GroupReader:
    """Pieces as splits: read by one thread, the last `most` of them kept."""

    def __init__(
        self, pieces: Sequence[Piece], make: Callable[[Piece, Any], RowSplit], *, columns: list[str], most: int
    ) -> None:
        self._pieces, self._make, self._columns, self._most = pieces, make, columns, most
        self._kept: OrderedDict[int, Future[RowSplit]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="row-groups")
        self._files: dict[str, Any] = {}

    def piece(self, number: int) -> RowSplit:
        """One piece; waits for it. Any thread may ask: what another's rows push out unread is begun again."""
        while True:
            with contextlib.suppress(CancelledError):
                return self._begun(number).result()

    def expect(self, numbers: list[int]) -> None:
        """These will be asked for, in about this order."""
        for number in numbers:
            self._begun(number)

    def _begun(self, number: int) -> Future[RowSplit]:
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self._thread.submit(self._split, self._pieces[number])
            self._kept.move_to_end(number)
            found = self._kept[number]
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].cancel()
            return found

    def _split(self, piece: Piece) -> RowSplit:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            if piece.path not in self._files:
                filesystem, inner = locate(piece.path, key="data.path")
                self._files[piece.path] = parquet.ParquetFile(filesystem.open_input_file(inner))
            table = self._files[piece.path].read_row_group(piece.group, columns=self._columns)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"row group {piece.group} of {piece.path} cannot be read: {error}") from error
        return self._make(piece, table.slice(piece.start, piece.rows))
