"""What listens at an address: the head of a Ray cluster, something else, or nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from cluster.checks import head
from cluster.checks.head import head_problem

SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00"
"""The first frame of a head."""
CONTENT_TYPE = b"\x88@\x0ccontent-type\x10application/grpc"


def frame(kind: int, flags: int, body: bytes, *, stream: int = 1) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


ACKNOWLEDGED = frame(4, 1, b"", stream=0)
CLUSTER_ID = frame(1, 4, CONTENT_TYPE) + frame(0, 0, b"\x00\x00\x00\x00\x1e" + b"i" * 30)  # its trailers may come later
NO_TOKEN = frame(1, 5, CONTENT_TYPE + b"\x00\x0bgrpc-status\x0216\x00\x0cgrpc-message\x10InvalidAuthToken")
NO_METHOD = frame(1, 5, CONTENT_TYPE + b"@\x0bgrpc-status\x0212")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """`serve(*pieces)`: the address of a server that sends these to each client, and keeps the connection open, unless
    the last piece is None."""
    listeners, held, threads = list[socket.socket](), list[socket.socket](), list[threading.Thread]()

    def start(*pieces: bytes | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            with contextlib.suppress(OSError):  # the client, or the test, has closed its side
                client, _ = listener.accept()
                held.append(client)
                asked = b""
                while b"GetClusterId" not in asked and (block := client.recv(1 << 16)):
                    asked += block
                for piece in pieces:
                    if piece is None:
                        client.shutdown(socket.SHUT_RDWR)
                    else:
                        client.sendall(piece)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)  # a thread that still waits for a client ends
    for thread in threads:
        thread.join(timeout=10)
    for each in (*listeners, *held):
        each.close()


def test_a_head_is_known_by_its_answer_also_without_its_token(serve: Callable[..., str]) -> None:
    assert head_problem(serve(SETTINGS, ACKNOWLEDGED, CLUSTER_ID)) is None
    assert head_problem(serve(SETTINGS, NO_TOKEN)) is None
    compressed = bytes.fromhex("885f8b1d75d0620d263d4c4d6564")  # by a proxy: :status 200, content-type application/grpc
    assert head_problem(serve(SETTINGS, frame(1, 4, compressed), CLUSTER_ID[-44:])) is None
    whole = SETTINGS + ACKNOWLEDGED + CLUSTER_ID
    assert head_problem(serve(*(whole[n : n + 1] for n in range(len(whole))))) is None, "a frame arrives in pieces"


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([SETTINGS, ACKNOWLEDGED, NO_METHOD], "another server with gRPC or HTTP/2 listens there"),  # a raylet
        ([SETTINGS, frame(7, 0, b"\x00" * 8, stream=0)], "another server with gRPC or HTTP/2"),
        ([SETTINGS, frame(1, 4, b"\x88"), frame(0, 1, b"<!DOCTYPE HTML>")], "another server with gRPC or HTTP/2"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "an HTTP server listens there"),
        ([b"<!DOCTYPE HTML>\n"], "an HTTP server listens there"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "something else than Ray listens there"),
        ([b"-ERR unknown command\r\n"], "something else than Ray listens there"),
        ([None], "it closed the connection"),
        ([SETTINGS, None], "it closed the connection"),
    ],
)
def test_another_server_is_named(serve: Callable[..., str], sent: list[bytes | None], problem: str) -> None:
    assert problem in str(head_problem(serve(*sent)))


def test_a_silent_server_is_given_up_and_no_server_is_said(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "ANSWER_S", 0.2)
    for sent in ([], [SETTINGS], [SETTINGS, frame(1, 4, CONTENT_TYPE)]):
        assert "did not answer within" in str(head_problem(serve(*sent)))
    for nobody in ("127.0.0.1:9", "127.0.0.1:999999", "[::1]:9", "no.such.host.invalid:6379"):
        assert head_problem(nobody) == "nothing answers there"


def test_an_encrypted_head_is_left_to_ray(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert head_problem(serve(b"\x15\x03\x03")) is None
    assert head_problem("127.0.0.1:9") == "nothing answers there"
