"""`experts.inflight: 2` changes when things are done and nothing else: every number is the same to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from exchange import act, play, record, session_of
from flights import Sections, lose_a_host, one_at_a_time, ordered, scene
from gang import run_gang
from lab import DeviceReads, train

from experts.exchange.dispatch import ExpertCall
from experts.transport import Op

COLUMNS = ("loss", "aux_loss", "grad_norm", "eval", "counts", "load_imbalance", "loss_scale")


NOISY: Sections = (("experts", (("noise", 0.5), ("shared_expert", True), ("capacity_factor", 0.75))),)
MOVES = ((2, 11), (5, 12))
PLAIN = {
    "1 worker, 2 hosts": scene(1, 2, micro=1),
    "2 workers, 3 hosts": scene(2, 3),
    "1 worker, colocated": scene(1, "colocated", micro=2),
    "3 workers, colocated": scene(3, "colocated"),
    "2 workers, 2 hosts, one row each, some without a label": scene(2, 2, micro=1),
    "2 workers, colocated, one row each, some without a label": scene(2, "colocated", micro=1),
    "2 workers, 3 hosts, replicas and moves": scene(2, 3, seed=2, replicas=3, moves=MOVES),
    "2 workers, colocated, replicas and moves": scene(2, "colocated", seed=5, replicas=2, moves=MOVES),
    "1 worker, 2 hosts, noise, drops, a shared expert": scene(1, 2, sections=NOISY),
    "2 workers, colocated, noise, drops, a shared expert": scene(2, "colocated", sections=NOISY),
    "2 workers, 1 host, bf16": scene(2, 1, precision="bf16"),
    "2 workers, colocated, fp16": scene(2, "colocated", precision="fp16"),
    "1 worker, 2 hosts, two threads": scene(1, 2, sections=(("scale", (("threads", 2),)),)),
}


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Any]]:
    """Name -> for each member what it made with one and with two in flight; scenes of a size share processes."""
    made: dict[str, list[Any]] = {}
    for size in sorted({given.size for given in PLAIN.values()}):
        group = {name: given for name, given in PLAIN.items() if given.size == size}
        played = [part for given in group.values() for part in (one_at_a_time(given), given)]
        members = run_gang(play, played, world_size=size)
        made |= {name: [m[2 * n : 2 * n + 2] for m in members] for n, name in enumerate(group)}
    return made


@pytest.mark.parametrize("name", list(PLAIN))
def test_two_in_flight_are_one_at_a_time_to_the_last_bit(pairs: dict[str, list[Any]], name: str) -> None:
    for rank in range(PLAIN[name].workers):
        one, two = pairs[name][rank]
        for column in COLUMNS:
            assert one[column] == two[column], (rank, column)
        assert len(one["loss"]) == 8 and one["loss"][-1] < one["loss"][0]
    one, two = (made["weights"] for made in pairs[name][0])
    assert one.keys() == two.keys() and len(one) > 10
    assert [key for key, value in one.items() if not np.array_equal(value, two[key])] == []


@pytest.mark.parametrize("hosts", [1, "colocated"])
@pytest.mark.covers("EXP-19")
def test_backward_and_the_next_forward_interleave_in_the_same_order_on_every_worker(hosts: int | str) -> None:
    """Two micro-batches for the first worker, one for the second, which takes part in both."""
    given = scene(2, hosts, steps=2)
    first, second = run_gang(ordered, given, world_size=given.size)[:2]
    assert first == second
    assert first == [
        ("FORWARD", 0, 0), ("FORWARD", 0, 1),
        ("BACKWARD", 0, 1), ("FORWARD", 1, 0), ("BACKWARD", 0, 0), ("FORWARD", 1, 1),
        ("BACKWARD", 1, 1), ("BACKWARD", 1, 0),
        ("VOTE", 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("op", ["FORWARD", "BACKWARD"])
def test_a_host_that_dies_during_a_pass_is_an_error_on_every_worker_and_the_next_generation_works(op: str) -> None:
    given = scene(2, 2, micro=2)
    made = run_gang(lose_a_host, given, op, world_size=given.size, timeout=40.0)
    reference = run_gang(play, [one_at_a_time(given)], world_size=given.size)[0][0]
    for lasted, after in made[: given.workers]:
        assert lasted == 2, "it did not end in the step in which the host went"
        assert after["loss"] == reference["loss"] and after["grad_norm"] == reference["grad_norm"]


def test_an_error_in_forward_ends_the_interleaved_backward_and_the_step_can_be_retried() -> None:
    given = scene(1, "colocated")
    reference = act(0, given)
    session, calls = session_of(given, 0), []
    loss = session.trainable.loss

    def fails_once(module: Any, batch: Any) -> Any:
        made = loss(module, batch)  # its exchanges are done: the interleaved backward has done one
        calls.append(len(calls))
        if module.training and len(calls) == 2:
            raise ValueError("no room")
        return made

    session.trainable.loss = fails_once
    with pytest.raises(ValueError, match="no room"):
        train(session)
    assert session.state.step == 0 and len(calls) == 2
    client = session.trainable.remote.client  # type: ignore[union-attr]
    assert client.shard._kept, "the interleaved backward had not ended"
    for router in session.trainable.commit.__self__.routers:  # type: ignore[union-attr]
        router.pending_counts.zero_()
    session.trainable.remote.discard()  # type: ignore[union-attr]
    rows, _ = train(session)
    assert record(session, rows)["loss"] == reference["loss"]


def test_an_error_in_backward_is_raised_and_ends_the_interleaved_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    session, begun = session_of(scene(1, "colocated"), 0), Counter[str]()
    start, start_backward = ExpertCall.start, ExpertCall.start_backward

    def counted(call: ExpertCall, op: Op, rows: Any) -> None:
        begun["forward"] += 1
        start(call, op, rows)

    def failing(call: ExpertCall, grads: Any) -> None:
        begun["backward"] += 1
        if begun["backward"] == 2:
            raise ValueError("no kernel")
        start_backward(call, grads)

    monkeypatch.setattr(ExpertCall, "start", counted)
    monkeypatch.setattr(ExpertCall, "start_backward", failing)
    with pytest.raises(ValueError, match="no kernel"):
        train(session)
    assert begun == {"forward": 3, "backward": 2}, "two layers of the first forward, one of the second"


def test_two_in_flight_read_the_device_no_oftener_than_one() -> None:
    """ARCHITECTURE.md, 11, in one process that holds the experts too."""
    counted = []
    for given in (one_at_a_time(scene(1, "colocated", steps=3)), scene(1, "colocated", steps=3)):
        session = session_of(given, 0)
        with DeviceReads() as reads:
            train(session)
        counted.append(Counter(reads.spots))
    assert counted[0] == counted[1] and sum(counted[0].values()) > 0
