"""Batches that are made ready before they are asked for: in bounded number, in order, and thrown away where the order
changes (another micro-batch size, a roll-back)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

Given = TypeVar("Given")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True)
class BatchRequest:
    """One batch: these rows of a split, in `epoch` (from 0; what a dataset draws at random depends on it)."""

    split: str
    epoch: int
    rows: np.ndarray

    def same(self, other: BatchRequest) -> bool:
        """Whether it is the same batch."""
        return (self.split, self.epoch) == (other.split, other.epoch) and np.array_equal(self.rows, other.rows)


class PendingBatch(Protocol[Made]):
    """Something that is being made."""

    def result(self) -> Made:
        """Wait for it; raises what went wrong."""
        ...

    def cancel(self) -> object:
        """Nobody wants it any more."""
        ...


def prefetch(
    items: Iterable[Given], begin: Callable[[Given], PendingBatch[Made]], *, depth: int
) -> Generator[tuple[Given, PendingBatch[Made]]]:
    """Start work for each item ahead of its use; yield each item with its pending result.

    At most `depth` results are pending at a time, the yielded one included: a consumer that asks for the next item as
    soon as it has a result keeps `depth` of them in the making (`prefetched_results`). Closing the generator cancels
    what is left.
    """
    waiting: deque[tuple[Given, PendingBatch[Made]]] = deque()
    try:
        for item in items:
            waiting.append((item, begin(item)))
            if len(waiting) >= depth:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, pending in waiting:
            pending.cancel()


def prefetched_results(running: Generator[tuple[Given, PendingBatch[Made]]]) -> Generator[Made]:
    """The results one by one, the next ones begun before each of them is used."""
    came = next(running, None)
    try:
        while came is not None:
            made, came = came[1].result(), None
            came = next(running, None)
            yield made
    finally:
        if came is not None:
            came[1].cancel()
        running.close()


class Prefetcher(Generic[Made]):
    """Batches of training, made ready while those before them are used.

    Args:
        start: a generator over wanted batches -> (wanted, pending), such as `prefetch` makes.
    """

    def __init__(
        self, start: Callable[[Iterator[BatchRequest]], Generator[tuple[BatchRequest, PendingBatch[Made]]]]
    ) -> None:
        self._start = start
        self._running: Generator[tuple[BatchRequest, PendingBatch[Made]]] | None = None
        self._next: tuple[BatchRequest, PendingBatch[Made]] | None = None
        self.restarts = 0

    def take(self, wanted: BatchRequest, *, then: Callable[[], Iterator[BatchRequest]]) -> Made:
        """The batch that is wanted now. `then` gives it and all that will be wanted after it: asked only where what was
        made ready is something else."""
        if self._next is None or not self._next[0].same(wanted):
            self.stop()
            self.restarts += 1
            self._running = self._start(then())
            self._next = next(self._running)
            assert self._next[0].same(wanted), "what follows begins with what is wanted"
        (_, pending), self._next = self._next, None
        made = pending.result()
        if self._running is not None:
            self._next = next(self._running, None)  # before this one is used: nobody who makes them waits for that
        return made

    def stop(self) -> None:
        """Throw away what was made ready."""
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
        if self._running is not None:
            self._running.close()
            self._running = None
