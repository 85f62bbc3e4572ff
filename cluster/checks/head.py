"""Whether the head of a Ray cluster answers at an address.

Ray's own client waits minutes for a server that is none of its own, prints its attempts, and leaves threads behind that
can abort the process at its end. So the first call of that client, for the ID of the cluster, is made here.
"""

from __future__ import annotations

import os

from cluster.network import answers

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
