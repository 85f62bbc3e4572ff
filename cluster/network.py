"""Network interfaces and addresses of this machine, and whether the head of a Ray cluster answers at an address.

Used before Ray or torch.distributed is started: which interface gloo and NCCL use, who answers, and whether it is Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

# ---------------------------------------------------------------- network

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
#: Seconds to wait for a connection.
CONNECT_S = 2.0
SIOCGIFADDR = 0x8915
"""The request for the IPv4 address of an interface (netdevice(7))."""


def interface_environment(interface: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on one network interface; set them before their first connection.

    NCCL takes a name as a prefix unless "=" precedes it: "eth1" would match "eth10" too.
    """
    return {GLOO: interface, NCCL: f"={interface}"}


def join_network(interface: str | None, *, address: str | None) -> None:
    """Set the interface of this process's collectives, before their first connection.

    Where none is configured it is the one with the address by which Ray's other nodes reach this one: gloo would take
    the address of the host's own name, which on many systems is one that no other machine reaches, and NCCL the first
    interface. Variables that are set already then stay.

    Args:
        interface: `cluster.interface`.
        address: this node's in the Ray cluster; None: unknown.
    """
    if interface is not None:
        os.environ.update(interface_environment(interface))
        return
    found = None if address is None else interface_of(address)
    if found is not None:
        for name, value in interface_environment(found).items():
            os.environ.setdefault(name, value)


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with an IP address; None if it has none, as behind a NAT."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    for name, own in _addresses():
        if own == wanted or (own.is_loopback and wanted.is_loopback):  # Linux answers to all of 127.0.0.0/8
            return name
    return None


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one (or to itself); nothing is sent.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(where)
        return str(asking.getsockname()[0])


def answers(address: str) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
        return True
    return False


def loopback_only(address: str) -> bool:
    """Whether `host:port` is on this machine's loopback and no other address of it accepts connections to the port.

    Ray takes another address of the machine in its place otherwise, also where its cluster does not listen there.
    """
    host, _, port = address.rpartition(":")
    if interface_of({"localhost": "127.0.0.1"}.get(host, host.strip("[]"))) != "lo" or not answers(address):
        return False
    return not any(answers(f"[{own}]:{port}") for _, own in _addresses() if not own.is_loopback)


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address) of this machine; of an interface with several IPv4 addresses the first."""
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, ipaddress.IPv4Address(answer[20:24])))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


# ---------------------------------------------------------------- head

ANSWER_S = 15.0
"""Limit of the call; a head on a busy machine takes seconds."""
METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def head_problem(address: str) -> str | None:
    """Why `host:port` is not the head of a Ray cluster; None if it is. A head that asks for a token counts."""
    if not answers(address):
        return "nothing answers there"
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return None  # Ray's own client judges an encrypted connection
    import grpc  # comes with Ray

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]  (of the call, which is the error too)
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"something listens there, but did not answer within {ANSWER_S:.0f} s"
            return "something else than the head of a Ray cluster listens there"
    return None
