"""The job server of a Ray cluster: Ray's `JobSubmissionClient` with limits, and errors that say what to change.

All of `submit` talks to the cluster through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.submission import on_cluster
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import shell_command

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray lets these variables take precedence over an address that is given; here the option does."""
QUIET = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
    "ray._private.authentication.authentication_token_setup",
)  # fmt: skip
"""Loggers of Ray that report each upload, each closed stream and each token that is found."""

RECORD = "raytrain"
"""Key in the metadata of a job under which `submit` records what it submitted, as JSON."""
SCRIPT = "raytrain-script-"
"""Prefix of the IDs of the short jobs by which `submit` asks the cluster something. Ray still lists deleted jobs."""

PROBE_S = 15.0
"""Limit of the first request, which only asks for the version: a busy dashboard takes seconds."""
REQUEST_S = 60.0
"""Limit of each other request: to connect, and for each part of the answer."""
SCRIPT_LIMIT_S = 120.0
STARTING_S = 60.0
"""The dashboard of a cluster that is starting answers earlier than the agents that start jobs."""
POLL_EVERY_S = 0.5

NO_AGENT = """the head's agent, which starts jobs, has not started: something else may have its port, 52365 by default
(ray start --dashboard-agent-listen-port); dashboard_agent.log in the head's /tmp/ray/session_latest/logs says why"""


@dataclass(frozen=True)
class SubmittedJob:
    """A job as the server knows it.

    Attributes:
        id: the submission ID.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        exit_code: of the job's command as Ray reports it; None if it has not ended, or was not asked by Ray.
        record: what `submit` recorded about the job; {} for a job submitted by `ray job submit`.
        start_time, end_time: unix seconds; None if not reached.
        node: ID of the node that its driver runs on.
    """

    id: str
    status: str
    exit_code: int | None
    message: str
    entrypoint: str
    record: Mapping[str, Any]
    start_time: float | None
    end_time: float | None
    node: str | None

    @classmethod
    def of(cls, row: Any) -> SubmittedJob:
        """From Ray's `JobDetails`."""
        return cls(
            id=row.submission_id,
            status=getattr(row.status, "value", str(row.status)),
            exit_code=row.driver_exit_code,
            message=row.message or "",
            entrypoint=row.entrypoint,
            record=json.loads((row.metadata or {}).get(RECORD, "{}")),
            start_time=row.start_time / 1000 if row.start_time else None,
            end_time=row.end_time / 1000 if row.end_time else None,
            node=row.driver_node_id,
        )

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def outcome(self) -> str:
        """The status for people: STOPPED also where the run itself saved and stopped, which Ray calls FAILED."""
        return "STOPPED" if self.verdict == 130 else self.status

    @property
    def verdict(self) -> int | None:
        """The exit code that the job stands for: 0 done, 130 stopped, 128 + signal if killed; None while it runs."""
        if not self.ended:
            return None
        if self.status == "SUCCEEDED":
            return 0
        if self.status == "STOPPED":
            return 130
        code = 1 if self.exit_code is None else self.exit_code
        return 128 - code if code < 0 else code


