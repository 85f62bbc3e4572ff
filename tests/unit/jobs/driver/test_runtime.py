"""Which Ray a command uses, how it starts a private cluster, and what it reports if Ray fails."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.environment import ray_environment
from cluster.preflight import JOB_ENVIRONMENT
from cluster.ray_runtime import PATIENT
from jobs.driver.runtime import cluster_address, connected
from raytrain.errors import ClusterLost, InputError, ResourcesTaken, RunError
from raytrain.execution.ray_start import start_ray


@pytest.mark.parametrize(
    ("configured", "environment", "connected", "address"),
    [
        (None, {}, False, "local"),
        ("10.0.0.4:6379", {}, False, "10.0.0.4:6379"),
        (None, {"RAY_ADDRESS": "10.0.0.9:6379"}, False, "local"),  # a shell's leftover is no wish of this job
        (None, {JOB_ENVIRONMENT: "{}"}, False, "auto"),
        (None, {JOB_ENVIRONMENT: "{}", "RAY_ADDRESS": "10.0.0.9:6379"}, False, "10.0.0.9:6379"),
        ("here:1", {JOB_ENVIRONMENT: "{}"}, False, "here:1"),
        (None, {}, True, "connected"),
        ("10.0.0.4:6379", {}, True, "connected"),
    ],
)
def test_the_address_of_the_cluster(
    configured: str | None, environment: dict[str, str], connected: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (JOB_ENVIRONMENT, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    assert cluster_address(configured) == address


@pytest.mark.parametrize("ours", [True, False])
def test_threads_can_tell_that_ray_has_ended(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """A thread that calls Ray while it shuts down starts another cluster, or ends the process."""
    ended_flags: list[Any] = []
    ray = SimpleNamespace(
        is_initialized=lambda: not ours,
        shutdown=lambda: ended_flags.append(cluster.ended.is_set()),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
        nodes=list,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setattr("jobs.driver.runtime.start_ray", lambda *given, **more: None)
    monkeypatch.setattr("jobs.driver.runtime.answers", lambda address: True)
    monkeypatch.setitem(sys.modules, "raytrain.execution.trainer", SimpleNamespace(quiet_ray=lambda: None))
    address = "10.0.0.4:6379" if ours else "connected"
    with connected(address, num_cpus=1, num_gpus=0, verbose=False) as cluster:
        assert not cluster.ended.is_set()
    assert ended_flags == ([True] if ours else []) and cluster.ended.is_set() is ours


@pytest.mark.parametrize(
    ("error", "raised", "shutdowns"),
    [
        (ClusterLost("Ray's process gcs_server died"), ClusterLost, 1),
        (ResourcesTaken("no room"), ResourcesTaken, 0),
        (LookupError("the GCS is gone"), RunError, 0),  # stands for a RayError
        (RunError("the model is wrong"), RunError, 0),
    ],
)
def test_a_notebook_that_loses_its_own_ray_gets_one_named_error_and_lives_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], shutdowns: int
) -> None:
    """Ray ends a process a minute after it lost its cluster, unless the connection is shut down."""
    ended: list[bool] = []
    ray = SimpleNamespace(
        shutdown=lambda: ended.append(cluster.ended.is_set()),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.4:6379"),
        nodes=list,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=LookupError))
    monkeypatch.setitem(sys.modules, "raytrain.execution.trainer", SimpleNamespace(quiet_ray=lambda: None))
    monkeypatch.setattr("jobs.driver.runtime.answers", lambda address: True)
    with pytest.raises(raised) as caught, connected("connected", num_cpus=1, num_gpus=0, verbose=False) as cluster:
        raise error
    assert str(error) in str(caught.value) and type(caught.value) is raised
    assert ended == [True] * shutdowns, "no thread may call Ray after it"
    assert ("call ray.init again, then resume" in str(caught.value)) is bool(shutdowns)
    monkeypatch.setattr("jobs.driver.runtime.answers", lambda address: False)
    with (
        pytest.raises(ClusterLost, match=r"10\.0\.0\.4:6379.*call ray\.init again"),
        connected("connected", num_cpus=1, num_gpus=0, verbose=False) as cluster,
    ):
        raise AssertionError("it was lost before")
    assert len(ended) == shutdowns + 1


NOTHING_PRIVATE = {
    "reread_environment": lambda: None,
    "allow_auto_connect": lambda allowed: None,
    "own_process_groups": lambda: contextlib.nullcontext([]),
    "free_agent_port": contextlib.nullcontext,
    "no_pages_of_daemons": contextlib.nullcontext,
    "only_needed_daemons": lambda *, logs: contextlib.nullcontext(),
    "first_look": lambda *, meanwhile, daemons: contextlib.nullcontext(),
}


class FailingRay:
    """Replaces `ray`: the first `failures` calls of `init` raise."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.calls, self.shutdowns = list(failures), [], 0

    def init(self, **options: Any) -> None:
        self.calls.append((options, {name: os.environ.get(name) for name in PATIENT}))
        if self.failures:
            raise self.failures.pop(0)

    def shutdown(self) -> None:
        self.shutdowns += 1

    def is_initialized(self) -> bool:
        return False


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FailingRay]:
    """Installs a `FailingRay`; the environment is restored at the end."""

    def install(*failures: Exception) -> FailingRay:
        ray = FailingRay(*failures)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=LookupError))
        monkeypatch.setitem(sys.modules, "raytrain.execution.trainer", SimpleNamespace(quiet_ray=lambda: None))
        monkeypatch.setitem(sys.modules, "raytrain.execution.ray_private", SimpleNamespace(**NOTHING_PRIVATE))
        return ray

    for name in (*PATIENT, *ray_environment(), "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in PATIENT:
        monkeypatch.delenv(name)
    return install


def test_the_handler_of_sigterm_outlives_the_start_of_ray(failing: Any) -> None:
    """Ray's own one exits with 15, where a stopped job has 130."""
    ray, mine = failing(ConnectionError("no GCS")), lambda number, frame: None
    ray_init = ray.init

    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ray_init(**options)

    ray.init = init
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with connected("local", num_cpus=1, num_gpus=0, verbose=False):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(ray.calls) == 2


def test_a_private_cluster_that_fails_to_start_gets_a_second_attempt_with_longer_limits(failing: Any) -> None:
    ray = failing(Exception("The current node timed out during startup."))
    daemon: list[subprocess.Popen[bytes]] = []

    def init_and_leave_a_daemon(**options: Any) -> None:
        if not daemon:
            code, pipe = "import sys; print(flush=True); sys.stdin.read()", subprocess.PIPE
            command = [sys.executable, "-c", code, options["_temp_dir"]]
            daemon.append(subprocess.Popen(command, stdin=pipe, stdout=pipe))
            assert daemon[0].stdout is not None and daemon[0].stdout.readline(), "its command line can be read"
        FailingRay.init(ray, **options)

    ray.init = init_and_leave_a_daemon
    with connected("local", num_cpus=1, num_gpus=0, verbose=False) as cluster:
        (first, limits), (second, longer) = ray.calls
        assert limits == dict.fromkeys(PATIENT) and longer == PATIENT
        assert first["_temp_dir"] != second["_temp_dir"] and os.path.dirname(second["_temp_dir"]) == cluster.folder
        with daemon[0] as left:
            assert left.wait(60) == -signal.SIGKILL, "a daemon of the first attempt would stay until the end"


def test_two_failed_attempts_are_one_error_with_both_causes_and_a_remedy(failing: Any) -> None:
    ray = failing(Exception("The node timed out.\nlong"), RuntimeError("Failed to start GCS"))
    with pytest.raises(RunError) as caught, connected("local", num_cpus=1, num_gpus=0, verbose=False):
        raise AssertionError("no cluster")
    text = str(caught.value)
    assert "The node timed out." in text and "Failed to start GCS" in text and "long" not in text
    assert "--verbose" in text and len(ray.calls) == 2
    assert not os.path.exists(os.path.dirname(ray.calls[0][0]["_temp_dir"])), "the private folder stays"


@pytest.mark.parametrize(("code", "attempts"), [(1, 1), (-signal.SIGXFSZ, 1), (-signal.SIGKILL, 2)])
def test_a_daemon_that_ended_of_itself_is_reported_at_once_in_its_own_words(
    failing: Any, code: int, attempts: int
) -> None:
    """Ray's error of it begins with an errno that it is not."""
    ray = failing()

    def init(**options: Any) -> None:
        logs = os.path.join(options["_temp_dir"], "session_2026/logs")
        os.makedirs(logs)
        with open(os.path.join(logs, "raylet.err"), "w") as file:
            file.write("no memory")
        ray.failures.append(ChildProcessError(code, "Ray's process raylet ended at once", "raylet"))
        FailingRay.init(ray, **options)

    ray.init = init
    with pytest.raises(RunError) as caught, connected("local", num_cpus=1, num_gpus=0, verbose=False):
        raise AssertionError("no cluster")
    text = str(caught.value)
    assert len(ray.calls) == attempts and "Errno" not in text
    assert text.count("Ray's process raylet ended at once; raylet.err ends with: no memory") == attempts


def test_an_import_that_fails_while_ray_starts_is_reported_as_itself(
    failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tries again after a RuntimeError, for half a minute, and any other looked like a machine without memory."""
    (tmp_path / "broken_import.py").write_text("\nraise RuntimeError('no docstring')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ray = failing()
    looks: list[Callable[[], object]] = []

    def first_look(*, meanwhile: Callable[[], object], daemons: Any) -> Any:
        looks.append(meanwhile)
        return contextlib.nullcontext()

    monkeypatch.setattr(sys.modules["raytrain.execution.ray_private"], "first_look", first_look)
    ray.init = lambda **options: looks[-1]()
    options = {"log_to_driver": False}
    with pytest.raises(RunError, match="did not start") as caught:
        start_ray("local", options, folder=str(tmp_path), imports="broken_import")
    text = str(caught.value)
    assert f"`import broken_import` failed in {tmp_path}/broken_import.py, line 2 (RuntimeError: no docstring)" in text
    assert len(looks) == 1 and ray.shutdowns == 1, "once, and nothing of it is left"


@pytest.mark.parametrize("error", [ConnectionError("no GCS"), Exception("timed out"), ValueError("bad address")])
def test_a_cluster_that_cannot_be_reached_is_a_wrong_address(
    failing: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.execution.ray_start.head_problem", lambda address: None)
    ray = failing(error)
    with (
        pytest.raises(InputError, match=rf"cluster\.address.*10\.0\.0\.4:6379.*{error}.*RAY_AUTH_TOKEN"),
        connected("10.0.0.4:6379", num_cpus=0, num_gpus=0, verbose=False),
    ):
        raise AssertionError("no cluster")
    assert len(ray.calls) == 1


def test_auto_is_the_address_that_ray_finds_judged_like_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try another address of this machine where a cluster listens on loopback, for minutes."""
    seen: list[str] = []
    monkeypatch.setattr(
        "raytrain.execution.ray_start.head_problem", lambda address: seen.append(address) or "no answer"
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:7")
    with (
        pytest.raises(InputError, match=r"cluster\.address: got 127\.0\.0\.1:7 \(no answer\)"),
        connected("auto", num_cpus=0, num_gpus=0, verbose=False),
    ):
        raise AssertionError("no cluster")

    def finds_none() -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("raytrain.execution.ray_private.running_address", finds_none)
    with (
        pytest.raises(
            InputError, match=r"got auto \(no Ray cluster runs on this machine, and RAY_ADDRESS is not set\)"
        ),
        connected("auto", num_cpus=0, num_gpus=0, verbose=False),
    ):
        raise AssertionError("no cluster")
    assert seen == ["127.0.0.1:7"]


def test_an_error_of_ray_that_nobody_handled_is_a_failed_run(failing: Any) -> None:
    failing()
    with (
        pytest.raises(RunError, match=r"LookupError: the GCS is gone.*[Rr]esume"),
        connected("local", num_cpus=1, num_gpus=0, verbose=False),
    ):
        raise LookupError("the GCS is gone")  # stands for a RayError


@pytest.mark.covers("NODE-04")
def test_of_several_addresses_the_first_that_answers_counts_and_ports_of_one_host_are_explained(
    run_cli: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = "127.0.0.1:50000,127.0.0.1:50001,127.0.0.1:50002,127.0.0.1:50003"
    for verb in ("train", "check"):
        refused = run_cli(verb, f"cluster.address={ports}", cwd=tmp_path)
        assert refused.code == 2, refused.text
        said = " ".join(refused.err.split())
        assert f"cluster.address: got {ports} (nothing answers there)" in said
        assert "these are 4 ports of one host, 127.0.0.1: where they are tunnels to as many machines, only" in said
        assert "ray start --address=HEAD:6379" in said and not (tmp_path / "runs").exists()
    with pytest.raises(InputError) as apart:
        cluster_address("127.0.0.1:50000,127.0.0.2:50000")
    assert "of one host" not in str(apart.value)
    nothing = "nothing answers there"
    monkeypatch.setattr("jobs.driver.runtime.head_problem", lambda one: None if one == "10.0.0.5:6379" else nothing)
    assert cluster_address("10.0.0.4:6379, 10.0.0.5:6379,10.0.0.6:6379") == "10.0.0.5:6379"
    assert cluster_address("10.0.0.4:6379") == "10.0.0.4:6379", "one address is tried where Ray connects to it"


class Silent(http.server.BaseHTTPRequestHandler):
    """Refuses every request, and prints none."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.covers("NODE-04")
def test_an_address_where_something_else_than_ray_listens_is_refused_at_once(
    run_cli: Callable[..., Any], tmp_path: Any
) -> None:
    """Ray itself would wait for minutes, and abort the process in the end. Not even a part of it is loaded."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        for verb in ("train", "check"):
            refused = run_cli(verb, f"cluster.address={address}", cwd=tmp_path)
            assert refused.code == 2, refused.text
            said = [line for line in refused.err.splitlines() if line]
            assert said[-1].startswith(
                f"error: cluster.address: got {address} (something else than the head of a Ray cluster listens there)"
            )
            assert "Traceback" not in refused.text and "gcs" not in refused.text, refused.text
            assert not (tmp_path / "runs").exists()
        refused = run_cli("submit", "status", "--address", f"http://{address}", cwd=tmp_path)
        server.shutdown()
    assert refused.code == 2 and refused.err.count("\n") == 1, refused.text
    assert "--address: got http://127.0.0.1" in refused.err and "another HTTP server answers (501" in refused.err
