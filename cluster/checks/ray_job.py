"""Checks of a command that runs as a submitted Ray job (`ray job submit`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from cluster.checks.preflight import CheckResult

JOB_ENVIRONMENT = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable in the driver of a submitted job."""

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Seconds between the SIGTERM and the SIGKILL of `ray job stop`, read by Ray on the head node; its default is 3."""

SAVE_RATE = 200 << 20
"""Bytes per second at which a checkpoint is assumed to be written; the real rate is known after the first one."""

ENOUGH = "enough for a step and a save"

PACKAGE_CACHE = "runtime_resources"
"""Directory of a Ray session that holds the working directories of jobs; Ray deletes them."""


def is_submitted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the driver of a submitted job."""
    return bool((os.environ if environ is None else environ).get(JOB_ENVIRONMENT))


def submission_id(environ: Mapping[str, str] | None = None) -> str | None:
    """The ID of the job that this process is the driver of; None outside a submitted job."""
    text = (os.environ if environ is None else environ).get(JOB_ENVIRONMENT)
    return json.loads(text).get("metadata", {}).get("job_submission_id") if text else None


def check_ray_job(
    save_dir: str,
    *,
    checkpoint_bytes: int | None,
    grace_s: float,
    environ: Mapping[str, str] | None = None,
) -> list[CheckResult]:
    """Check that the results of a submitted job outlive it, and that `ray job stop` leaves it time to save.

    Args:
        save_dir: `save.dir`, a path or a URI.
        checkpoint_bytes: bytes of one checkpoint; None if unknown.
        grace_s: `retry.stop_grace_s`.
        environ: the environment, by default that of this process.

    Returns:
        No results for a command that is not a submitted job.
    """
    environ = os.environ if environ is None else environ
    if not is_submitted(environ):
        return []
    return [_check_folder(save_dir), _check_stop(checkpoint_bytes, grace_s, environ)]


def _check_folder(save_dir: str) -> CheckResult:
    expected = "a folder that outlives the job, on storage that every node can access"
    folder = save_dir if "://" in save_dir else str(Path(save_dir).expanduser().resolve())
    if PACKAGE_CACHE in Path(folder).parts and "://" not in save_dir:
        return CheckResult(
            "save_folder", "fail", f"{folder}, which is in Ray's copy of the working directory of this job", expected,
            "Ray deletes that copy: set save.dir to an absolute path or a URI (s3://, gs://, hdfs://)", "save.dir",
        )  # fmt: skip
    return CheckResult("save_folder", "ok", folder, expected)


def measured_stop(stop_s: float, *, grace_s: float, environ: Mapping[str, str] | None = None) -> CheckResult | None:
    """The check of the stop again, once the run has measured what a stop takes; None outside a submitted job.

    Args:
        stop_s: seconds of a step and of saving a checkpoint, as measured.
        grace_s: `retry.stop_grace_s`.
    """
    environ = os.environ if environ is None else environ
    return _judge_stop(stop_s, "measured", grace_s, environ) if is_submitted(environ) else None


def _check_stop(checkpoint_bytes: int | None, grace_s: float, environ: Mapping[str, str]) -> CheckResult:
    """By the time to write a checkpoint alone; `measured_stop` judges again when the time of a step is known."""
    if checkpoint_bytes is None:
        seen = f"{_killed_after(grace_s, environ)[1]}; the size of a checkpoint is not known yet"
        return CheckResult("job_stop", "na", seen, ENOUGH)
    return _judge_stop(checkpoint_bytes / SAVE_RATE, "estimated for writing", grace_s, environ)


def _killed_after(grace_s: float, environ: Mapping[str, str]) -> tuple[float, str]:
    """Seconds that a stop leaves, and the same in words."""
    try:
        wait_s = float(environ.get(STOP_WAIT, "3"))
    except ValueError:
        wait_s = 3.0
    return wait_s, f"`ray job stop` kills this job after {wait_s:g} s, whatever retry.stop_grace_s says ({grace_s:g} s)"


def _judge_stop(need_s: float, how: str, grace_s: float, environ: Mapping[str, str]) -> CheckResult:
    wait_s, seen = _killed_after(grace_s, environ)
    need = f"{need_s:.3g}" if need_s < 999 else f"{need_s:,.0f}"
    needs = f"{ENOUGH}: about {need} s are {how}"
    if need_s > wait_s:
        return CheckResult(
            "job_stop", "warn", seen, needs,
            f"start the head node with {STOP_WAIT}={max(grace_s, 2 * need_s):.0f}, or lower save.every: a stop loses "
            "the steps after the latest checkpoint", STOP_WAIT,
        )  # fmt: skip
    return CheckResult("job_stop", "ok", seen, needs)
