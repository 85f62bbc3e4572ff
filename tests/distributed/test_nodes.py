"""More than one node: the same kind of job on two nodes of a cluster that runs already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain.plan.shares import Shares


@pytest.mark.timeout(150)
def test_one_job_on_two_nodes(answer_of: Callable[..., Any], tmp_path: Path) -> None:
    answer = answer_of("two_nodes.py", tmp_path / "runs", timeout=120)
    assert answer["status"] == "done"
    assert len(answer["losses"]) == 12 and answer["losses"][-1] < answer["losses"][0]
    plan = json.loads((Path(answer["run"]) / "plan.json").read_text())
    # `auto` on a cluster without GPUs is one worker per node, spread over them
    assert plan["choices"]["workers"]["value"] == 2
    assert "SPREAD" in plan["choices"]["placement"]["value"]
    assert answer["interfaces"].count("True lo =lo") == 2, "the one with the addresses by which Ray reaches the nodes"
    seen, unseen = answer["checks"]
    assert seen[:2] == ["data.path", "ok"]
    assert unseen[:2] == ["save.dir", "fail"] and "127.0.0.1" in unseen[2] and "127.0.0.2" in unseen[2]


@pytest.mark.timeout(240)
def test_nodes_of_unequal_speed_get_unequal_shares_and_train_the_same_steps(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    answer = answer_of("slow_nodes.py", tmp_path / "runs", timeout=220)
    assert [answer[name]["status"] for name in ("auto", "equal")] == ["done"] * 2
    run = Path(answer["auto"]["run"])
    planned = json.loads((run / "plan.json").read_text())["choices"]["shares"]
    assert "measured at the start" in planned["how"]
    record = json.loads((run / "memory_probe.json").read_text())["shares"]
    shares = Shares.from_json(record["value"])
    assert [len(span) for span in shares.spans(12, micro_batch=2)] == [6, 4, 2], record["reason"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["value"] for row in events if row.get("what") == "shares"] == [record["value"]]
    assert len(answer["auto"]["losses"]) == 8
    np.testing.assert_allclose(answer["auto"]["losses"], answer["equal"]["losses"], rtol=1e-4)


@pytest.mark.covers("EXP-07")
@pytest.mark.timeout(240)
def test_unequal_hosts_start_with_experts_in_proportion_to_their_measured_speed(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """One node with a single core and slow instructions, one with all cores; no rebalancing."""
    answer = answer_of("unequal_hosts.py", tmp_path / "runs", timeout=220)
    assert answer["status"] == "done"
    events = [json.loads(line) for line in (Path(answer["run"]) / "events.jsonl").read_text().splitlines()]
    (placed,) = [row for row in events if row["kind"] == "placement"]
    assert (placed["step"], placed["version"]) == (1, 1)
    cores = [int(kind.rpartition(", ")[2].split()[0]) for kind in placed["kinds"]]
    slow, fast = cores.index(min(cores)), cores.index(max(cores))
    assert cores[slow] == 1 < cores[fast]
    ratio = placed["speeds"][fast] / placed["speeds"][slow]
    assert ratio > 1.2, "equal hosts show nothing"
    for layer in placed["layers"]:
        homes = [hosts[0] for hosts in layer["copies"]]
        assert len(homes) == 12 and homes.count(fast) > homes.count(slow)
        assert abs(homes.count(slow) - 12 / (1 + ratio)) <= 1, (ratio, homes)
    seen = [path.read_text().splitlines() for path in (Path(answer["run"]) / "telemetry").glob("*.jsonl")]
    assert len(seen) == 2, "a host samples the node that has no worker"
    assert all({"time", "devices", "processes", "step"} <= json.loads(rows[0]).keys() for rows in seen)
    assert len({json.loads(row)["time"] for rows in seen for row in rows}) == sum(map(len, seen)), "and no other"


@pytest.mark.timeout(320)
def test_a_search_measures_on_the_device_with_the_least_memory_so_that_the_batch_fits_all(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """An H100 that would be fastest with 16 rows, and a T4 with room for 4; the run has a worker on each."""
    answer = answer_of("two_kinds.py", tmp_path / "runs", timeout=300)
    assert answer["status"] == "done"
    rows = [json.loads(line) for line in (Path(answer["sweep"]) / "trials.jsonl").read_text().splitlines()]
    assert sorted({row["trial"] for row in rows}) == list(range(1, len(rows) + 1))
    assert answer["seen"] == {"T4": sorted({row["micro_batch_size"] for row in rows})}, "each trial ran on its node"
    outcome = json.loads((Path(answer["sweep"]) / "tune.json").read_text())
    assert outcome["values"]["loop.micro_batch_size"] == 4
    each, ready, there, refused = answer["required"]  # of scale.accelerator a100, where Ray has an A100
    assert answer["inferred"], "an actor of inference runs on another type than it needs"
    assert each["accelerator_type:A100"] == 0.001 and each["GPU"] == 1 and ready and there
    assert "got b200" in refused and "A100" in refused


@pytest.mark.timeout(260)
def test_jobs_with_hosts_take_turns_and_give_back_what_they_cannot_use(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Each needs three of four CPUs: had each kept its two hosts, both would wait for a worker forever. The driver of
    another was killed while it held the turn to reserve."""
    answer = answer_of("two_jobs.py", tmp_path / "runs", timeout=250)
    for name in ("first", "second"):
        assert answer[name]["code"] == 0, answer[name]["out"]
        assert "done after 10 steps" in answer[name]["out"]
    # the second job took the place of the first one's lost worker, which gave its hosts back and waited for its turn
    assert "the expert hosts are given back" in answer["first"]["out"]
    (run,) = (tmp_path / "runs").glob("first-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 11))
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("expert_hosts") == 2, "given back, and started again"


@pytest.mark.timeout(560)
def test_commands_that_wait_on_a_full_cluster_say_what_is_missing_and_then_run(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Another program holds all CPUs of both nodes."""
    answer = answer_of("full_nodes.py", tmp_path / "full", timeout=540)
    for verb, need in (
        ("train", "1 worker needs 2 CPU"), ("tune", "1 trial needs 2 CPU"),
        ("infer", "1 worker needs 2 CPU"),
    ):  # fmt: skip
        said = [line for line in answer[verb]["waiting"].splitlines() if line.startswith("still ")]
        assert said and said[-1].endswith(f": {need}; of 2 nodes, free are 0 CPU on 2 of them: room for 0"), said
        assert answer[verb]["code"] == 0, answer[verb]["out"]


@pytest.mark.covers("NODE-08")
@pytest.mark.timeout(400)
def test_an_elastic_run_goes_on_with_fewer_workers_and_grows_when_a_node_arrives(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Each step trains on the samples that it has with one worker, to rounding: no sample is lost or seen twice."""
    answer = answer_of("elastic_nodes.py", tmp_path / "runs", timeout=390)
    assert answer["code"] == 0, answer["out"]
    (run,) = (tmp_path / "runs").glob("nodes-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    attempts = [(row["workers"], row["from_step"]) for row in events if row["kind"] == "attempt"]
    assert [workers for workers, _ in attempts] == [2, 1, 2]
    assert attempts[0][1] == 0 and attempts[1][1] in range(20, 51, 5)
    assert attempts[2][1] >= 50, "the workers saved before the run grew"
    changes = [row for row in events if row.get("what") == "workers"]
    assert [(row["before"], row["value"]) for row in changes] == [(2, 1), (1, 2)]
    assert all("losses equal to rounding" in row["reason"] for row in changes)
    assert len([row for row in events if row["kind"] == "fault"]) == 1, "to grow is no fault"
    assert json.loads((run / "plan.json").read_text())["choices"]["workers"]["value"] == 2
    assert "attempt 2 did not fail; restarted from the checkpoint of step" in answer["out"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, 91))
    alone = {row["step"]: row["loss"] for row in answer["alone"]}
    np.testing.assert_allclose([row["loss"] for row in trained], [alone[step] for step in range(1, 91)], rtol=1e-4)
    account = json.loads((run / "result.json").read_text())["time"]
    assert account["restart"] > 0, "what the two changes took"


@pytest.mark.timeout(400)
def test_a_run_continues_after_nodes_under_its_workers_and_hosts_are_lost(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """First no other node has room, until one is added; then another has."""
    answer = answer_of("lost_nodes.py", tmp_path / "runs", timeout=390)
    assert answer["code"] == 0, answer["out"]
    (run,) = (tmp_path / "runs").glob("nodes-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 91))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lost = [row for row in events if row["kind"] == "node_lost"]
    assert [row["node"] for row in lost] == ["127.0.0.2", "127.0.0.3"]
    for row in lost:
        assert len(row["ranks"]) + len(row["hosts"]) == 2, f"one of three has room on the head: {row}"
        named = [f"rank {rank}" for rank in row["ranks"]] + [f"expert host {host}" for host in row["hosts"]]
        assert f"node {row['node']} was lost: {', '.join(named)} ran there; " in answer["out"]
    messages = [row["message"] for row in events if row["kind"] == "fault"]
    for row in lost:
        named = [one for one in messages if f"node {row['node']}" in one and one.endswith("was lost")]
        assert named or not row["ranks"], "not the collective that failed because of it"
    first = next(row for row in events if row["kind"] == "fault" and row["message"].endswith("was lost"))
    assert first["step"] is not None and f"attempt 1 failed after step {first['step'] - 1}: the node" in answer["out"]
    assert "gloo/" not in answer["out"] and "Traceback" not in answer["out"], answer["out"]
    assert "state-dump" not in answer["out"], "Ray's own pages about a dead node"


@pytest.mark.timeout(240)
def test_every_node_of_a_cluster_is_checked_and_trains(answer_of: Callable[..., Any], tmp_path: Path) -> None:
    answer = answer_of("checked_nodes.py", tmp_path / "runs", timeout=220)
    report = answer["report"]
    assert answer["code"] == 0, report
    assert list(report["nodes"]) == ["127.0.0.1", "127.0.0.2"] == list(report["rates"])
    for node in report["nodes"]:
        assert [check["name"] for check in report["checks"] if check["node"] == node][:2] == [
            "storage",
            "shared_storage",
        ]
    trained = [row for row in report["training"] if row["what"] == "training"]
    assert {row["rank"] for row in trained} == {0, 1}
    (moved,) = [check for check in report["checks"] if check["name"] == "collectives"]
    assert moved["status"] == "ok" and moved["seen"].startswith("2 workers over gloo")
    assert answer["left"] == [], "nothing is left where the nodes wrote"
    rooms = [[one for one in told["checks"] if one["name"] == "room"] for _, told in answer["rooms"]]
    assert [[one["status"] for one in found] for found in rooms] == [["ok"], ["fail"]], answer["rooms"]
    assert [code for code, _ in answer["rooms"]] == [0, 1]
    assert "scale.threads: got 3, expected at most 1" in rooms[1][0]["seen"]
    assert answer["lost"]["code"] == 1 and "did not answer" in answer["lost"]["err"], answer["lost"]


@pytest.mark.timeout(240)
def test_a_stopped_worker_of_another_node_is_ended_and_a_node_under_which_two_died_is_left_out(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    answer = answer_of("faulty_node.py", tmp_path / "runs", timeout=220)
    assert answer["code"] == 0, answer["out"]
    (run,) = (tmp_path / "runs").glob("nodes-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["attempt"] for row in events if row["kind"] == "attempt"] == [1, 2, 3]
    (ended,) = [row for row in events if row["kind"] == "hang_ended"]
    assert "has not responded for" in ended["reason"] and ended["reason"] in answer["out"]
    (left_out,) = [row for row in events if row["kind"] == "warning"]
    assert (left_out["what"], left_out["address"]) == ("node_left_out", "127.0.0.2")
    assert f"warning: {left_out['reason']}" in answer["out"] and "127.0.0.2 failed 2 times" in left_out["reason"]
    faults = [json.loads(path.read_text()) for path in sorted((run / "faults").glob("*.json"))]
    assert {fault["node"] for fault in faults if fault["error"] == "WorkerDied"} == {left_out["node"]}
    starts = {call: {path for name, path in answer["places"].items() if name.endswith(f"-{call}")} for call in (1, 21)}
    assert "127.0.0.2" in starts[1] and "127.0.0.2" not in starts[21] and starts[21], answer["places"]


@pytest.mark.timeout(240)
@pytest.mark.covers("NODE-02", "NODE-03", "CLI-24")
def test_four_nodes_get_a_worker_each_and_sixteen_slots_a_process_that_sees_its_own(
    answer_of: Callable[..., Any], tmp_path: Path
) -> None:
    answer = answer_of("four_nodes.py", tmp_path / "runs", timeout=220)
    nodes = [f"127.0.0.{n}" for n in range(1, 5)]
    assert answer["status"] == "done"
    events = [json.loads(line) for line in (Path(answer["run"]) / "events.jsonl").read_text().splitlines()]
    (attempt,) = [row for row in events if row["kind"] == "attempt"]
    assert sorted(rank["node"] for rank in attempt["ranks"]) == nodes, "one on each"
    assert len({rank["pid"] for rank in attempt["ranks"]}) == 4
    (account,) = [row for row in events if row["kind"] == "account"]
    assert len(account["busy"]) == 4 and all(0 < share <= 1 for share in account["busy"]), "none is idle"
    for rank, share in zip(attempt["ranks"], account["busy"], strict=True):
        assert f"{rank['node']}</td>" in answer["page"] and f"{share:.0%}</td>" in answer["page"]
    assert (answer["workers"], answer["mode"]) == (16, "multi_gpu")
    places = [(node, visible) for node, visible in answer["places"]]
    assert sorted(places) == [(node, str(slot)) for node in nodes for slot in range(4)], "each slot once"
