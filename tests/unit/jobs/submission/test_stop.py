"""Who is asked to save before a stop, and who is stopped by Ray at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from jobs.submission import follow as stop
from jobs.submission import server as servers
from jobs.submission import stop_request
from jobs.submission.follow import stop_job
from jobs.submission.server import RECORD, JobServer, exit_code, outcome
from raytrain.errors import InputError, RunError

TRAIN = {"verb": "train", "stop_grace_s": 7.0}


class FakeCluster:
    """A job server with one job. It ends by itself when asked, if `saves`, else when Ray is asked, if `dies`."""

    def __init__(self, *, saves: bool = False, dies: bool = True, listening: bool = False, **job: Any) -> None:
        record = json.dumps(job.pop("record", {}))
        known = {"status": JobStatus.RUNNING, "entrypoint": "bash run.sh", "metadata": {RECORD: record}, **job}
        self.state = JobDetails(type=JobType.SUBMISSION, submission_id="mine", **known)
        self.address, self.saves, self.dies, self.listening = "http://head:8265", saves, dies, listening
        self.asked, self.killed, self.waited_s = 0, 0, 0.0
        self.answer = 200

    def job(self, job_id: str) -> JobDetails:
        return self.state

    def request(self, method: str, path: str, **options: Any) -> Any:
        if method == "GET":
            assert path == "/api/packages/gcs/raytrain_listens_mine.zip"
            return SimpleNamespace(status_code=200 if self.listening else 404)
        self.asked += 1
        if self.saves:
            self.ends(JobStatus.FAILED, 130)
        return SimpleNamespace(status_code=self.answer, reason="Service Unavailable")

    def stop_job(self, job_id: str) -> None:
        self.killed += 1
        if self.dies:
            self.ends(JobStatus.STOPPED, None)

    def ends(self, status: JobStatus, code: int | None) -> None:
        self.state = self.state.model_copy(update={"status": status, "driver_exit_code": code})

    ended = JobServer.ended  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    """Time passes only as the fake clusters of the test are waited for."""
    clusters: list[FakeCluster] = []

    def passes(seconds: float) -> None:
        clusters[-1].waited_s += seconds

    monkeypatch.setattr(servers.time, "monotonic", lambda: sum(cluster.waited_s for cluster in clusters))
    monkeypatch.setattr(servers.time, "sleep", passes)
    return clusters


Stopped = Callable[[FakeCluster], tuple[JobDetails, str]]


@pytest.fixture
def stopped(clock: list[FakeCluster], capsys: pytest.CaptureFixture[str]) -> Stopped:
    """`stopped(cluster)`: its job once it has ended, and what was said."""

    def run(cluster: FakeCluster) -> tuple[JobDetails, str]:
        clock.append(cluster)
        return stop_job(cluster, "mine"), capsys.readouterr().err  # pyright: ignore[reportArgumentType]

    return run


@pytest.mark.parametrize("job", [{"record": TRAIN}, {}])  # {}: a script that runs a command of raytrain
def test_a_command_of_raytrain_is_asked_to_save_and_not_killed(stopped: Stopped, job: dict[str, Any]) -> None:
    cluster = FakeCluster(saves=True, listening=True, **job)
    ended, said = stopped(cluster)
    assert (outcome(ended), exit_code(ended), cluster.asked, cluster.killed) == ("STOPPED", 130, 1, 0)
    assert f"up to {'7' if 'record' in job else '60'} s (retry.stop_grace_s)" in said


@pytest.mark.parametrize("grace_s", [7.0, 0.0])
def test_one_that_does_not_save_is_stopped_by_ray_after_its_grace(stopped: Stopped, grace_s: float) -> None:
    cluster = FakeCluster(record={**TRAIN, "stop_grace_s": grace_s}, listening=True)
    ended, said = stopped(cluster)
    assert (exit_code(ended), cluster.asked, cluster.killed) == (130, 1, 1) and "asking Ray to stop it" in said
    assert grace_s + stop.CLOSE_S <= cluster.waited_s <= grace_s + stop.CLOSE_S + 2


@pytest.mark.parametrize(
    "job", [{}, {"entrypoint": "ls /data/raytrain"}, {"record": TRAIN, "status": JobStatus.PENDING}]
)
def test_another_program_and_a_job_that_has_not_begun_are_stopped_at_once(
    stopped: Stopped, job: dict[str, Any]
) -> None:
    cluster = FakeCluster(**job)
    ended, said = stopped(cluster)
    assert (exit_code(ended), cluster.asked, cluster.killed, cluster.waited_s) == (130, 0, 1, 0.0)
    assert "mine is no command of raytrain, or has not begun" in said


def test_a_stop_never_waits_without_end_and_says_what_is_wrong(stopped: Stopped) -> None:
    immortal = FakeCluster(dies=False)
    with pytest.raises(RunError, match=r"still runs 30 s .* RAY_JOB_STOP_WAIT_TIME_S"):
        stopped(immortal)
    assert stop.KILLED_S <= immortal.waited_s <= stop.KILLED_S + 2
    with pytest.raises(InputError, match="which has ended: SUCCEEDED, exit code 0"):
        stopped(FakeCluster(status=JobStatus.SUCCEEDED, driver_exit_code=0))
    refusing = FakeCluster(record=TRAIN, listening=True)
    refusing.answer = 503
    with pytest.raises(RunError, match="refused the request to stop mine: 503 Service Unavailable"):
        stopped(refusing)


def test_a_job_says_that_it_listens_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    entries, events = dict[bytes, bytes](), list[str]()

    class Client:
        def __init__(self, address: str) -> None:
            assert address == "head:6379" and events.count("sleep") == 2, "only once Ray has started"

        def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: Any, *, timeout: int) -> None:
            entries[key] = value

        def internal_kv_exists(self, key: bytes, namespace: Any, *, timeout: int) -> bool:
            assert list(entries) == [b"gcs://raytrain_listens_mine.zip"]
            if events.count("sleep") == 3:
                raise ConnectionError("no answer, once")
            return key == b"gcs://raytrain_stop_mine.zip" and events.count("sleep") > 4

    ray = SimpleNamespace(is_initialized=lambda: events.count("sleep") >= 2)
    monkeypatch.setitem(stop_request.sys.modules, "ray", ray)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(stop_request.sys.modules, "ray._raylet", SimpleNamespace(GcsClient=Client))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(stop_request.time, "sleep", lambda seconds: events.append("sleep"))
    monkeypatch.setattr(stop_request.os, "kill", lambda pid, number: events.append(signal.Signals(number).name))
    stop_request._watch("mine", "head:6379")
    assert events == ["sleep"] * 5 + ["SIGTERM"]
