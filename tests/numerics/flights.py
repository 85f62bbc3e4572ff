"""Two micro-batches in flight in plain processes: what the members of a gang do. Here, and not in the test, because the
processes of a gang import it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import exchange
import pytest
import torch
from exchange import Scene, act, session_of
from lab import train

from experts.exchange.host_server import HostServer
from experts.transport import Aborted, Header, Op

Sections = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


def scene(workers: int, hosts: int | str, *, sections: Sections = (), steps: int = 8, **more: Any) -> Scene:
    """With two in flight; 4 rows of a window of 12 unless said: accumulation 3 on one worker, 2 and 1 on two."""
    given = dict(sections)
    given["experts"] = (*given.get("experts", ()), ("inflight", 2))
    return Scene(workers, hosts, sections=tuple(given.items()), steps=steps, **more)


def one_at_a_time(given: Scene) -> Scene:
    """The same without."""
    sections = dict(given.sections)
    sections["experts"] = (*sections["experts"], ("inflight", 1))
    return replace(given, sections=tuple(sections.items()))


def ordered(rank: int, _world: int, given: Scene) -> list[tuple[str, int, int]]:
    """A worker's operations in its second step: name, micro-batch, layer."""
    if rank >= given.workers:
        exchange.serve(rank, given)
        return []
    session, sent = session_of(given, rank), []
    client = session.trainable.remote.client  # type: ignore[union-attr]
    send_header = client.send_header

    def recorded(op: Op, **fields: Any) -> Any:
        if client.steps == 1:
            sent.append((op.name, fields.get("micro_batch", 0), fields.get("layer", 0)))
        return send_header(op, **fields)

    client.send_header = recorded  # type: ignore[method-assign]
    train(session)
    client.end()
    return sent


def lose_a_host(rank: int, _world: int, given: Scene, op: str) -> Any:
    """The first host leaves in that operation of the second micro-batch of step 3, with its connections; then a scene
    that goes well, in the same processes."""
    lasted = until_it_goes(rank, given, op)
    gc.collect()  # closes the rest of a group, which notifies members that wait for this one
    return lasted, act(rank, replace(given, number=1))


def until_it_goes(rank: int, given: Scene, op: str) -> int:
    """Counts steps."""
    if rank < given.workers:
        session = session_of(given, rank)
        with pytest.raises(Aborted, match=r"gone|exited"):
            train(session)
        return session.state.step
    placement = exchange.placement_of(given, exchange.scene_experts(given))
    group = exchange.joint_group(given, rank)
    server = HostServer(group, host=rank - given.workers, generation=1, placement=placement, device=torch.device("cpu"))
    inner = server._operations[Op[op]]

    def leave(header: Header, counts: list[list[int]]) -> None:
        if rank == given.workers and (header.step, header.micro_batch) == (3, 1):
            raise Aborted("this host is gone")
        inner(header, counts)

    server._operations[Op[op]] = leave
    with pytest.raises(Aborted, match=r"gone|exited"):
        server.serve()
    return server.steps
