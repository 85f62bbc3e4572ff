"""What one worker sends to the hosts and gets back, counted. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class Traffic:
    """What one worker sent since the last logged row, and got back; host numbers only.

    Attributes:
        rows: for each layer the rows of training forwards to each host, those computed again not counted.
        bytes: payload to and from each host, of every pass; a host in this process costs none.
    """

    def __init__(self, *, layers: int, hosts: int, own: int | None) -> None:
        self._own = own
        self.rows = [[0] * hosts for _ in range(layers)]
        self.bytes = [0] * hosts

    def note(self, layer: int, host_counts: Sequence[int], *, row_bytes: int, counted: bool) -> None:
        """Rows of `row_bytes` each go to the hosts, and as many come back; `counted` where they are a first forward."""
        for host, rows in enumerate(host_counts):
            if counted:
                self.rows[layer][host] += rows
            if host != self._own:
                self.bytes[host] += 2 * rows * row_bytes

    def take(self) -> list[float]:
        """Bytes of each host, then the rows layer by layer; begins anew."""
        found = [*self.bytes, *(count for row in self.rows for count in row)]
        self.rows, self.bytes = [[0] * len(row) for row in self.rows], [0] * len(self.bytes)
        return [float(value) for value in found]
