"""What workers and expert hosts say to each other: operations, the header before each of them, and what can go wrong.

Every operation is a collective of all members of a generation, in one order: a header from each worker to each host,
then the payload that the operation is about. The header is fixed in size, and it is also the exact load: it counts the
rows that follow for every expert of the host.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from raytrain.errors import RunError, StateLost

MAGIC = 0x4558_5052_5401
FIELDS = ("magic", "generation", "version", "step", "op", "layer", "micro_batch", "dtype", "width")
WORDS = len(FIELDS)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of the payload; the header holds the position."""


class Op(IntEnum):
    """What the members do together."""

    SETUP = 1  # rank 0 tells the hosts what their experts are; uint8 JSON
    FILL = 2  # rank 0 sends the first weights
    FORWARD = 3  # rows there and back; the host keeps what backward needs
    RESERVE = 4  # the same, for a pass that will be computed again: the host keeps nothing
    RECOMPUTE = 5  # the second time: the host keeps what backward needs
    EVALUATE = 6  # rows there and back, without gradients
    BACKWARD = 7  # gradients of the rows there and back
    VOTE = 8  # one sum over all members, then everybody commits or skips
    DISCARD = 9  # forget gradients and what was kept for backward
    SAVE = 10  # hosts take a snapshot in memory
    FETCH = 11  # hosts send the weights of their experts to rank 0
    END = 12  # the hosts leave the generation
    OUT = 13  # in place of any other: a worker without memory takes no part until DISCARD, which it has said by this
    SHORTAGES = 14  # one sum over all members: which holders of experts had no memory
    THROUGH = 15  # where experts are colocated: a worker has come through its passes, and hears who has not


class HeaderMismatch(RunError):
    """Members disagree about the operation that they are in: a bug in the order of calls, named instead of a hang."""


class Aborted(StateLost):
    """The generation is over: a member died, and every other was told."""


@dataclass(frozen=True)
class Header:
    """The words before the counts; see FIELDS."""

    generation: int
    version: int
    step: int
    op: Op
    layer: int = 0
    micro_batch: int = 0
    dtype: int = 0
    width: int = 0

    @staticmethod
    def op_of(row: list[int]) -> int:
        """The operation of a header as it came."""
        return row[FIELDS.index("op")]

    def words(self) -> list[int]:
        """As int64 words, the magic number first."""
        fixed = (self.generation, self.version, self.step, int(self.op), self.layer)
        return [MAGIC, *fixed, self.micro_batch, self.dtype, self.width]


def read_headers(rows: list[list[int]], *, generation: int, version: int, workers: list[int] | None = None) -> Header:
    """The one header that all workers sent; `rows` holds what came from each of them, or from `workers`.

    Raises:
        HeaderMismatch: they differ from each other, or from this host's generation or placement.
    """
    first = rows[0][:WORDS]
    names = workers or list(range(len(rows)))
    for worker, row in zip(names, rows, strict=True):
        if row[:WORDS] != first:
            told = ", ".join(
                f"{name} {mine} and {other}"
                for name, mine, other in zip(FIELDS, first, row[:WORDS], strict=True)
                if mine != other
            )
            raise HeaderMismatch(f"worker {names[0]} and worker {worker} are in different operations: {told}")
    expected: dict[str, int] = {"magic": MAGIC, "generation": generation, "version": version}
    seen: dict[str, int] = dict(zip(FIELDS, first, strict=True))
    wrong = [f"{name} {seen[name]} instead of {value}" for name, value in expected.items() if seen[name] != value]
    if wrong:
        raise HeaderMismatch(f"the workers' header has {', '.join(wrong)}")
    return Header(**{name: seen[name] for name in FIELDS[1:] if name != "op"}, op=Op(seen["op"]))


class Transport(Protocol):
    """How rows travel between the members of one generation.

    Ranks 0 to W - 1 are the workers. `holders` are the ranks that own experts: the ranks after them, or, where experts
    are colocated, the workers themselves.
    """

    rank: int
    size: int
    holders: list[int]
    seconds: float
    """Spent in calls, waiting included."""

    def headers(self, rows: Tensor | None, words: int, *, out: Set[int] = frozenset()) -> list[list[int]]:
        """A worker gives one int64 row (H, words) for each host; a host gets one from each worker that is not `out`.
        Blocks a host."""
        ...

    def exchange(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, into: Tensor | None = None
    ) -> PendingExchange:
        """Rows to every member and from every member, in the order of the ranks; starts it. `into`: room for those
        received, made now where it is None."""
        ...

    def all_reduce(self, vector: Tensor) -> None:
        """Sum a CPU vector over all members, in place."""
        ...

    def abort(self) -> None:
        """End whatever this member waits for, from another thread; the group is of no use afterwards."""
        ...


class PendingExchange(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """The rows received."""
        ...
