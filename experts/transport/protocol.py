"""The protocol between workers and expert hosts: operations, the header before each of them, and errors.

Every operation is a collective of all members of a generation, in one order: a header from each worker to each host,
then the payload of the operation. A header has a fixed size and carries the exact load: for every expert of the host,
the number of rows that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import torch
from torch import Tensor

from raytrain.errors import RunError, StateLost

MAGIC = 0x4558_5052_5401
FIELDS = ("magic", "generation", "version", "step", "op", "layer", "micro_batch", "dtype", "width")
HEADER_SIZE = len(FIELDS)
"""Int64 words of a header without its counts."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of the payload; the header holds the index."""


class Channel(Enum):
    """Over which connections an exchange goes. The caller names it, the same on every member.

    It cannot be read off a tensor: a member without rows may hold an empty tensor on another device than the members
    that have rows, and the two sides would wait for each other on different connections.
    """

    CONTROL = "control"  # tensors on the CPU, over gloo
    TO_HOLDERS = "to holders"  # on the group's device: over NCCL on a GPU, over gloo on a CPU
    TO_WORKERS = "to workers"  # the same, by a communicator of its own: results return while other rows are sent


class Op(IntEnum):
    """An operation of all members."""

    SETUP = 1  # rank 0 sends the hosts an `ExpertSetup`; uint8 JSON
    FILL = 2  # rank 0 sends the initial weights
    FORWARD = 3  # rows there and back; the host keeps what backward needs
    RESERVE = 4  # the same, for a pass that will be recomputed: the host keeps nothing
    RECOMPUTE = 5  # the recomputation: the host keeps what backward needs
    EVALUATE = 6  # rows there and back, without gradients
    BACKWARD = 7  # gradients of the rows there and back
    VOTE = 8  # one sum over all members, then everybody commits or skips
    DISCARD = 9  # forget gradients and what was kept for backward
    SAVE = 10  # hosts take a snapshot in memory
    FETCH = 11  # hosts send the weights of their experts to rank 0
    END = 12  # the hosts leave the generation
    DROP_OUT = 13  # in place of any other: a worker without memory takes no part until DISCARD, which this implies
    SHORTAGES = 14  # one sum over all members: which holders of experts ran out of memory
    PASSES_DONE = 15  # where experts are colocated: a worker has finished its passes, and learns who dropped out


ROW_OPERATIONS = {Op.FORWARD, Op.RESERVE, Op.RECOMPUTE, Op.EVALUATE, Op.BACKWARD}
"""Operations in which rows travel; before any other a host waits for what it has sent."""


class HeaderMismatch(RunError):
    """Members disagree about the current operation. Names the bug in the order of calls, which would be a hang."""


class Aborted(StateLost):
    """The generation is over: a member died, and every other was notified."""


@dataclass(frozen=True)
class Header:
    """The fields before the counts; see FIELDS."""

    generation: int
    version: int
    step: int
    op: Op
    layer: int = 0
    micro_batch: int = 0
    dtype: int = 0
    width: int = 0

    @property
    def payload_dtype(self) -> torch.dtype:
        """The dtype that `dtype` stands for."""
        return DTYPES[self.dtype]

    @staticmethod
    def op_of(row: list[int]) -> int:
        """The operation of an encoded header."""
        return row[FIELDS.index("op")]

    def encode(self) -> list[int]:
        """As int64 words, the magic number first."""
        return [MAGIC, *(int(getattr(self, name)) for name in FIELDS[1:])]


def read_headers(
    rows: list[list[int]], *, generation: int, version: int, workers: list[int] | None = None,
    layers: Sequence[str] = (),
) -> Header:  # fmt: skip
    """Decode the one header that all workers sent; `rows` holds those of all of them, or of `workers`.

    Args:
        layers: their names in the model, for messages.

    Raises:
        HeaderMismatch: they differ from each other, or from this host's generation or placement.
    """
    first = rows[0][:HEADER_SIZE]
    names = workers or list(range(len(rows)))
    for worker, row in zip(names, rows, strict=True):
        if row[:HEADER_SIZE] != first:
            differences = ", ".join(
                f"{name} {mine} and {other}"
                for name, mine, other in zip(FIELDS, first, row[:HEADER_SIZE], strict=True)
                if mine != other
            )
            found = f"worker {names[0]} and worker {worker} are in different operations: {differences}"
            raise HeaderMismatch(found + _calls({names[0]: first, worker: row}, layers))
    expected: dict[str, int] = {"magic": MAGIC, "generation": generation, "version": version}
    seen: dict[str, int] = dict(zip(FIELDS, first, strict=True))
    wrong = [f"{name} {seen[name]} instead of {value}" for name, value in expected.items() if seen[name] != value]
    if wrong:
        raise HeaderMismatch(f"the workers' header has {', '.join(wrong)}")
    return Header(**{name: seen[name] for name in FIELDS[1:] if name != "op"}, op=Op(seen["op"]))


def _calls(rows: Mapping[int, list[int]], layers: Sequence[str]) -> str:
    """The calls of layers that two workers are in, by worker, and the rule that they break; else empty."""
    op, layer, alike = FIELDS.index("op"), FIELDS.index("layer"), slice(FIELDS.index("op"))
    first, other = rows.values()
    if first[alike] != other[alike] or not {first[op], other[op]} & ROW_OPERATIONS or not layers:
        return ""
    said = [
        f"worker {worker} is in {Op(row[op]).name}" + (f" of {layers[row[layer]]}" if row[op] in ROW_OPERATIONS else "")
        for worker, row in rows.items()
    ]
    return (
        f"; {', '.join(said)}: every worker calls every expert layer equally often in every micro-batch, and one"
        " without rows as in its last one (Trainable.communicates gives it a row); experts.hosts 0 has no such rule"
    )


def bytes_tensor(data: bytes) -> Tensor:
    """Copy bytes into a uint8 tensor, to be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Transport(Protocol):
    """Exchanges tensors between the members of one generation.

    Ranks 0 to W - 1 are the workers. `holders` are the ranks that own experts: those after the workers, or, where
    experts are colocated, the workers themselves.

    Attributes:
        seconds: spent in calls, waiting included.
    """

    rank: int
    size: int
    holders: list[int]
    seconds: float

    def headers(self, rows: Tensor | None, size: int, *, dropped: Set[int] = frozenset()) -> list[list[int]]:
        """Send one int64 row from each worker that has not `dropped` out to each holder. Blocks a holder.

        Args:
            rows: (H, size), one for each holder; None on a host and on a worker that receives only.

        Returns:
            the rows received, on a holder.
        """
        ...

    def exchange(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, channel: Channel,
        into: Tensor | None = None,
    ) -> PendingExchange:  # fmt: skip
        """Start an uneven all-to-all over the first dimension, in the order of the ranks.

        Only members with rows for each other communicate: a member without any need not call it.

        Args:
            channel: equal on all members that take part.
            into: receives the rows; allocated if None.
        """
        ...

    def all_reduce(self, vector: Tensor) -> None:
        """Sum a CPU vector over all members, in place."""
        ...

    def close(self) -> None:
        """Leave the group after its last call."""
        ...

    def abort(self) -> None:
        """End every waiting call of this member, from another thread; the group must not be used afterwards."""
        ...


class PendingExchange(Protocol):
    """An exchange in flight."""

    def wait(self) -> Tensor:
        """Return the rows received."""
        ...
