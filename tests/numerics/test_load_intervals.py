"""The loads in experts.jsonl equal a recount of every token, over workers, hosts and a resume."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from exchange import DATA, Scene, act, placement_of, scene_experts
from gang import run_gang
from lab import MOE, make_session, train
from recount import Recount, recounted

from experts.router import TopKRouter
from raytrain.execution.reporter import RankZeroReporter
from raytrain.runs.folder import RunFolder, this_process

STEPS, EVERY = 12, 5
SECTIONS = (("loop", (("log_every", EVERY),)),)


@pytest.mark.covers("EXP-17")
def test_counts_and_last_use_equal_a_recount_of_every_token() -> None:
    sections = {"experts": {"num_experts": 12, "top_k": 1, "balance": "none"}, "optim": {"lr": 0.05}}
    loop = {"max_steps": STEPS, "log_every": EVERY, "global_batch_size": 4, "micro_batch_size": 2}
    session = make_session(MOE, DATA, loop=loop, **sections)
    recount = Recount(session)
    reporter, _ = train(session)
    assert [(row["step"], row["steps"]) for row in reporter.intervals] == [(1, 1), (5, 4), (10, 5), (12, 2)]
    for row in reporter.intervals:
        assert row["layers"] == recount.rows_of(row["step"] - row["steps"] + 1, row["step"])
        assert row["idle"] == recount.idle(row["step"])
        assert row["dropped"] == [0, 0] and "hosts" not in row
    idle = [steps for layer in reporter.intervals[-1]["idle"] for steps in layer]
    assert any(steps is None or steps > 0 for steps in idle) and 0 in idle, (
        "an unbalanced router leaves some experts idle"
    )


@pytest.mark.parametrize(
    "scene",
    [
        Scene(2, 3, steps=STEPS, seed=2, replicas=3, sections=SECTIONS),
        Scene(2, "colocated", steps=STEPS, sections=SECTIONS),
    ],
    ids=["2 workers, 3 hosts with replicas", "2 workers, colocated"],
)
def test_the_rows_of_all_workers_and_hosts_add_up(scene: Scene) -> None:
    members = run_gang(recounted, scene, world_size=scene.size)[: scene.workers]
    intervals = members[0]["intervals"]
    placement = placement_of(scene, scene_experts(scene))
    for index, row in enumerate(intervals):
        total = np.sum([member["own"][index] for member in members], axis=0)
        assert row["layers"] == total.tolist() == members[1]["intervals"][index]["layers"]
        hosts, tokens = row["hosts"], row["steps"] * 12 * MOE["context"] * 2
        assert len(hosts["rows"]) == MOE["layers"] and len(row["workers"]["wait_s"]) == scene.workers
        assert min(row["workers"]["wait_s"]) > 0
        for layer, rows in enumerate(hosts["rows"]):
            # padding travels too; what counts is at most what travelled
            assert sum(row["layers"][layer]) <= sum(rows) <= tokens
            empty = [host for host in range(placement.num_hosts) if not placement.slots(layer, host)]
            assert not any(rows[host] for host in empty)
        assert max(hosts["bytes"]) > 0
    busy = np.sum([row["hosts"]["busy_s"] for row in intervals], axis=0)
    np.testing.assert_allclose(busy, members[0]["busy_s"], rtol=1e-9, err_msg="each second is in one interval")


@pytest.mark.covers("EXP-19")
def test_rows_and_bytes_of_hosts_are_those_that_travelled() -> None:
    """One worker, two hosts, one micro-batch, the evaluation after the row: all values are known exactly."""
    quiet = (("loop", (("log_every", 3), ("eval_every", 100))),)
    scene = Scene(1, 2, micro=12, steps=3, sections=quiet)
    made = run_gang(recounted, scene, world_size=scene.size)[0]
    first, row = made["intervals"]
    assert (first["steps"], row["steps"]) == (1, 2)
    rows, choices = np.array(row["hosts"]["rows"]), np.array(row["layers"])
    assert rows.sum(1).tolist() == [2 * 12 * MOE["context"] * 2] * MOE["layers"]  # padding travels too
    assert (choices.sum(1) < rows.sum(1)).all()
    there_and_back, both_passes, float64 = 2, 2, 8
    assert row["hosts"]["bytes"] == (rows.sum(0) * there_and_back * both_passes * MOE["width"] * float64).tolist()
    *_, metrics = [row for row in made["metrics"] if row["kind"] == "train"]
    assert metrics["host_imbalance"] == rows.sum(0).max() / rows.sum(0).mean()
    assert metrics["transport_s"] == pytest.approx(row["workers"]["wait_s"][0] / 2)


def test_a_resumed_run_counts_every_step_once(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "windows")
    unbroken = Scene(1, 0, steps=STEPS, every=7, run_path=run.path, sections=SECTIONS)
    whole = act(0, unbroken)["intervals"]
    again = act(0, Scene(1, 0, steps=STEPS, from_step=7, run_path=run.path, sections=SECTIONS))["intervals"]
    assert [row["step"] for row in again] == [10, 12]
    assert again == whole[2:]


def test_the_file_of_a_run_has_a_row_for_each_interval_up_to_its_last_step(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "traced")
    loop = {"max_steps": 8, "log_every": 2, "micro_batch_size": 8}
    session = make_session(MOE, DATA, loop=loop, experts={"num_experts": 4, "top_k": 2})
    reporter = RankZeroReporter(run, attempt=run.next_attempt(this_process()), observers=[], report_progress=None)
    session.loop(reporter=reporter, should_stop=lambda: False).run(session.state)
    rows = run.read_rows(run.experts)
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 8]
    assert all(len(layer) == 4 and min(layer) >= 0 for row in rows for layer in row["layers"])
    run.truncate_metrics(4)
    assert [row["step"] for row in run.read_rows(run.experts)] == [1, 2, 4]


def test_a_trace_holds_the_choices_of_the_first_micro_batch() -> None:
    loop = {"max_steps": 8, "log_every": 5, "micro_batch_size": 8}
    session = make_session(MOE, DATA, loop=loop, experts={"num_experts": 4, "top_k": 2, "trace_every": 3})
    module, seen = session.trainable.module, []
    router = next(part for part in module.modules() if isinstance(part, TopKRouter))
    router.register_forward_hook(lambda own, _, made: seen.append(made.indices_TK.clone()) if own.training else None)
    reporter, _ = train(session)
    assert sorted(reporter.traces) == [3, 6]
    with np.load(io.BytesIO(reporter.traces[6]), allow_pickle=False) as trace:
        assert trace["indices"].shape == trace["weights"].shape == (MOE["layers"], 8, MOE["context"], 2)
        assert trace["valid"].shape == (8, MOE["context"]) and not trace["valid"].all() and trace["step"] == 6
        np.testing.assert_allclose(trace["weights"].sum(-1), 1.0, atol=1e-6)
        before = 4 * 2 + 1  # micro-batches: 70 rows are four windows of 16 and one of 6
        assert trace["indices"][0].reshape(-1, 2).tolist() == seen[before].tolist()
    plain = make_session(MOE, DATA, loop=loop, experts={"num_experts": 4, "top_k": 2})
    quiet, _ = train(plain)
    assert quiet.traces == {} and quiet.losses == reporter.losses
