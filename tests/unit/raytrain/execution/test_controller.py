"""What the controller process records of workers that died, and tells the driver."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from raytrain.errors import RunError
from raytrain.execution import controller
from raytrain.execution.controller import START_FAILURES, FaultWriter, on_loopback
from raytrain.execution.driver_channel import RESTARTING
from raytrain.runs.faults import Fault, read_faults, write_fault
from raytrain.runs.folder import RunFolder

OWNER = {"host": "h", "pid": 1, "start": 5}


PROGRESS = {"phase": "training", "step": 299, "max_steps": 400, "row": {"step": 300}}
"""What rank 0 has reported last."""

#: As Ray writes it.
DIED = """A worker health check failed.
Worker info: WorkerStatus(...)
The actor died unexpectedly before finishing this task.
	class_name: RayTrainWorker
	actor_id: 3e1
	pid: 4711
	ip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed
by the OOM killer due to high memory usage, (2) ray stop --force is called."""


class WorkerHealthCheckFailedError(Exception):
    """As Ray Train names the death of a worker."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    nodes = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True},
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": False},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(controller, "_WORKER_NODES", {0: "a", 1: "a", 2: "b"})
    monkeypatch.setattr("ray.get", lambda reference, timeout: dict(PROGRESS))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(controller, "oom_kills", lambda: 0)
    monkeypatch.setattr(controller, "_OOM_KILLS", [0])
    made = RunFolder.create(str(tmp_path), "a")
    made.next_attempt(OWNER)
    return made


def writer(run: RunFolder, told: list[Any] | None = None) -> FaultWriter:
    def report(phase: str, **fields: Any) -> None:
        told.append((phase, fields)) if told is not None else None

    channel = SimpleNamespace(report_group=SimpleNamespace(remote=report), progress=SimpleNamespace(remote=lambda: 0))
    return FaultWriter(run.path, OWNER, channel)


def test_a_worker_on_a_lost_node_is_the_cause_and_names_the_node(run: RunFolder) -> None:
    told: list[Any] = []
    collective = Fault(1, 0, 5, "CollectiveFailed", "gloo: closed", "trace", "", False, False, 0, 1.0)
    write_fault(run, collective)
    errors = {0: RuntimeError("gloo: closed"), 1: RuntimeError("gloo: reset"), 2: RuntimeError("unreachable")}
    writer(run, told).after_exception(None, errors)
    (fault,) = read_faults(run, since=1)
    assert (fault.rank, fault.error, fault.message) == (2, "WorkerDied", "the node 10.0.0.2 of rank 2 was lost")
    assert fault.traceback == "", "deaths are not compared"
    assert told == [(RESTARTING, {})]
    assert run.read_json("faults/0001-rank00000.json")["message"] == "gloo: closed", "the worker's own record stays"


def test_workers_on_loopback_addresses_need_a_store_on_loopback_only() -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": address}
        for name, address in (("a", "127.0.0.1"), ("b", "127.0.0.2"), ("c", "10.0.0.3"))
    ]
    assert on_loopback(nodes, {0: "a", 1: "b"}) and not on_loopback(nodes, {0: "a", 1: "c"})
    assert not on_loopback(nodes, {0: "a", 1: "unknown"})


def test_a_dead_process_on_a_live_node_is_a_death_with_its_pid_and_the_step_that_it_was_in(run: RunFolder) -> None:
    run.append_event({"kind": "attempt", "attempt": 1, "from_step": 276})
    writer(run).after_exception(None, {1: WorkerHealthCheckFailedError(DIED), 0: RuntimeError("not a death")})
    fault = Fault(**run.read_json("faults/0001-rank00001.json"))
    assert (fault.rank, fault.error) == (1, "WorkerDied")
    assert fault.message == "the process of rank 1 (pid 4711) ended unexpectedly"
    assert (fault.step, fault.from_step) == (301, 276)
    assert run.read_json("faults/0001-rank00000.json")["step"] is None, "errors are compared by step"


