"""What to type next for a run: the commands that messages and reports name."""

from __future__ import annotations

from cluster.checks.ray_job import is_submitted
from raytrain.config.sections import PLACEHOLDER
from raytrain.runs.folder import RunFolder


def on_cluster(command: str) -> str:
    """A command `VERB ...` as it is typed: through `submit`, if this process is the driver of a submitted job."""
    return f"raytrain {'submit ' if is_submitted() else ''}{command}"


def resume_command(verb: str, folder: str) -> str:
    """How to resume a run or a search: on the cluster if it was submitted, from Python if its job has objects."""
    if verb == "train" and has_objects(RunFolder(folder)):
        return f'train(..., resume="{folder}")'
    return on_cluster(f"{verb} --resume {folder}")


def start_anew(run: RunFolder) -> str:
    """How to start a new run of the same job."""
    if has_objects(run):
        return "train(...) without resume starts a new run"
    return f"`{on_cluster(f'train {run.job}')}` starts a new run of the same job"


def has_objects(run: RunFolder) -> bool:
    """Whether the job of a run has Python objects, which its folder cannot hold: only its program can resume it."""
    return run.exists(run.job) and PLACEHOLDER in run.read_text(run.job)
