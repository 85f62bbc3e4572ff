"""The verb `report`: writes report pages of run folders and of bench measurements."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import InputError
from raytrain.report.build import build_report, compare
from raytrain.report.findings.rules import diagnose, finding_lines
from raytrain.report.inference import build_inference_report, is_inference
from raytrain.report.records import read_records
from raytrain.runs.folder import RunFolder

NEWEST = "runs/latest"


def report(paths: list[str]) -> int:
    """Write a report of each run folder, a comparison of several, a summary of each bench's JSON; print their paths.

    What the records of a run show to be wrong is printed below its path, with the key to change.

    Args:
        paths: run folders (local paths or URIs), output folders of `infer`, and JSON files of `raytrain bench`; none,
            or `latest`, means the newest run in `runs`.

    Raises:
        InputError: a path is neither; no report of a run is written.
    """
    measured = [path for path in paths if path.endswith(".json")]
    for path in measured:
        from jobs.bench.harness.summary import write_summary

        print(write_summary(Path(path)))
    answered = [path for path in paths if path not in measured and path != "latest" and is_inference(path)]
    for path in answered:
        print(build_inference_report(path))
    others = [*measured, *answered]
    folders = [path for path in paths if path not in others] or ([] if others else [NEWEST])
    runs = [_open(NEWEST if path == "latest" else path) for path in folders]
    for run in runs:
        print(build_report(run))
        for line in finding_lines(diagnose(read_records(run))):
            print(line)
    if len(runs) > 1:
        print(compare(runs))
    return 0


def follow_run(paths: list[str]) -> int:
    """Watch a run until it ends; returns its exit code.

    Args:
        paths: one run folder; none, or `latest`, means the newest run in `runs`.

    Raises:
        InputError: more than one, or not a run.
        RunError: the run ended without a result.
    """
    from rich.console import Console

    from jobs.follow import follow

    if len(paths) > 1:
        raise InputError("--follow", got=f"{len(paths)} runs", expected="one run")
    path = paths[0] if paths else NEWEST
    return follow(_open(NEWEST if path == "latest" else path), console=Console(highlight=False))


def _open(path: str) -> RunFolder:
    run = RunFolder.open(path)
    if not any(run.exists(name) for name in (run.job, run.plan, run.events, run.job_mapping)):
        raise InputError(
            "run folder",
            got=f"{path}, which has no job.yaml, plan.json or events.jsonl",
            expected="the folder of a run, as printed when `raytrain train` starts",
        )
    return run
