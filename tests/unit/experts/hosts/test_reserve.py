"""How the driver starts the directory of a run's hosts, with the parts of Ray that it uses played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from experts.hosts.reserve import start_hosts
from raytrain.config.sections import RetryConfig
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder

NODE = "ab" * 28


class Died(ray.exceptions.RayError):
    """The directory has died."""


def plan_of(hosts: Any) -> Any:
    values = {"hosts": hosts, "device": "cpu", "threads": 2, "workers": 3, "precision": "fp32"}
    return SimpleNamespace(**{name: Resolved(value, "a test") for name, value in values.items()})


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

    def start(hosts: Any) -> tuple[Any, dict[str, Any]]:
        retry = RetryConfig(host_wait_s=7.0, host_silence_s=9.0)
        begun: list[str] = []
        made = start_hosts(plan_of(hosts), run, local=True, interface="lo", retry=retry, begin=begun.append)
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


@pytest.mark.parametrize("value", [0, "none"])
def test_without_hosts_nothing_is_started(started: Any, value: Any) -> None:
    hosts, given = started(value)
    assert hosts.connection is None and given == {"begun": []}
    assert hosts.changes() == [] and hosts.on_node(NODE) == []
    hosts.workers_started()
    hosts.close()
