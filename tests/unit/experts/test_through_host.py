"""Members that share a GPU: rows are copied to the host, sent over gloo, and copied back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experts import transport as process_group
from experts.transport import Channel, JointGroup

CPU = torch.device("cpu")


def opened(store: Any, rank: int, *, through_host: bool, device: torch.device = CPU, size: int = 2) -> JointGroup:
    return JointGroup(
        store, name="a", rank=rank, size=size, workers=1, holders=list(range(1, size)), device=device,
        through_host=through_host, interface="lo", timeout_s=20.0,
    )  # fmt: skip


@pytest.mark.parametrize(("through_host", "channel", "staged"), [
    (True, Channel.TO_HOLDERS, True), (True, Channel.TO_WORKERS, True), (True, Channel.CONTROL, False),
    (False, Channel.TO_HOLDERS, False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gloo_gets_buffers_of_the_host_and_the_rows_arrive_where_they_were_wanted(
    monkeypatch: pytest.MonkeyPatch, through_host: bool, channel: Channel, staged: bool, dtype: torch.dtype
) -> None:
    """Two members send each other 3 and 2 rows and keep 1; the senders may overwrite their rows at once."""
    seen: dict[int, tuple[int, int]] = {}
    inner = JointGroup._send_pairwise

    def watched(group: JointGroup, sent: torch.Tensor, received: torch.Tensor, *counts: Any) -> Any:
        seen[group.rank] = (sent.data_ptr(), received.data_ptr())
        return inner(group, sent, received, *counts)

    monkeypatch.setattr(JointGroup, "_send_pairwise", watched)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    counts = {0: ([1, 3], [1, 2]), 1: ([2, 1], [3, 1])}

    def member(rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        group = opened(store, rank, through_host=through_host)
        send, receive = counts[rank]
        rows = torch.arange(4 * sum(send)).view(-1, 4).to(dtype) + 100 * rank
        into = torch.full((sum(receive), 4), -1.0, dtype=dtype)
        pending = group.exchange(rows, send, receive, channel=channel, into=into)
        own = (rows.data_ptr(), into.data_ptr())
        if staged:
            assert (into == -1).all(), "rows arrive when they are waited for"
            rows.zero_()
        found = pending.wait()
        assert pending.wait() is found is into, "waiting twice changes nothing"
        return found, into, seen[rank] == own

    with ThreadPoolExecutor(2) as pool:
        (first, _, same), (second, _, other) = pool.map(member, [0, 1])
    assert same is other is (not staged)
    assert first[:, 0].tolist() == [0.0, 100.0, 104.0] and second[:, 0].tolist() == [4.0, 8.0, 12.0, 108.0]


@pytest.mark.parametrize(("through_host", "groups"), [(True, 0), (False, 2)])
def test_members_that_share_a_gpu_open_no_nccl_communicator(
    monkeypatch: pytest.MonkeyPatch, through_host: bool, groups: int
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(process_group, "nccl", lambda *given, **_more: made.append(given))
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    group = opened(store, 0, through_host=through_host, device=torch.device("cuda"), size=1)
    assert len(made) == groups and group.device == torch.device("cuda", 0)
