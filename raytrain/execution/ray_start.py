"""Start a private Ray, or connect to a running one, with the same protections wherever a process of raytrain does it.

A command does it for its run (`jobs.driver.runtime`), and so does the process that writes a user's Ray Datasets
(`raytrain.data.sources.ray_dataset`).
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any

from cluster.environment import variables_kept_from_ray
from cluster.network import head_problem
from cluster.ray_runtime import LONGEST_BASE, PATIENT, SHORT_BASE, end_daemons, last_words
from raytrain.errors import InputError, RaytrainError, RunError, first_line
from raytrain.runs.faults import RAY_NOT_STARTED

#: Exit codes of a daemon that another process ended; of any other, it ended of itself, which it would do again.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


def start_ray(
    address: str, options: Mapping[str, Any], *, folder: str, imports: str, key: str = "cluster.address"
) -> None:
    """Start a private cluster if the address is "local", else connect to a running one.

    `options` are those of `ray.init`, with those of `cluster.ray_runtime.PrivateRay` for a private cluster in `folder`.
    The module `imports`, which this process needs next, is imported while the daemons start.

    Raises InputError if the address cannot be reached, or something else than the head of a Ray cluster listens there;
    RunError if the private cluster did not start, or the module cannot be imported.
    """
    if re.fullmatch(r"[^/]+:\d+", address) and (problem := head_problem(address)):
        raise unreachable(address, problem, key=key)
    if address == "local":
        _start_private(folder, options, imports)
        return
    try:
        _init(address, options, imports)
    except RaytrainError:
        raise
    except Exception as error:  # Ray raises plain `Exception` too
        raise unreachable(address, first_line(error), key=key) from error


def unreachable(address: str, why: str, *, key: str = "cluster.address") -> InputError:
    remedy = "if it uses token authentication, set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its token"
    expected = "HOST:PORT of the head of a running Ray cluster"
    return InputError(key, got=f"{address} ({why})", expected=expected, remedy=remedy)


def _start_private(folder: str, options: Mapping[str, Any], imports: str) -> None:
    """Start the private cluster; if that fails, try once more with longer time limits, unless one of Ray's daemons
    ended of itself, or the module cannot be imported."""
    try:
        _init("local", options, imports)
        return
    except RaytrainError:
        _abandon(folder)
        raise
    except Exception as error:  # Ray raises plain `Exception` when a daemon does not start in time
        first = error
    why = _why(first, os.path.join(folder, "r"))
    _abandon(folder)
    if isinstance(first, ChildProcessError) and first.errno not in FROM_OUTSIDE:
        raise RunError(f"{RAY_NOT_STARTED}: {why}") from first
    for name, value in PATIENT.items():
        os.environ.setdefault(name, value)
    again = os.path.join(folder, "r2")
    try:
        _init("local", {**options, "_temp_dir": again}, imports)
    except Exception as error:
        second = _why(error, again)
        _abandon(folder)
        if len(os.fsencode(tempfile.gettempdir())) > LONGEST_BASE and "AF_UNIX" in str(error):
            raise RunError(
                f"{RAY_NOT_STARTED}: got TMPDIR={tempfile.gettempdir()}, expected a path of at most {LONGEST_BASE} "
                f"bytes for Ray's sockets, as {SHORT_BASE} cannot be used instead"
            ) from error
        raise RunError(
            f"{RAY_NOT_STARTED} in two attempts (1: {why} 2: {second}): the "
            "machine may be overloaded, or out of memory, processes or disk space. Free some, then start the command "
            "again or resume the run; --verbose shows Ray's own messages"
        ) from error


def _why(error: Exception, folder: str) -> str:
    """What an attempt failed with, and the last words of the daemon that ended."""
    if not isinstance(error, ChildProcessError):
        return first_line(error)
    return f"{error.strerror}; {last_words(folder, process=str(error.filename))}"


def _init(address: str, options: Mapping[str, Any], imports: str) -> None:
    import ray

    from raytrain.execution.ray_private import (
        first_look,
        free_agent_port,
        only_needed_daemons,
        own_process_groups,
        reread_environment,
    )

    reread_environment()
    with (
        variables_kept_from_ray(),
        own_process_groups() as daemons,
        free_agent_port(),
        only_needed_daemons(logs=options["log_to_driver"]),
        first_look(meanwhile=lambda: _import(imports), daemons=daemons),
    ):
        ray.init(address=address, ignore_reinit_error=True, **options)


def _import(module: str) -> None:
    """Import a module inside `ray.init`, which would take its error for one of a daemon, or try again: it is a
    RunError."""
    try:
        importlib.import_module(module)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{RAY_NOT_STARTED}: `import {module}` failed in {place.filename}, line {place.lineno} "
            f"({type(error).__name__}: {first_line(error)}), expected the packages that raytrain was installed with"
        ) from error


def _abandon(folder: str) -> None:
    """End what is left of a cluster that failed to start."""
    import ray

    ray.shutdown()
    end_daemons(folder)
