"""Read Parquet data larger than memory by row groups, in an order that is a pure function of seed and epoch.

An epoch permutes the row groups by (seed, epoch), splits them into windows of `window` groups, and permutes the rows of
each window. Any number of workers can therefore start at any position, and only three windows are in memory: the
current one, the next one, which a thread prefetches, and the previous one, which pending batches may still need. Every
worker reads every group, because the rows of a step come from the complete window.

pyarrow reads the groups itself. Ray Data's own iterator was measured at 18-33 thousand rows a second over short epochs
on one node, guarantees no order, and cannot start in the middle of an epoch; a Ray Dataset is
therefore written as Parquet first (`raytrain.data.sources.ray_dataset`).
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
from raytrain.data.rows.residency import ReorderedSplit, full_tensor
from raytrain.data.rows.splits import MASK, Ragged, RaggedSplit, TensorSplit
from raytrain.data.sources.in_memory import table_split
from raytrain.data.sources.tables import ColumnChoice, convert
from raytrain.errors import RunError
from raytrain.runs.storage import locate

#: Rows are shuffled within windows of row groups of this size; three windows are in memory.
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
        return self.stop - self.start


def held_out(pieces: Sequence[Piece], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Split into (train, eval), independently of the job's seed.

    The held-out rows are complete groups plus part of one more: their number is exact, and an evaluation reads only
    these groups.
    """
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
    """The row order of one epoch; a slice of it is computed from the windows that it overlaps."""

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
            start, end = int(self._bounds[number]), int(self._bounds[number + 1])
            parts.append(self._rows(number)[at - start : last - start])
            at = end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _rows(self, number: int) -> np.ndarray:
        if number not in self._known:
            self._expect([n for part in self._windows[number : number + 2] for n in part])
            spans = [(int(self._starts[n]), int(self._starts[n + 1])) for n in self._windows[number]]
            rows = np.concatenate([np.arange(start, stop) for start, stop in spans])
            draw = np.random.SeedSequence([self._seed % 2**64, self._epoch, 1 + number])
            self._known[number] = np.random.Generator(np.random.PCG64(draw)).permutation(rows)
            while len(self._known) > 2:  # one for the current step, one for prefetched batches
                del self._known[next(iter(self._known))]
        return self._known[number]


class GroupSplit(Split):
    """Rows of Parquet files, read by row group; an index is the row's position in the concatenated files. `row_bytes`:
    of a row in memory. `weighs_rows`: whether each row has weight 1 in a mean loss; otherwise only a batch tells.
    `window_bytes`: of row groups that are shuffled together."""

    def __init__(
        self, pieces: Sequence[Piece], choice: ColumnChoice, *, classes: tuple[str, ...] | None, row_bytes: int,
        weighs_rows: bool, window_bytes: int = WINDOW_BYTES,
    ) -> None:  # fmt: skip
        self.pieces = list(pieces)
        self._choice, self._row_bytes, self._weighs_rows = choice, row_bytes, weighs_rows
        self._starts = np.concatenate([[0], np.cumsum([piece.rows for piece in self.pieces], dtype=np.int64)])
        mean = max(1, int(self._starts[-1]) * row_bytes // len(self.pieces))
        self.window = max(1, min(len(self.pieces), window_bytes // mean))
        self._read = _GroupReader(self.pieces, choice, classes, most=3 * self.window + 1)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        return len(self) * self._row_bytes

    @property
    def adds_mask(self) -> bool:
        return MASK not in _names(self._choice)

    def order(self, seed: int, epoch: int) -> Order:
        """The order of an epoch (see the module docstring); upcoming row groups are prefetched."""
        return GroupOrder(self._starts, seed=seed, epoch=epoch, window=self.window, expect=self._read.expect)

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

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        """Read all rows and keep them on `device`, in the same order; also where some would do."""
        read = joined([self._read.piece(n) for n in range(len(self.pieces))])
        starts, window = self._starts, self.window
        return ReorderedSplit(
            read.to(device), lambda seed, epoch: GroupOrder(starts, seed=seed, epoch=epoch, window=window)
        )


def joined(splits: Sequence[Any]) -> Any:
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
    """Reads pieces as splits in one thread and keeps the last `most` of them."""

    def __init__(
        self, pieces: Sequence[Piece], choice: ColumnChoice, classes: tuple[str, ...] | None, *, most: int
    ) -> None:
        self._pieces, self._choice, self._classes, self._most = pieces, choice, classes, most
        self._kept: OrderedDict[int, Future[RowSplit]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="row-groups")
        self._files: dict[str, Any] = {}

    def piece(self, number: int) -> RowSplit:
        """Return one piece, waiting for it. Thread-safe: a read evicted by another thread is submitted again."""
        while True:
            with contextlib.suppress(CancelledError):
                return self._submit(number).result()

    def expect(self, numbers: list[int]) -> None:
        """Prefetch these pieces, which will be needed in about this order."""
        for number in numbers:
            self._submit(number)

    def _submit(self, number: int) -> Future[RowSplit]:
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
            table = self._files[piece.path].read_row_group(piece.group, columns=_names(self._choice))
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"row group {piece.group} of {piece.path} cannot be read: {error}") from error
        key = f"data.path, row group {piece.group} of {piece.path}"
        own = table.slice(piece.start, piece.rows)
        return table_split(convert(own, self._choice, classes=self._classes, key=key))
