"""What listens at an address: the head of a Ray cluster, something else, or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest

from cluster import network as head
from cluster.network import METHOD, head_problem

Answer = Callable[[bytes, Any], bytes]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """`serve({method: answer})`: the address of a server with gRPC that has these methods."""
    servers = list[Any]()

    def start(methods: dict[str, Answer]) -> str:
        class Methods(grpc.GenericRpcHandler):
            def service(self, handler_call_details: Any) -> Any:
                answer = methods.get(handler_call_details.method)
                return answer and grpc.unary_unary_rpc_method_handler(answer)

        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers([Methods()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def refuse(request: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
    raise AssertionError


def test_a_head_answers_with_its_id_or_asks_for_a_token(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert head_problem(serve({METHOD: lambda request, context: b"\n\x1c" + b"i" * 28})) is None
    assert head_problem(serve({METHOD: refuse})) is None


def test_another_server_is_none(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    other = "something else than the head of a Ray cluster listens there"
    assert head_problem(serve({})) == other, "as a raylet, which has other methods"
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert head_problem(f"127.0.0.1:{server.server_port}") == other
        server.shutdown()
    monkeypatch.setattr(head, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "did not answer within" in str(head_problem(f"127.0.0.1:{silent.getsockname()[1]}"))


def test_nothing_answers_at_a_closed_port_or_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for nobody in ("127.0.0.1:9", "no.such.host.invalid:6379", "127.0.0.1:99999", "127.0.0.1:port"):
        assert head_problem(nobody) == "nothing answers there"
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as encrypted:
        assert head_problem(f"127.0.0.1:{encrypted.getsockname()[1]}") is None, "Ray's own client judges it"
    assert head_problem("127.0.0.1:9") == "nothing answers there"