def test_a_death_before_the_first_step_of_an_attempt_has_no_step(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in the channel is that of the attempt before; a checkpoint without COMPLETE would not be loaded."""
    monkeypatch.setattr("ray.get", lambda reference, timeout: {"phase": "setting up the workers", "step": 299})
    for step, complete in ((276, True), (286, True), (296, False)):
        run.write_text(f"checkpoints/step_{step:08d}/manifest.json", "{}")
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "") if complete else None
    writer(run).after_exception(None, {0: WorkerHealthCheckFailedError(DIED)})
    (fault,) = read_faults(run, since=1)
    assert (fault.step, fault.from_step) == (None, 286)


def test_a_death_while_the_kernel_kills_for_memory_says_so_for_this_machine_only(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "oom_kills", lambda: 1)
    monkeypatch.setattr(controller, "_WORKER_NODES", {0: "a", 1: "c"})
    writer(run).after_exception(None, dict.fromkeys((0, 1), WorkerHealthCheckFailedError(DIED)))
    here, elsewhere = (run.read_json(f"faults/0001-rank0000{rank}.json")["message"] for rank in (0, 1))
    assert "OOM killer" in here and elsewhere == "the process of rank 1 (pid 4711) ended unexpectedly"


def test_workers_that_never_take_an_attempt_end_the_run(run: RunFolder) -> None:
    """A replaced group takes a new number; the same number again and again means that none can start."""
    watcher = writer(run)
    for _ in range(START_FAILURES):
        watcher.after_exception(None, {0: RuntimeError("no import")})
    with pytest.raises(RunError, match=f"failed {START_FAILURES} times before they could start"):
        watcher.after_exception(None, {0: RuntimeError("no import")})
    other = writer(run)
    for _ in range(3 * START_FAILURES):
        run.next_attempt(OWNER)
        other.after_exception(None, {0: RuntimeError("lost")})


def test_failures_to_start_of_several_attempts_are_not_added_up(run: RunFolder) -> None:
    """Over a long run each attempt may fail a few times before its number is taken."""
    watcher = writer(run)
    for _ in range(3):
        for _ in range(START_FAILURES):
            watcher.after_exception(None, {0: RuntimeError("no import")})
        run.next_attempt(OWNER)
    for _ in range(START_FAILURES):
        watcher.after_exception(None, {0: RuntimeError("no import")})
    with pytest.raises(RunError, match="before they could start"):
        watcher.after_exception(None, {0: RuntimeError("no import")})


def test_nothing_is_written_for_another_command(run: RunFolder) -> None:
    run.next_attempt({**OWNER, "pid": 2})
    with pytest.raises(RunError, match="another command has taken over"):
        writer(run).after_exception(None, {0: RuntimeError("lost")})
    assert read_faults(run, since=1) == []


@pytest.mark.parametrize(("own", "expected"), [("1", "0,1"), (None, None)])
def test_on_rocm_a_worker_sees_the_gpus_of_all_workers_of_its_node(
    monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str | None
) -> None:
    """As on CUDA: Ray Train shares CUDA_VISIBLE_DEVICES only, and HIP reads its own variable first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", own)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "203.0.113.9")
    assert controller._set_interface(None) == "a"
    assert os.environ.get("HIP_VISIBLE_DEVICES") == expected and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_worker_leaves_a_group_of_nccl_by_abort_and_waits_for_it_at_most_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`destroy_process_group` would wait for calls that need a peer which is gone."""
    called, backend = [], "nccl"

    def abort() -> None:
        called.append("abort")
        threading.Event().wait()  # as ncclCommAbort can

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: called.append("destroy"))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(controller, "ABORT_S", 0.1)
    controller._leave_group()
    backend = "gloo"
    controller._leave_group()
    assert called == ["abort", "destroy"]
