"""Following a job: its log arrives whole over answers that are cut, and Ctrl-C leaves it running."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from jobs import submit
from jobs.__main__ import _leave
from jobs.driver.broken_output import GuardedFile, OutputLost
from jobs.submission import follow as following
from jobs.submission.follow import follow_job, follow_log
from jobs.submission.server import ServerSilent, exit_code
from raytrain.errors import InputError, RunError


def job_of(status: str, code: int | None = None, message: str = "") -> JobDetails:
    details: dict[str, Any] = {"entrypoint": "python -m jobs train", "driver_exit_code": code, "message": message}
    return JobDetails(type=JobType.SUBMISSION, submission_id="mine", status=JobStatus(status), **details)


class FakeServer:
    """A job server. Each question for the log plays on, up to the next text that the job prints: an event to
    wait for, a function to call, an exception to raise.

    `states` are the answers about the job, the last one again and again; an exception is raised.
    """

    address = "http://head:8265"

    def __init__(self, *plays: Any, states: list[Any] | None = None) -> None:
        self.plays, self.states, self.log = list(plays), states or [job_of("RUNNING")], ""
        self.questions = 0
        self.requests: list[str] = []
        self.on_request: Callable[[], Any] = lambda: None

    def job(self, job_id: str) -> JobDetails:
        self.questions += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def get_job_logs(self, job_id: str) -> str:
        while self.plays and not (isinstance(self.plays[0], threading.Event) and not self.plays[0].is_set()):
            item = self.plays.pop(0)
            if isinstance(item, str):
                self.log += item
                break
            if isinstance(item, Exception):
                raise item
            if callable(item):
                item()
        return self.log

    def ends(self, status: str, exit_code: int | None = None) -> None:
        self.states = [job_of(status, exit_code)]

    def request(self, method: str, path: str, **options: Any) -> Any:
        self.requests.append(f"{method} {path}")
        return self.on_request() or type("Answer", (), {"status_code": 200, "reason": "OK"})()


def followed(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> tuple[str, JobDetails]:
    """(the log as printed, the job once it has ended)."""
    ended = follow_log(server, "mine")  # pyright: ignore[reportArgumentType]
    return capsys.readouterr().out, ended


def interrupt() -> None:
    """Ctrl-C: the main thread gets it, as the kernel does it at a terminal."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


@pytest.fixture(autouse=True)
def quick_questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log is asked for without a pause, and SIGTERM does what it does in a command."""
    monkeypatch.setattr(following, "EVERY_S", 0.01)
    monkeypatch.setattr(following, "ASKED_LESS", 0)
    previous = signal.signal(signal.SIGTERM, _leave)
    yield
    signal.signal(signal.SIGTERM, previous)


# -- the log --------------------------------------------------------------------------------------------------


def test_a_log_is_printed_once_and_to_its_end_over_answers_that_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    silent = ServerSilent("http://head:8265", "connection refused")
    server = FakeServer(
        "one\n", "tw", silent, "o\nth", RuntimeError("500"), "ree\n",
        lambda: server.ends("SUCCEEDED", 0), "printed until then\n",
    )  # fmt: skip
    text, ended = followed(server, capsys)
    assert text == "one\ntwo\nthree\nprinted until then\n" and exit_code(ended) == 0


def test_the_verdict_is_the_status_of_the_job_whatever_its_log_says(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer("done after 6 steps\n", "exit code 0\n", lambda: server.ends("FAILED", 3))
    text, ended = followed(server, capsys)
    assert text == "done after 6 steps\nexit code 0\n" and exit_code(ended) == 3
    says_failed = "Traceback (most recent call last):\n"
    server = FakeServer(says_failed, states=[job_of("RUNNING")] * 3 + [job_of("SUCCEEDED", 0)])
    text, ended = followed(server, capsys)
    assert text == says_failed and exit_code(ended) == 0


def test_a_log_that_takes_long_is_asked_for_less_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = [0.0], list[float]()
    monkeypatch.setattr(following, "ASKED_LESS", 20)
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(following.time, "sleep", pauses.append)
    server = FakeServer(
        "one\n", lambda: now.append(now.pop() + 2.0), "two\n", lambda: server.ends("SUCCEEDED"), "end\n"
    )
    assert followed(server, capsys)[0] == "one\ntwo\nend\n"
    assert pauses[:2] == [0.01, 20 * 2.0]


def test_a_server_that_is_silent_or_cannot_say_is_asked_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = ServerSilent("http://head:8265", "connection refused")
    troubles = [silent, RunError("500"), silent]
    server = FakeServer("one\n", states=[*troubles, job_of("RUNNING"), job_of("FAILED", 1)])
    text, ended = followed(server, capsys)
    assert text == "one\n" and exit_code(ended) == 1 and server.questions == 5
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"may still run.*logs mine --follow"):
        patch.setattr(following, "SILENT_S", 0.0)
        followed(FakeServer(states=[silent]), capsys)
    gone = InputError("ID", got="mine", expected="the ID of a submitted job")
    with pytest.raises(InputError, match="got mine"):
        followed(FakeServer(states=[gone]), capsys)
    never_began = FakeServer(RuntimeError("no log"), states=[job_of("FAILED")])
    assert exit_code(followed(never_began, capsys)[1]) == 1


# -- Ctrl-C ---------------------------------------------------------------------------------------------------


def follow(server: FakeServer) -> int:
    """As `submit` and `submit logs --follow` do it."""
    return follow_job(server, "mine")  # pyright: ignore[reportArgumentType]


def test_ctrl_c_and_sigterm_detach(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        server = FakeServer("one\n", lambda number=number: os.kill(os.getpid(), number))
        assert follow(server) == 130 and not server.requests
        said = capsys.readouterr()
        assert said.out == "one\n" and "mine keeps running. Follow it with: raytrain submit logs mine" in said.err
        assert "raytrain submit stop mine --address http://head:8265" in said.err


def test_a_reader_that_leaves_ends_the_command_and_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `raytrain submit logs ID --follow | head -1`: the command line ends as after any lost output."""
    reading, writing = os.pipe()
    os.close(reading)
    server = FakeServer("one\n")
    with GuardedFile(writing, "w", closefd=False) as file:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(file)))
        with pytest.raises(OutputLost):
            follow(server)
        monkeypatch.undo()
    os.close(writing)
    assert not server.requests


