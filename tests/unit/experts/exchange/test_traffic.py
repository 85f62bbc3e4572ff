"""What a worker counts of the rows that it sends."""

from __future__ import annotations

import pytest

from experts.exchange.worker import Traffic


@pytest.mark.parametrize(("own", "sent"), [(None, [40, 100, 0]), (1, [40, 0, 0])])
def test_rows_to_the_host_in_this_process_cost_no_bytes_and_recomputed_rows_are_no_rows(
    own: int | None, sent: list[int]
) -> None:
    traffic = Traffic(layers=2, hosts=3, own=own)
    traffic.add(0, [1, 2, 0], row_bytes=10, counted=True)
    traffic.add(1, [0, 1, 0], row_bytes=10, counted=True)
    traffic.add(1, [1, 2, 0], row_bytes=10, counted=False)
    assert traffic.take() == [*sent, 1, 2, 0, 0, 1, 0]
    assert traffic.take() == [0.0] * 9
