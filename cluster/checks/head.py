"""Whether the head of a Ray cluster answers at an address, asked over a plain socket.

Ray's own client waits minutes for a server that is none of its own, prints its attempts, and leaves threads behind that
can abort the process at its end. So the first call of that client is made here by hand: an HTTP/2 connection (RFC 9113)
with one gRPC request for the ID of the cluster, whose answer tells the head from any other server.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from cluster.network import CONNECT_S

ANSWER_S = 15.0
"""Limit of the whole exchange; a head on a busy machine takes seconds."""
METHOD = b"/ray.rpc.NodeInfoGcsService/GetClusterId"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
FRAME_HEADER_BYTES = 9
GRPC = (b"application/grpc", bytes.fromhex("1d75d0620d263d4c4d6564"))
"""In the first headers of a gRPC server, as it writes them and as a proxy compresses them; a web server has others."""
UNIMPLEMENTED = b"grpc-status\x0212"
"""In the headers of a gRPC server that has no such method."""


def head_problem(address: str) -> str | None:
    """Why `host:port` is not the head of a Ray cluster; None if it is. A head that asks for a token counts."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, ValueError, OverflowError):  # unreachable, or no port at all
        return "nothing answers there"
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return None  # Ray's own client judges an encrypted connection
        try:
            connection.settimeout(ANSWER_S)
            connection.sendall(_request(address))
            return _judge(connection, ends=time.monotonic() + ANSWER_S)
        except TimeoutError:
            return f"something listens there, but did not answer within {ANSWER_S:.0f} s"
        except OSError:
            return "something else than Ray listens there: it closed the connection"


def _judge(connection: socket.socket, *, ends: float) -> str | None:
    """Read frames until the answer is known. Errors: OSError; TimeoutError if it is not by `ends`."""
    received, first = b"", True
    while True:
        connection.settimeout(max(0.001, ends - time.monotonic()))
        block = connection.recv(1 << 16)
        if not block:
            return "something else than Ray listens there: it closed the connection"
        received += block
        if first and not _begins_with_settings(received):
            what = "an HTTP server" if received.startswith((b"HTTP/", b"<")) else "something else than Ray"
            return f"{what} listens there"
        while len(received) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(received[:3], "big")
            if len(received) < end:
                break
            kind, flags, body, received, first = received[3], received[4], received[9:end], received[end:], False
            if kind == DATA:
                return None
            other = kind == HEADERS and (UNIMPLEMENTED in body or not any(mark in body for mark in GRPC))
            if other or kind in (RESET, GOAWAY):
                return "another server with gRPC or HTTP/2 listens there, not the head of a Ray cluster"
            if kind == HEADERS and flags & END_STREAM:
                return None  # a refusal by Ray itself, as without a token


def _begins_with_settings(received: bytes) -> bool:
    """Whether this may be the start of an HTTP/2 connection, whose first frame has settings of 6 bytes each."""
    length, kind, stream = int.from_bytes(received[:3], "big"), received[3:4], received[5:9]
    return length % 6 == 0 and length < 1 << 12 and kind in (b"", bytes([SETTINGS])) and stream == bytes(len(stream))


def _request(address: str) -> bytes:
    """The start of an HTTP/2 connection with one gRPC request without arguments."""
    headers = (
        b"\x83\x86"  # :method POST, :scheme http
        + b"\x04" + _text(METHOD) + b"\x01" + _text(address.encode()[:120])  # :path, :authority
        + b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
    )  # fmt: skip
    return (
        PREFACE
        + _frame(SETTINGS, 0, stream=0, body=b"")
        + _frame(HEADERS, END_HEADERS, stream=1, body=headers)
        + _frame(DATA, END_STREAM, stream=1, body=b"\x00\x00\x00\x00\x00")
    )


def _text(text: bytes) -> bytes:
    """A string of HPACK (RFC 7541), below 127 bytes."""
    return bytes([len(text)]) + text


def _frame(kind: int, flags: int, *, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