class JobServer:
    """A connection to the job server at `address`.

    Raises:
        InputError: nothing answers at the address, it is no job server of Ray, or the token is wrong.
    """

    def __init__(self, address: str | None = None) -> None:
        given = address or os.environ.get(ADDRESS_VARIABLES[0]) or DEFAULT_ADDRESS
        expected = "the URL of the dashboard of a Ray cluster"
        if not given.startswith(("http://", "https://")) or not given.partition("://")[2].strip("/"):
            raise InputError("--address", got=given, expected=f"{expected}, such as {DEFAULT_ADDRESS}")
        for name in ADDRESS_VARIABLES:
            os.environ.pop(name, None)
        self.address = given.rstrip("/")
        self.client = _client(self.address)
        answer = self.request("GET", "/api/version", timeout=PROBE_S, allow_redirects=False)
        try:
            answer.json()["ray_version"]
        except (ValueError, KeyError, TypeError) as error:  # no JSON, or that of another server
            other = f"{self.address}, where another HTTP server answers ({answer.status_code} {answer.reason})"
            raise InputError("--address", got=other, expected=expected) from error

    def request(self, method: str, path: str, **options: Any) -> Any:
        """One HTTP request with the cluster's token; `options` are those of `requests.request`."""
        with self._explained():
            return self.client._do_request(method, path, **options)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the connection as ours; a RuntimeError stands for an answer of the server, and passes."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise InputError(
                "token",
                got=_token_in_use(),
                expected=f"that of {self.address} in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (on its head node, "
                "`ray get-auth-token` prints it)",
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise ServerSilent(self.address, _root_of(error)) from error

    # -- jobs -------------------------------------------------------------------------------------

    def upload(self, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
        """The same environment with its local files on the cluster: what `submit` then sends is small."""
        uploaded = dict(runtime_env)
        try:
            with self._explained():
                self.client._upload_working_dir_if_needed(uploaded)
                self.client._upload_py_modules_if_needed(uploaded)
        except RuntimeError as error:
            if "status code 413" in str(error):
                raise InputError(
                    "working directory", got=f"more than {self.address} takes in one request ({_last_line(error)})",
                    expected="less", remedy="name what the job does not need in .rayignore",
                ) from error  # fmt: skip
            raise RunError(f"{self.address} refused the upload: {_last_line(error)}") from error
        return uploaded

    def submit(
        self, entrypoint: str, *, job_id: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> SubmittedJob:
        """Submit a job.

        Raises:
            InputError: the ID is taken, or Ray refuses the job.
            RunError: the server did not answer: whether the job is submitted is not known.
        """
        job: dict[str, Any] = {"submission_id": job_id, "runtime_env": runtime_env, "metadata": metadata}
        ends = time.monotonic() + STARTING_S
        while True:
            try:
                with self._explained():
                    self.client.submit_job(entrypoint=entrypoint, **job)
                return self.job(job_id)
            except RuntimeError as error:
                if "already exists" in str(error):
                    raise InputError(
                        "--id", got=f"{job_id}, the ID of an earlier job", expected="an ID that is not taken"
                    ) from error
                starting = "No available agent" in str(error)
                if not starting or time.monotonic() > ends:
                    expected, remedy = "a job that Ray accepts", NO_AGENT if starting else ""
                    raise InputError("job", got=_last_line(error), expected=expected, remedy=remedy) from error
            except ServerSilent as error:
                raise RunError(
                    f"{self.address} did not say whether it has submitted {job_id} ({error.reason}): "
                    f"`{shell_command('submit', 'status', job_id, '--address', self.address)}` shows it"
                ) from error
            time.sleep(POLL_EVERY_S)

    def job(self, job_id: str) -> SubmittedJob:
        """The current state of a job. Errors: InputError if there is none of this ID."""
        try:
            with self._explained():
                return SubmittedJob.of(self.client.get_job_info(job_id))
        except RuntimeError as error:
            if "404" not in str(error):
                raise RunError(f"{self.address} refused the question about {job_id}: {_last_line(error)}") from error
            known = [job.id for job in self.jobs()][-1:]
            raise InputError(
                "ID",
                got=f"{job_id}, which {self.address} does not know",
                expected=", such as ".join(["the ID of a submitted job", *known]),
                remedy="`raytrain submit status` lists them",
            ) from error

    def jobs(self) -> list[SubmittedJob]:
        """All submitted jobs, oldest first, without those of `script`."""
        with self._explained():
            rows = self.client.list_jobs()
        found = [SubmittedJob.of(row) for row in rows if row.submission_id and not row.submission_id.startswith(SCRIPT)]
        return sorted(found, key=lambda job: job.start_time or 0.0)

    def logs(self, job_id: str) -> str:
        """Everything that the command of a job has printed so far."""
        with self._explained():
            return self.client.get_job_logs(job_id)

    def kill(self, job_id: str) -> None:
        """Ask Ray to stop a job: SIGTERM, and SIGKILL after its own time limit."""
        with self._explained():
            self.client.stop_job(job_id)

    def ended(self, job_id: str, *, within_s: float) -> bool:
        """Wait until a job has ended; False if it has not within so many seconds."""
        ends = time.monotonic() + within_s
        while not self.job(job_id).ended:
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_EVERY_S)
        return True

    # -- short jobs -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def script(self, *arguments: str) -> Iterator[SubmittedJob]:
        """Run `on_cluster.py` on the cluster, and remove it from the list of jobs at the end."""
        job_id = f"{SCRIPT}{secrets.token_hex(6)}"
        entrypoint = f"python -c {shlex.quote(Path(on_cluster.__file__).read_text())} {shlex.join(arguments)}"
        try:
            yield self.submit(entrypoint, job_id=job_id, runtime_env={}, metadata={})
        finally:
            with contextlib.suppress(Exception):  # what failed before is what is reported
                self.kill(job_id)
                self.ended(job_id, within_s=10)
                self.client.delete_job(job_id)

    def answer_of(self, job: SubmittedJob, *, limit_s: float = SCRIPT_LIMIT_S) -> dict[str, Any]:
        """The JSON object that a script prints as a line.

        Raises:
            RunError: the script failed, or there was no answer in time.
        """
        ends = time.monotonic() + limit_s
        while True:
            ended = self.job(job.id).ended
            lines = self.logs(job.id).strip().splitlines()
            for line in lines:
                if line.startswith("{") and line.endswith("}"):
                    return json.loads(line)
            if ended or time.monotonic() > ends:
                how = f"failed: {self.job(job.id).message}" if ended else f"gave no answer within {limit_s:.0f} s"
                raise RunError(f"a short job on the cluster {how} {lines[-1] if lines else ''}".rstrip())
            time.sleep(POLL_EVERY_S)


class ServerSilent(InputError):
    """Nothing answers at the address of the job server.

    Attributes:
        reason: why.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            "--address",
            got=f"{address}, where no Ray job server answers ({reason})",
            expected="the URL of the dashboard of a running Ray cluster",
            remedy="start one (cluster/README.md), or forward its port: ssh -L 8265:127.0.0.1:8265 HEAD",
        )
        self.address, self.reason = address, reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.address, self.reason))


def _client(address: str) -> Any:
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.job_submission import JobSubmissionClient

    class LimitedClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, **{"timeout": REQUEST_S, **options})

        def _check_connection_and_version(self, *_: Any, **__: Any) -> None:
            """Ray's asks twice, and takes every server that answers in JSON for its own; `JobServer` asks once."""

    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # a token that is set is used
    return LimitedClient(address)


def _token_in_use() -> str:
    given = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), None)
    return f"the token in {given}" if given else "no token, or that in ~/.ray/auth_token"


def _root_of(error: BaseException) -> str:
    """Why a request got no answer: the error below those of the HTTP library, such as "Connection refused"."""
    while below := error.__cause__ or error.__context__:
        error = below
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _last_line(error: Exception) -> str:
    """What went wrong on the server: the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
