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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from jobs.submission import on_cluster
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import shell_command

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
QUIET = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
    "ray._private.authentication.authentication_token_setup",
)  # fmt: skip
"""Loggers of Ray that report each upload and each token that is found."""

RECORD = "raytrain"
"""Key in the metadata of a job under which `submit` records what it submitted, as JSON."""
SCRIPT = "raytrain-script-"
"""Prefix of the IDs of the short jobs by which `submit` asks the cluster something. Ray still lists deleted jobs."""

PROBE_S = 15.0
"""Limit of the first request, which only asks for the version: a busy dashboard takes seconds."""
REQUEST_S = 60.0
"""Limit of each other request: to connect, and for each part of the answer."""
POLL_EVERY_S = 0.5

NO_AGENT = """the head's agent, which starts jobs, has not started: try again if the cluster has just been started, else
something else may have its port, 52365 by default (ray start --dashboard-agent-listen-port); dashboard_agent.log in the
head's /tmp/ray/session_latest/logs says why"""


def record_of(job: JobDetails) -> dict[str, Any]:
    """What `submit` recorded about a job; {} for one submitted by `ray job submit`."""
    return json.loads((job.metadata or {}).get(RECORD, "{}"))


def exit_code(job: JobDetails) -> int | None:
    """The exit code that a job stands for: 0 done, 130 stopped, 128 + signal if killed; None while it runs."""
    if not job.status.is_terminal():
        return None
    code = 1 if job.driver_exit_code is None else job.driver_exit_code
    return {"SUCCEEDED": 0, "STOPPED": 130}.get(job.status.value, 128 - code if code < 0 else code)


def outcome(job: JobDetails) -> str:
    """The status for people: STOPPED also where the run itself saved and stopped, which Ray calls FAILED."""
    return "STOPPED" if exit_code(job) == 130 else job.status.value


