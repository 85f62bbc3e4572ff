"""How the driver starts the directory of a run's hosts, with the parts of Ray that it uses played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from experts.hosts import reserve
from experts.hosts.reserve import ASK_EVERY_S, LEFT_S, HostsOfRun, start_hosts
from raytrain.config.sections import RetryConfig
from raytrain.execution.trainer import worker_resources
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.runs.folder import RunFolder

NODE = "ab" * 28


class Died(ray.exceptions.RayError):
    """The directory has died."""


def plan_of(hosts: Any, *, device: str = "cpu", per_gpu: int = 1) -> Any:
    values = {"hosts": hosts, "device": device, "threads": 2, "workers": 3, "precision": "fp32", "placement": "PACK",
              "accelerator": "cuda"}  # fmt: skip
    choices = {name: Resolved(value, "a test") for name, value in values.items()}
    shared = SimpleNamespace(value=lambda name, default: per_gpu, per_gpu=per_gpu)
    return SimpleNamespace(**choices, per_gpu=per_gpu, gpu_share=Plan.gpu_share.fget(shared))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`started(hosts)`: the hosts of a run, and the options and arguments that the directory was created with."""
    given: dict[str, Any] = {}

    def gone(_asked: Any) -> None:
        raise Died

    def remote(_actor: Any) -> Any:
        def create(**more: Any) -> Any:
            given["arguments"] = more
            call = SimpleNamespace(remote=lambda: None)
            return SimpleNamespace(start=call, ready_hosts=call, report=SimpleNamespace(remote=lambda: "asked"))

        return SimpleNamespace(options=lambda **more: given.update(options=more) or SimpleNamespace(remote=create))

    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr("ray.get", gone)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
    run = RunFolder.create(str(tmp_path), "a")

    def start(hosts: Any, **machine: Any) -> tuple[Any, dict[str, Any]]:
        retry = RetryConfig(host_wait_s=7.0, host_silence_s=9.0)
        begun: list[str] = []
        made = start_hosts(plan_of(hosts, **machine), run, local=True, interface="lo", retry=retry, begin=begun.append)
        return made, {**given, "begun": begun}

    return start


def test_the_directory_lives_on_the_drivers_node(started: Any) -> None:
    """It holds no place in the cluster, and any other node may be lost."""
    hosts, given = started(2)
    pinned = given["options"]["scheduling_strategy"]
    assert (pinned.node_id, pinned.soft, given["options"]["num_cpus"]) == (NODE, False, 0)
    assert given["options"]["max_concurrency"] > 2 * 3 + 2 * 2, "waiting calls of each worker and host block no other"
    arguments = given["arguments"]
    assert (arguments["hosts"], arguments["threads"]) == (2, 2)
    assert (arguments["host_wait_s"], arguments["host_silence_s"]) == (7.0, 9.0)
    assert given["begun"] == ["starting the expert hosts"] and not hosts.reserved


@pytest.mark.parametrize(
    ("device", "per_gpu", "share"), [("cpu", 1, 0), ("cuda", 1, 1), ("cuda", 2, 0.5), ("cuda", 3, 0.3333)]
)
def test_hosts_reserve_what_workers_do(started: Any, tmp_path: Path, device: str, per_gpu: int, share: float) -> None:
    """On GPUs: that part of one; Ray counts in ten-thousandths, so that three thirds fit."""
    _, given = started(2, device=device, per_gpu=per_gpu)
    assert given["arguments"]["gpus"] == share
    plan = plan_of(2, device=device, per_gpu=per_gpu)
    request = reserve.request_of(plan, str(tmp_path))
    assert request.workers == [worker_resources(plan, local=False)] * 3
    resources = [*request.hosts, *request.workers]
    assert len(resources) == 5 and {one.get("GPU", 0) for one in resources} == {share}


@pytest.mark.parametrize(("per_gpu", "through_host"), [(1, False), (2, True)])
def test_colocated_experts_on_shared_gpus_exchange_rows_through_the_host(
    started: Any, per_gpu: int, through_host: bool
) -> None:
    hosts, _ = started("colocated", device="cuda", per_gpu=per_gpu)
    assert (hosts.connection.through_host, hosts.connection.device) == (through_host, "cuda")


@pytest.mark.parametrize("value", [0, "none"])
def test_without_hosts_nothing_is_started(started: Any, value: Any) -> None:
    hosts, given = started(value)
    assert hosts.connection is None and given == {"begun": []}
    assert hosts.changes() == [] and hosts.on_node(NODE) == []
    hosts.workers_started()
    hosts.close()


def test_a_lost_node_names_the_hosts_it_had_also_where_one_has_started_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer of the directory is taken when it is there, not at the next question."""
    now, done = 100.0, list[str]()
    answers = iter([({}, []), ({0: "a", 1: "b"}, ["a line"]), ({0: "b", 1: "b"}, [])])
    monkeypatch.setattr(reserve.time, "monotonic", lambda: now)
    monkeypatch.setattr("ray.wait", lambda asked, timeout: ([one for one in asked if one in done], []))
    monkeypatch.setattr("ray.get", lambda _asked: next(answers))
    asked: list[str] = []
    report = SimpleNamespace(remote=lambda: asked.append(f"question {len(asked)}") or asked[-1])
    hosts = HostsOfRun(None, directory=SimpleNamespace(report=report))
    for _ in range(2):  # the first comes before a host is there, the second says where they are
        now += ASK_EVERY_S
        assert hosts.changes() == [] and hosts.on_node("a") == [], "not answered yet"
        done.append(asked[-1])
        now += 0.1
        lines = hosts.changes()
    assert (lines, len(asked)) == (["a line"], 2)
    assert (hosts.on_node("a"), hosts.on_node("b"), hosts.on_node("c")) == ([0], [1], [])
    now += ASK_EVERY_S
    done.append(f"question {len(asked)}")
    assert hosts.changes() == []
    assert (hosts.on_node("a"), hosts.on_node("b")) == ([0], [0, 1]), "the host has left, its node is not yet lost"
    now += LEFT_S
    assert (hosts.on_node("a"), hosts.on_node("b")) == ([], [0, 1])
