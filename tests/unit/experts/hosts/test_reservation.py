"""What a run with hosts reserves: impossible requests are refused before it waits, and a wait says what is missing."""

from __future__ import annotations

import pytest

from experts.hosts.reservation import Request
from raytrain.errors import InputError

NODES = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0}]


def request(hosts: int, workers: int, *, threads: float = 1, gpus: int = 0, kind: str | None = None) -> Request:
    one = {"GPU": float(gpus)} if gpus else {"CPU": float(threads)}
    host = one if kind is None else {**one, f"accelerator_type:{kind}": 0.001}
    return Request([dict(host) for _ in range(hosts)], [dict(one) for _ in range(workers)], "PACK", "the run a")


def test_what_fits_an_empty_cluster_is_not_refused() -> None:
    request(6, 2).check(NODES)
    request(1, 1, gpus=1, kind="T4").check(NODES)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        pytest.param(request(6, 3), "6 hosts and scale.workers 3, which need 9 CPU", id="more than the cluster has"),
        pytest.param(request(2, 1, threads=5), "5 CPU for one host", id="more than one node has"),
        pytest.param(
            request(1, 1, gpus=1, kind="H100"), "1 GPU of type H100 for one host", id="a kind that is not there"
        ),
        pytest.param(request(2, 1, gpus=1), "which need 3 GPU", id="hosts and workers together"),
    ],
)
def test_a_host_that_can_never_start_is_refused(asked: Request, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        asked.check(NODES)
    assert "experts.hosts" in str(raised.value)


def test_a_wait_says_what_is_needed_and_what_is_free() -> None:
    line = request(2, 3).missing({"CPU": 1.0, "memory": 5.0})
    assert line == "2 expert hosts and 3 workers need 5 CPU; 1 CPU are free"
