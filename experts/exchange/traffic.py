"""Counts what one worker sends to the hosts and receives from them. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class Traffic:
    """What one worker has sent and received since the last logged row.

    Args:
        own: index of the host in this process, None without one.

    Attributes:
        rows: for each layer the rows of training forwards to each host; recomputed ones do not count.
        bytes: payload to and from each host, of every pass; zero for a host in this process.
    """

    def __init__(self, *, layers: int, hosts: int, own: int | None) -> None:
        self._own = own
        self.rows = [[0] * hosts for _ in range(layers)]
        self.bytes = [0] * hosts

    def add(self, layer: int, host_counts: Sequence[int], *, row_bytes: int, counted: bool) -> None:
        """Add rows of `row_bytes` that go to the hosts and come back; `counted` for a first training forward."""
        for host, rows in enumerate(host_counts):
            if counted:
                self.rows[layer][host] += rows
            if host != self._own:
                self.bytes[host] += 2 * rows * row_bytes

    def take(self) -> list[float]:
        """Return the bytes of each host, then the rows layer by layer; resets both."""
        taken = [*self.bytes, *(count for row in self.rows for count in row)]
        self.rows, self.bytes = [[0] * len(row) for row in self.rows], [0] * len(self.bytes)
        return [float(value) for value in taken]
