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
from raytrain.execution.controller import START_FAILURES, FaultWriter
from raytrain.execution.driver_channel import RESTARTING
from raytrain.runs.faults import Fault, read_faults, write_fault
from raytrain.runs.folder import RunFolder

OWNER = {"host": "h", "pid": 1, "start": 5}


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
    made = RunFolder.create(str(tmp_path), "a")
    made.next_attempt(OWNER)
    return made


def writer(run: RunFolder, told: list[Any] | None = None) -> FaultWriter:
    def report(phase: str, **fields: Any) -> None:
        told.append((phase, fields)) if told is not None else None

    return FaultWriter(run.path, OWNER, SimpleNamespace(report_group=SimpleNamespace(remote=report)))


def test_a_worker_on_a_lost_node_is_the_cause_and_names_the_node(run: RunFolder) -> None:
    told: list[Any] = []
    collective = Fault(1, 0, 5, "CollectiveFailed", "gloo: closed", "trace", "", False, False, 0, 1.0)
    write_fault(run, collective)
    errors = {0: RuntimeError("gloo: closed"), 1: RuntimeError("gloo: reset"), 2: RuntimeError("unreachable")}
    writer(run, told).after_exception(None, errors)
    (fault,) = read_faults(run, since=1)
    assert (fault.rank, fault.error, fault.message) == (2, "WorkerDied", "its node 10.0.0.2 was lost")
    assert fault.traceback == "", "deaths are not compared"
    assert told == [(RESTARTING, {})]
    assert run.read_json("faults/0001-rank00000.json")["message"] == "gloo: closed", "the worker's own record stays"


def test_a_dead_process_on_a_live_node_is_a_death_with_rays_reason(run: RunFolder) -> None:
    writer(run).after_exception(None, {1: WorkerHealthCheckFailedError("exit by SIGKILL\nmore")})
    (fault,) = read_faults(run, since=1)
    assert (fault.rank, fault.error, fault.message) == (1, "WorkerDied", "exit by SIGKILL")


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
