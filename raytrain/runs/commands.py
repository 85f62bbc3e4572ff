"""What to type next for a run: the commands that messages and reports name."""

from __future__ import annotations

import json
import shlex

from cluster.checks.ray_job import is_submitted
from raytrain.config.sections import PLACEHOLDER
from raytrain.runs.folder import RunFolder


def shell_command(*words: str) -> str:
    """A command `raytrain VERB ...` to copy into a shell: every command that is printed or written is made here."""
    return shlex.join(["raytrain", *words])


def on_cluster(*words: str) -> str:
    """The same command through `submit`, if this process is the driver of a submitted job."""
    return shell_command(*["submit"] * is_submitted(), *words)


def resume_command(verb: str, folder: str, *keys: str) -> str:
    """How to resume a run or a search: on the cluster if it was submitted, from Python if its job has objects."""
    if verb == "train" and has_objects(RunFolder(folder)):
        return f"train(..., resume={json.dumps(folder, ensure_ascii=False)})"
    return on_cluster(verb, "--resume", folder, *keys)


def start_anew(run: RunFolder) -> str:
    """How to start a new run of the same job."""
    if has_objects(run):
        return "train(...) without resume starts a new run"
    return f"`{on_cluster('train', run.job)}` starts a new run of the same job"


def has_objects(run: RunFolder) -> bool:
    """Whether the job of a run has Python objects, which its folder cannot hold: only its program can resume it."""
    return run.exists(run.job) and PLACEHOLDER in run.read_text(run.job)