def test_the_end_says_why_a_job_never_began(capsys: pytest.CaptureFixture[str]) -> None:
    pip = "setup failed: Failed to set up.\nLast 50 lines:\n    ERROR: No matching distribution for torch==9.9.9\n\n"
    for message, reason in ((pip, "ERROR: No matching distribution for torch==9.9.9"), ("no agent\nmore", "no agent")):
        assert follow(FakeServer(states=[job_of("FAILED", message=message)])) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"mine: FAILED, exit code 1 ({reason})"


# -- the phases of a command ----------------------------------------------------------------------------------


class SubmitServer(FakeServer):
    """A server to submit to; `on` names the moment at which Ctrl-C arrives."""

    def __init__(self, on: str) -> None:
        super().__init__("one\n")
        self.on, self.submitted = on, list[str]()

    def at(self, moment: str) -> None:
        if moment == self.on:
            interrupt()

    @contextlib.contextmanager
    def asked(self, *arguments: str) -> Iterator[dict[str, str | None]]:
        self.at("probe")
        yield submit.versions()

    def submit(self, entrypoint: str, *, job_id: str, **more: Any) -> None:
        self.at("submit")
        self.submitted.append(job_id)


@pytest.fixture
def submit_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[str], tuple[int, SubmitServer]]:
    """`submit_at(moment)`: submits a check, with Ctrl-C at this moment; returns the exit code and the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "check_versions", lambda *given, **more: [])

    def run(moment: str) -> tuple[int, SubmitServer]:
        from jobs.__main__ import main

        server = SubmitServer(moment)

        def connect(address: str | None) -> SubmitServer:
            server.at("connect")
            return server

        monkeypatch.setattr(submit, "JobServer", connect)
        code = submit.submit_verb("check", main.commands["check"], [], address=None, job_id="mine")
        return code, server

    return run


@pytest.mark.parametrize("moment", ["connect", "probe"])
def test_ctrl_c_before_the_job_exists_cancels(moment: str, submit_at: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, server = submit_at(moment)
    assert (code, server.submitted, server.questions) == (130, [], 0)
    err = capsys.readouterr().err
    assert "cancelled: nothing was submitted" in err.splitlines() and "submitted mine" not in err, err


def test_ctrl_c_while_the_job_is_submitted_says_how_to_see_whether_it_is(
    submit_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_at("submit")[0] == 130
    said = "raytrain submit status mine --address http://head:8265 shows whether mine was submitted"
    assert said in capsys.readouterr().err
