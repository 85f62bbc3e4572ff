"""Ray's `JobSubmissionClient` with a limit for each request, and a look at who answers at the address at all."""

from __future__ import annotations

import logging
from typing import Any

PROBE_S = 15.0
"""Limit of the first request, which only asks for the version: a busy dashboard takes seconds."""
REQUEST_S = 60.0
"""Limit of each other request: to connect, and for each part of the answer."""
RAY_REFUSALS = ("Missing authentication token", "Invalid authentication token")
"""What Ray answers with 401 and 403; another server that has these codes says something else."""

QUIET = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging",
    "ray._private.authentication.authentication_token_setup",
)  # fmt: skip
"""Loggers of Ray that report each upload, each closed stream and each token that is found."""


class AnotherServer(Exception):
    """What answers is not a Ray job server; the message says what it is."""


def job_client(address: str) -> Any:
    """A `JobSubmissionClient` for the job server at `address`, a URL.

    Raises:
        AnotherServer: something else answers there.
        AuthenticationError (of Ray): the token is missing or wrong.
        OSError, ValueError: nothing answers, or the URL is none; see `explained`.
    """
    import requests
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        checked = False

        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, **{"timeout": REQUEST_S, **options})

        def _check_connection_and_version(self, *given: Any, **more: Any) -> None:
            """Ray's constructor calls it twice, and takes every JSON for its own."""
            if self.checked:
                return
            try:
                answer = self._do_request("GET", "/api/version", timeout=PROBE_S, allow_redirects=False)
            except AuthenticationError as error:
                if any(text in str(error).splitlines()[0] for text in RAY_REFUSALS):
                    raise
                raise AnotherServer("another HTTP server asks for a login") from error
            try:
                self._server_ray_version = str(answer.json()["ray_version"])
            except (requests.JSONDecodeError, KeyError, TypeError) as error:
                raise AnotherServer(f"another HTTP server answers ({answer.status_code} {answer.reason})") from error
            self.checked = True

    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # a token that is set is used
    return Client(address)


def explained(error: Exception) -> str | None:
    """Why a request got no answer, in a few words; None for an error of another kind."""
    import requests

    if isinstance(error, requests.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, requests.Timeout):
        return "something listens there, but did not answer in time"
    if isinstance(error, requests.exceptions.SSLError):
        return "it is not served over TLS, or its certificate is not trusted"
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
        return "this is not a URL"
    if isinstance(error, ConnectionError | requests.RequestException):
        return _reason(str(error))
    return None


def _reason(text: str) -> str:
    reasons = {
        "refused": "connection refused",
        "Name or service not known": "unknown host",
        "name resolution": "unknown host",
        "NameResolutionError": "unknown host",
        "timed out": "something listens there, but did not answer in time",
        "unreachable": "no route to the host",
        "BadStatusLine": "something else than HTTP answers there",
        "RemoteDisconnected": "something else than HTTP answers there",
        "reset by peer": "the connection was closed",
        "Connection aborted": "the connection was closed",
        "Failed to parse": "this is not a URL",
    }
    return next((reason for mark, reason in reasons.items() if mark in text), (text.splitlines() or ["no answer"])[0])
