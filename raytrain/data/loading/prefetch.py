"""Prefetch batches: a bounded number, in order, discarded when the order changes (micro-batch size, rollback)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class BatchRequest:
    """A batch: these rows of a split, in `epoch` (from 0; random draws of a dataset depend on it)."""

    split: str
    epoch: int
    rows: np.ndarray

    def same(self, other: BatchRequest) -> bool:
        """Whether both ask for the same batch."""
        return (self.split, self.epoch) == (other.split, other.epoch) and np.array_equal(self.rows, other.rows)


class PendingBatch(Protocol[Result]):
    """A batch in the making."""

    def result(self) -> Result:
        """Wait for the batch; raises the error that its making raised."""
        ...

    def cancel(self) -> object:
        """Give it up."""
        ...


def prefetch(
    items: Iterable[Item], begin: Callable[[Item], PendingBatch[Result]], *, depth: int
) -> Generator[tuple[Item, PendingBatch[Result]]]:
    """Start work for each item ahead of its use; yield each item with its pending result.

    At most `depth` results are pending at a time, the yielded one included: a consumer that asks for the next item as
    soon as it has a result keeps `depth` of them in the making (`prefetched_results`). Closing the generator cancels
    what is left.
    """
    waiting: deque[tuple[Item, PendingBatch[Result]]] = deque()
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


def prefetched_results(running: Generator[tuple[Item, PendingBatch[Result]]]) -> Generator[Result]:
    """The results one by one; the following ones are started before a result is yielded."""
    current = next(running, None)
    try:
        while current is not None:
            result, current = current[1].result(), None
            current = next(running, None)
            yield result
    finally:
        if current is not None:
            current[1].cancel()
        running.close()


class Prefetcher(Generic[Result]):
    """Training batches that are made while earlier ones are used.

    Args:
        start: from an iterator of requests to a generator of (request, pending batch), as `prefetch` returns.
    """

    def __init__(
        self, start: Callable[[Iterator[BatchRequest]], Generator[tuple[BatchRequest, PendingBatch[Result]]]]
    ) -> None:
        self._start = start
        self._running: Generator[tuple[BatchRequest, PendingBatch[Result]]] | None = None
        self._next: tuple[BatchRequest, PendingBatch[Result]] | None = None
        self.restarts = 0

    def take(self, request: BatchRequest, *, then: Callable[[], Iterator[BatchRequest]]) -> Result:
        """The requested batch.

        `then` returns the requests from this one on; it is called only if another batch was prefetched.
        """
        if self._next is None or not self._next[0].same(request):
            self.stop()
            self.restarts += 1
            self._running = self._start(then())
            self._next = next(self._running)
            assert self._next[0].same(request), "the requests begin with the one asked for"
        (_, pending), self._next = self._next, None
        result = pending.result()
        if self._running is not None:
            self._next = next(self._running, None)  # before this one is used, so that the makers never wait
        return result

    def stop(self) -> None:
        """Discard what was prefetched."""
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
        if self._running is not None:
            self._running.close()
            self._running = None
