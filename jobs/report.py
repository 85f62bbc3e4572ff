"""The verb `report`: writes report pages of run folders and of bench measurements."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import InputError
from raytrain.report.build import build_report, compare
from raytrain.report.inference import build_inference_report, is_inference
from raytrain.runs.folder import RunFolder

NEWEST = "runs/latest"


def report(paths: list[str]) -> int:
    """Write a report of each run folder, a comparison of several, a summary of each bench's JSON; print their paths.

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
    if len(runs) > 1:
        print(compare(runs))
    return 0


def _open(path: str) -> RunFolder:
    run = RunFolder.open(path)
    if not any(run.exists(name) for name in (run.job, run.plan, run.events, run.job_mapping)):
        raise InputError(
            "run folder",
            got=f"{path}, which has no job.yaml, plan.json or events.jsonl",
            expected="the folder of a run, as printed when `raytrain train` starts",
        )
    return run
