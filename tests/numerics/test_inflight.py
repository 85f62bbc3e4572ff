"""`experts.inflight: 2` changes when things are done and nothing else: every number is the same to the last bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import act, play, record, session_of
from flights import Sections, lose_a_host, measured, one_at_a_time, ordered, scene, short_of_memory
from gang import run_gang
from lab import DeviceReads, Rows, train

import raytrain.autotune.startup
from experts.exchange.dispatch import ExpertCall
from experts.transport import Op
from raytrain.autotune.startup import Calibration, settle_inflight
from raytrain.errors import StateLost
from raytrain.plan.choice import Deferred
from raytrain.runs.folder import RunFolder

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


@pytest.mark.parametrize("hosts", [1, "colocated"])
def test_measuring_changes_nothing_and_all_workers_decide_equally(hosts: int | str) -> None:
    given = one_at_a_time(scene(2, hosts, sections=NOISY, steps=4))
    first, second = run_gang(measured, given, world_size=given.size)[:2]
    assert first[:2] == second[:2] and first[0].value in (1, 2) and "times as fast as 1" in first[0].reason
    assert set(first[1]) == {1, 2} and all(0 < seconds < 60 for seconds in first[1].values())
    plain = run_gang(play, [given], world_size=given.size)[0][0]
    assert first[2]["loss"] == plain["loss"] and len(plain["loss"]) == 4
    for name, value in plain["weights"].items():
        assert np.array_equal(value, first[2]["weights"][name]), name


def test_measurements_are_saved_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reporter, said = RunFolder(str(tmp_path)), Rows(), []
    session = session_of(scene(1, "colocated", steps=2), 0)
    plan = replace(session.job.plan, inflight=Deferred("measured", (1, 2)))
    session.job = replace(session.job, plan=plan)
    settle_inflight(Calibration(session, run, reporter, said.append))
    (event,) = reporter.events
    written = run.read_json(run.memory_probe)["inflight"]
    assert (event["kind"], event["what"], event["value"]) == ("decision", "inflight", session.step.inflight)
    assert written["value"] == session.step.inflight == session.settings.inflight and len(said) == 1
    run.write_json(run.memory_probe, {"inflight": {**written, "value": 2}})
    monkeypatch.setattr(raytrain.autotune.startup, "measure_inflight", None)
    settle_inflight(Calibration(session, run, reporter, said.append))
    assert session.step.inflight == 2 and len(reporter.events) == len(said) == 1
    session.prepare("fp32")
    assert session.step.inflight == 2, "a session prepared again, as after a rewind, keeps it"


@pytest.mark.parametrize("hosts", [2, "colocated"])
@pytest.mark.parametrize("limit", [1, 2])
def test_if_two_in_flight_run_out_of_memory_one_is_chosen_and_the_attempt_continues(
    hosts: int | str, limit: int
) -> None:
    """One of two workers has no memory in the middle of its passes; with 1, already for one in flight."""
    given = one_at_a_time(scene(2, hosts, steps=4))
    first, second = run_gang(short_of_memory, given, limit, world_size=given.size)[:2]
    assert first[0].value == second[0].value == 1
    assert first[0].reason == f"{limit} in flight failed while measured: on another worker"
    assert second[0].reason == f"{limit} in flight failed while measured: planted"
    plain = run_gang(play, [given], world_size=given.size)[0][0]
    assert first[1]["loss"] == plain["loss"] and len(plain["loss"]) == 4, "the attempt continues unchanged"


@pytest.mark.parametrize("rank", [0, 1])
def test_if_a_host_dies_while_two_in_flight_are_measured_the_next_attempt_uses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    run, reporter, said = RunFolder(str(tmp_path)), Rows(), []
    session = session_of(scene(1, "colocated", steps=2), 0)
    job = replace(session.job, plan=replace(session.job.plan, inflight=Deferred("measured", (1, 2))))
    session.job, backward = job, session.step.backward

    def lost(*given: Any, **more: Any) -> Any:
        if session.step.inflight == 2:
            raise StateLost("expert host 0 is gone\nmore lines")
        return backward(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(session.step, "backward", lost)
        patch.setattr(Calibration, "recorded", lambda *_given: None)
        patch.setattr(session.workers, "rank", rank)
        with pytest.raises(StateLost):
            settle_inflight(Calibration(session, run, reporter, said.append))
    assert run.exists(run.memory_probe) == (rank == 0) and len(reporter.events) == int(rank == 0)
    if rank:
        return
    monkeypatch.setattr(raytrain.autotune.startup, "measure_inflight", None)
    settle_inflight(Calibration(session, run, reporter, said.append))
    assert session.step.inflight == session.settings.inflight == 1
    assert "2 in flight failed" in reporter.events[0]["reason"]
    assert "(StateLost: expert host 0 is gone)" in reporter.events[0]["reason"]


def test_two_in_flight_read_the_device_no_oftener_than_one() -> None:
    """ARCHITECTURE.md, 11, in one process that holds the experts too."""
    counted = []
    for given in (one_at_a_time(scene(1, "colocated", steps=3)), scene(1, "colocated", steps=3)):
        session = session_of(given, 0)
        with DeviceReads() as reads:
            train(session)
        counted.append(Counter(reads.spots))
    assert counted[0] == counted[1] and sum(counted[0].values()) > 0
