"""`raytrain report [RUN ...]`: run folders in, pages out."""

from __future__ import annotations

from raytrain.errors import InputError
from raytrain.readers.report import build_report, compare
from raytrain.run_folder import RunFolder

NEWEST = "runs/latest"


def report(paths: list[str]) -> int:
    """Writes the report of each run folder and, for several, a comparison; prints where the pages are.

    Args:
        paths: run folders (local paths or URIs); none, or `latest`, means the newest of `runs`.

    Errors: InputError for a path that is no run folder; nothing is written then.
    """
    runs = [_open(NEWEST if path == "latest" else path) for path in paths or [NEWEST]]
    for run in runs:
        print(build_report(run))
    if len(runs) > 1:
        print(compare(runs))
    return 0


def _open(path: str) -> RunFolder:
    run = RunFolder.open(path)
    if not any(run.exists(name) for name in (run.job, run.plan, run.events, run.job_mapping)):
        raise InputError(
            "run folder",
            seen=f"{path} (no job.yaml, plan.json or events.jsonl in it)",
            expected="the folder of a run, as `raytrain train` names it at its start",
        )
    return run
