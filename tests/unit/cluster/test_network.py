"""The network interface of the collectives."""

from __future__ import annotations

import os
import socket

import pytest

from cluster import network
from cluster.network import GLOO, NCCL, interface_of, join_network, loopback_only


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_each_address_of_this_machine_belongs_to_its_interface() -> None:
    own = network._addresses()
    assert {name for name, _ in own} <= {name for _, name in socket.if_nameindex()}
    assert all(interface_of(str(address)) == name for name, address in own if not address.is_loopback)
    assert [interface_of(text) for text in ("127.0.0.1", "127.0.0.2", "203.0.113.9", "no address")] == [
        "lo", "lo", None, None,
    ]  # fmt: skip


def test_addresses_of_ipv6_are_found_too(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    listed = "fd000000000000000000000000000007 02 40 00 80    ib0\n"
    monkeypatch.setattr(network, "IPV6_ADDRESSES", type("File", (), {"read_text": staticmethod(lambda: listed)}))
    assert interface_of("fd00::7") == "ib0" and interface_of("fd00::8") is None


def test_a_configured_interface_is_taken_before_the_users_variables_and_these_before_rays() -> None:
    join_network(None, address="203.0.113.9")
    assert GLOO not in os.environ and NCCL not in os.environ, "gloo and NCCL choose"
    os.environ[NCCL] = "^docker"
    join_network(None, address="127.0.0.3")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "^docker")
    join_network("eth7", address="127.0.0.3")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("eth7", "=eth7")


def test_a_server_on_loopback_alone_is_told_from_one_on_all_addresses() -> None:
    elsewhere = [str(own) for _, own in network._addresses() if not own.is_loopback and own.version == 4]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert [loopback_only(f"{host}:{port}") for host in ("127.0.0.1", "localhost")] == [True, True]
        assert not any(loopback_only(f"{host}:{port}") for host in (*elsewhere, "203.0.113.9"))
    assert not loopback_only(f"127.0.0.1:{port}") and not loopback_only("auto") and not loopback_only("local")
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert loopback_only(f"127.0.0.1:{server.getsockname()[1]}") == (not elsewhere)
