"""Who still takes part in the passes of a step, as a holder of experts hears it.

A worker that has no memory for its passes says OUT in place of its next header, and nothing more until the step is
over for everybody. The passes of the others go on, with rows that nobody computes, and end like any others.
"""

from __future__ import annotations

from experts.transport.protocol import WORDS, Header, Op, read_headers


class Attendance:
    """See the module.

    Args:
        workers: how many there are.

    Attributes:
        out: those who take no further part.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.out: set[int] = set()

    def read(self, rows: list[list[int]], *, generation: int, version: int) -> tuple[Header | None, list[list[int]]]:
        """The one header of those who take part, None where nobody does any more; and the counts of each worker.

        Args:
            rows: what came from each worker that is not out.

        Raises:
            HeaderMismatch: they differ, or belong to another generation or placement.
        """
        there = [worker for worker in range(self.workers) if worker not in self.out]
        ops = [Header.op_of(row) for row in rows]
        self.out |= {worker for worker, op in zip(there, ops, strict=True) if op == Op.OUT}
        left = [(worker, row) for worker, row, op in zip(there, rows, ops, strict=True) if op != Op.OUT]
        if not left:
            read_headers(rows, generation=generation, version=version, workers=there)
            return None, []
        header = read_headers(
            [row for _, row in left], generation=generation, version=version, workers=[worker for worker, _ in left]
        )
        counts = [[0] * (len(rows[0]) - WORDS) for _ in range(self.workers)]
        for worker, row in left:
            counts[worker] = row[WORDS:]
        return header, counts

    def all_again(self) -> None:
        """The step is over for everybody."""
        self.out.clear()
