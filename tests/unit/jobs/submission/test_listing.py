"""`submit status` at a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import io
import json
from typing import Any

from ray.job_submission import JobDetails, JobStatus, JobType
from rich.console import Console

from jobs.submission.server import RECORD
from jobs.submit import print_jobs, row_of

AT = 1_800_000_000.0
SAVE = {"verb": "train", "save_dir": "/mnt/shared/team/experiments/language/runs"}


def job_of(job_id: str, status: str, record: dict[str, str], *times: float, **more: Any) -> JobDetails:
    """A job as Ray's client returns it, with the times of its start and end."""
    began, ended = (*(int(1000 * at) for at in times), None, None)[:2]
    details = {
        "entrypoint": "",
        "metadata": {RECORD: json.dumps(record)},
        "start_time": began,
        "end_time": ended,
        **more,
    }
    return JobDetails(type=JobType.SUBMISSION, submission_id=job_id, status=JobStatus(status), **details)


JOBS = [
    job_of("shakespeare-20261125T075055Z-ab12", "RUNNING", SAVE, AT),
    job_of("run-20261125T075055Z-0001", "FAILED", SAVE, AT - 20_000, AT - 1_800, driver_exit_code=130),
    job_of("run-20261125T075055Z-0002", "SUCCEEDED", {"verb": "check"}, AT, AT + 59.7, driver_exit_code=0),
    job_of("raysubmit_4LamXRuQpYdSMg7J", "PENDING", {}),
]
IDS = [str(job.submission_id) for job in JOBS]


def shown(rows: Any, *, width: int, in_full: bool = False) -> list[str]:
    out = io.StringIO()
    print_jobs(rows, Console(file=out, width=width, highlight=False), in_full=in_full)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_line_for_each_job_fits_80_columns() -> None:
    rows = [row_of(job, now=AT + 192) for job in JOBS]
    lines = shown(rows, width=80)
    assert len(lines) == 1 + len(JOBS), "no line is folded"
    assert lines[0].split() == ["ID", "verb", "status", "exit", "started", "took"]
    cells = [line.split("  ") for line in lines[1:]]
    found = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    assert [(line[0], line[1], line[2]) for line in found] == [
        (IDS[0], "train", "RUNNING"), (IDS[1], "train", "STOPPED"), (IDS[2], "check", "SUCCEEDED"),
        (IDS[3], "-", "PENDING"),
    ]  # fmt: skip
    assert [line[-1] for line in found] == ["0:03:12", "5:03:20", "0:00:59", "PENDING"]
    assert [line[3] for line in found[1:3]] == ["130", "0"]
    longest = [{**rows[0], "id": "x" * 64}, {**rows[1], "seconds": 999 * 3600.0 + 59 * 60}]
    assert max(map(len, shown(longest, width=80))) <= 80
    piped = shown(longest, width=200)
    assert len(piped) == 3 and "x" * 64 in piped[1]


def test_one_job_shows_where_its_runs_are_and_what_ray_says() -> None:
    failed = {
        "message": "the runtime environment failed:\nno torch==9.9.9",
        "entrypoint": "python -m jobs train j.yaml",
    }
    job = job_of(IDS[0], "FAILED", SAVE, AT, AT + 7, **failed)
    lines = shown([row_of(job, now=AT)], width=80, in_full=True)
    assert max(map(len, lines)) <= 80
    words = lines[1].split()
    assert [*words[:4], words[-1]] == [job.submission_id, "train", "FAILED", "1", "0:00:07"]
    for name, value in (
        ("save.dir", SAVE["save_dir"]), ("command", "python -m jobs train j.yaml"),
        ("message", "the runtime environment failed:"),
    ):  # fmt: skip
        assert any(line.split(None, 1) == [name, value] for line in lines), (name, lines)
    assert lines[-1].strip() == "no torch==9.9.9"
    pending = shown([row_of(JOBS[3], now=AT)], width=80, in_full=True)
    assert not any(line.startswith("save.dir") for line in pending)