class ServerSilent(InputError):
    """Nothing answers at the address of the job server; `reason` says why."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            "--address",
            got=f"{address}, where no Ray job server answers ({reason})",
            expected="the URL of the dashboard of a running Ray cluster",
            remedy="start one (cluster/README.md), or forward its port: ssh -L 8265:127.0.0.1:8265 HEAD",
        )
        self.reason = reason


class JobServer(JobSubmissionClient):
    """A connection to the job server at `address`. A RuntimeError of its methods stands for an answer of the server; an
    InputError says that nothing answers there, that it is no job server of Ray, or that the token is wrong."""

    def __init__(self, address: str | None = None) -> None:
        given = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        expected = "the URL of the dashboard of a Ray cluster"
        if not given.startswith(("http://", "https://")) or not given.partition("://")[2].strip("/"):
            raise InputError("--address", got=given, expected=f"{expected}, such as {DEFAULT_ADDRESS}")
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # a token that is set is used
        self.address = given.rstrip("/")
        os.environ[ADDRESS_VARIABLE] = self.address  # Ray takes it, or else RAY_ADDRESS, before one that is given
        super().__init__(self.address)
        answer = self._do_request("GET", "/api/version", timeout=PROBE_S, allow_redirects=False)
        try:
            answer.json()["ray_version"]
        except (ValueError, KeyError, TypeError) as error:  # no JSON, or that of another server
            other = f"{self.address}, where another HTTP server answers ({answer.status_code} {answer.reason})"
            raise InputError("--address", got=other, expected=expected) from error

    def _check_connection_and_version(self, *_: Any, **__: Any) -> None:
        """Ray's asks twice, and takes every server that answers in JSON for its own; `__init__` asks once."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        """One HTTP request with the cluster's token; `options` are those of `requests.request`."""
        try:
            return super()._do_request(method, endpoint, **{"timeout": REQUEST_S, **options})
        except AuthenticationError as error:
            variable = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), None)
            raise InputError(
                "token",
                got=f"the token in {variable}" if variable else "no token, or that in ~/.ray/auth_token",
                expected=f"that of {self.address} in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (on its head node, "
                "`ray get-auth-token` prints it)",
            ) from error
        except requests.RequestException as error:
            root: BaseException = error  # the error below those of the HTTP library, such as "Connection refused"
            while below := root.__cause__ or root.__context__:
                root = below
            reason = getattr(root, "strerror", None) or str(root) or type(root).__name__
            raise ServerSilent(self.address, reason) from error

    def request(self, method: str, path: str, **options: Any) -> Any:
        """A request for which Ray's client has no method."""
        return self._do_request(method, path, **options)

    def submit(self, entrypoint: str, *, job_id: str, **more: Any) -> None:
        """Submit a job; `more` are arguments of Ray's `submit_job`."""
        try:
            self.submit_job(entrypoint=entrypoint, submission_id=job_id, **more)
        except RuntimeError as error:
            if "already exists" in str(error):
                raise InputError(
                    "--id", got=f"{job_id}, the ID of an earlier job", expected="an ID that is not taken"
                ) from error
            remedy = NO_AGENT if "No available agent" in str(error) else ""
            raise InputError("job", got=_last_line(error), expected="a job that Ray accepts", remedy=remedy) from error
        except ServerSilent as error:
            raise RunError(
                f"{self.address} did not say whether it has submitted {job_id} ({error.reason}): "
                f"`{shell_command('submit', 'status', job_id, '--address', self.address)}` shows it"
            ) from error

    def job(self, job_id: str) -> JobDetails:
        """The current state of a job. Errors: InputError if there is none of this ID."""
        try:
            return self.get_job_info(job_id)
        except RuntimeError as error:
            if "404" not in str(error):
                raise RunError(f"{self.address} refused the question about {job_id}: {_last_line(error)}") from error
            known = [str(job.submission_id) for job in self.jobs()][-1:]
            raise InputError(
                "ID",
                got=f"{job_id}, which {self.address} does not know",
                expected=", such as ".join(["the ID of a submitted job", *known]),
                remedy="`raytrain submit status` lists them",
            ) from error

    def jobs(self) -> list[JobDetails]:
        """All submitted jobs, oldest first, without those of `asked`."""
        rows = [row for row in self.list_jobs() if not (row.submission_id or SCRIPT).startswith(SCRIPT)]
        return sorted(rows, key=lambda job: job.start_time or 0)

    def ended(self, job_id: str, *, within_s: float) -> bool:
        """Wait until a job has ended; False if it has not within so many seconds."""
        ends = time.monotonic() + within_s
        while not self.job(job_id).status.is_terminal():
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_EVERY_S)
        return True

    @contextlib.contextmanager
    def asked(self, *arguments: str, limit_s: float = 120.0) -> Iterator[dict[str, Any]]:
        """Run `on_cluster.py` on the cluster: its answer and the `node` it runs on. It is stopped at the end, and
        removed from the list of jobs."""
        job_id = f"{SCRIPT}{secrets.token_hex(6)}"
        entrypoint = f"python -c {shlex.quote(Path(on_cluster.__file__).read_text())} {shlex.join(arguments)}"
        ends = time.monotonic() + limit_s
        try:
            self.submit(entrypoint, job_id=job_id)
            while True:
                job = self.job(job_id)
                lines = self.get_job_logs(job_id).strip().splitlines()
                answer = next((line for line in lines if line.startswith("{") and line.endswith("}")), None)
                if answer is not None or job.status.is_terminal() or time.monotonic() > ends:
                    break
                time.sleep(POLL_EVERY_S)
            if answer is None:
                how = f"failed: {job.message}" if job.status.is_terminal() else f"gave no answer within {limit_s:.0f} s"
                raise RunError(f"a short job on the cluster {how} {lines[-1] if lines else ''}".rstrip())
            yield {**json.loads(answer), "node": job.driver_node_id}
        finally:
            with contextlib.suppress(Exception):  # what failed before is what is reported
                self.stop_job(job_id)
                self.ended(job_id, within_s=10)
                self.delete_job(job_id)


def _last_line(error: Exception) -> str:
    """What went wrong on the server: the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
