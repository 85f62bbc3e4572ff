"""The support bundle of `raytrain check --bundle`: everything one needs to see for a question, in one archive.

It holds no secrets: variables whose names say that they are one are left out, and their values, passwords in URLs and
values after such a name are blanked in every file.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.devices.inventory import Inventory
from cluster.environment import environment_record
from jobs.driver.plan import plan_job
from jobs.driver.screen.plan_table import print_plan
from jobs.job.spec import LoadedSpec
from raytrain.errors import InputError, RaytrainError, RunError
from raytrain.runs.folder import RunFolder

SECRET = (
    r"token(?!i[sz]|s?_per|_id)|secret|passw(?:or)?d|passphrase|credential|authorization"
    r"|(?:api|access|private|account|auth)[_-]?key"
)
"""What the name of a secret contains."""
BLANK = "***"
SHORTEST_SECRET = 4
"""A shorter value is not searched for in texts: it would blank words that have nothing to do with it."""
PREFIXES = (
    "CUDA", "NVIDIA", "HIP", "ROCR", "NCCL", "GLOO", "TORCH", "PYTORCH", "RAY", "OMP", "MKL", "KMP", "HF", "SLURM",
    "TRITON", "CUBLAS", "CUDNN", "MALLOC", "GLIBC", "LD_", "PYTHON", "PATH", "VIRTUAL_ENV", "CONDA",
)  # fmt: skip
"""Beginnings of the variables that can change how a run goes."""
RECORDS = (
    "job.yaml", "job.json", "plan.json", "preflight.json", "environment.json", "memory_probe.json", "result.json",
    "report/performance_summary.json",
)  # fmt: skip
"""Files of a run that are taken whole; of the others, the last lines."""
TAILS = {"events.jsonl": 1000, "metrics.jsonl": 200, "experts.jsonl": 20}
FOLDERS = {"faults": 1000, "logs": 400, "telemetry": 100}
"""Files and folders of a run -> last lines taken of each file."""
SMI_TIMEOUT_S = 20.0
SMALL = "loop.max_steps=5 loop.global_batch_size=1 loop.micro_batch_size=1 scale.workers=1"
"""A run on five samples, whose log shows most mistakes."""


def check_bundle_path(path: str) -> Path:
    """The file to write, checked before anything is started.

    Raises:
        InputError: it is no name of an archive, exists already, or cannot be written there.
    """
    file = Path(path)
    expected = "a new file FILE.zip in a folder that can be written"
    if file.suffix != ".zip":
        raise InputError("--bundle", got=path, expected=expected)
    if file.exists():
        raise InputError("--bundle", got=f"{path}, which exists", expected=expected, remedy="choose another name")
    if not file.absolute().parent.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise InputError("--bundle", got=f"{path}, in a folder that does not exist or is read-only", expected=expected)
    return file


class Redaction:
    """Blanks what is secret in a text.

    Args:
        environ: the variables, whose secret values are searched for.

    Attributes:
        names: of the secret variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.names = sorted(name for name in environ if re.search(SECRET, name, re.IGNORECASE))
        values = {environ[name] for name in self.names if len(environ[name]) >= SHORTEST_SECRET}
        self._values = sorted(values, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text without secrets."""
        for value in self._values:
            for form in (value, json.dumps(value)[1:-1]):
                text = text.replace(form, BLANK)
        text = re.sub(r"(\w://)[^\s/@\"']+@", rf"\1{BLANK}@", text)
        text = re.sub(r"\b(Bearer|Basic)\s+[\w.+/=~-]{8,}", rf"\1 {BLANK}", text)
        named = rf"([\"']?[\w.-]*(?:{SECRET})[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;\"'&}}\]]+)"
        return re.sub(named, _blanked, text, flags=re.IGNORECASE)


def _blanked(match: re.Match[str]) -> str:
    """A named value without it; numbers and words of YAML (tokens: 1024, use_token: true) are no secrets."""
    value = match[2]
    if re.fullmatch(r"-?[\d.]+(?:e[-+]?\d+)?|true|false|null|None|True|False", value):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match[1]}{quote}{BLANK}{quote}"


def write_bundle(
    file: Path, *, checked: Mapping[str, Any], line: str, loaded: LoadedSpec, inventory: Inventory | None,
    run: RunFolder | None = None,
) -> list[str]:  # fmt: skip
    """Write the archive and return the names in it.

    Args:
        checked: the record of the check, or why it ended.
        line: its verdict.
        loaded: the job that the plan is for.
        inventory: the machines of the cluster; None for this one.
        run: whose records and last log lines are added.

    Raises:
        RunError: the file cannot be written.
    """
    redaction = Redaction(os.environ)
    contents = {
        "check.json": json.dumps(checked, indent=1, default=str) + "\n",
        "environment.json": json.dumps(_environment(redaction), indent=1, default=str) + "\n",
        "packages.txt": "".join(f"{name}=={version}\n" for name, version in _packages()),
        "job.yaml": loaded.text,
        **_plan(loaded, inventory),
        **_driver_tools(),
        **({} if run is None else _of_run(run)),
    }
    contents = {name: redaction(text) for name, text in contents.items()}
    contents = {"README.txt": _readme(contents, line, redaction, run), **contents}
    part = file.with_suffix(".zip.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in contents.items():
                archive.writestr(name, text)
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"--bundle {file}: cannot be written: {error}") from error
    return list(contents)


def _environment(redaction: Redaction) -> dict[str, Any]:
    names = [name for name in sorted(os.environ) if name.startswith(PREFIXES) and name not in redaction.names]
    return {**environment_record(), "variables": {name: os.environ[name] for name in names}}


def _packages() -> list[tuple[str, str]]:
    found = {str(one.metadata["Name"]): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return sorted(found.items(), key=lambda row: row[0].lower())


def _plan(loaded: LoadedSpec, inventory: Inventory | None) -> dict[str, str]:
    try:
        plan = plan_job(loaded, inventory=inventory)
    except RaytrainError as error:
        return {"plan.txt": f"{error}\n"}
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=200), full=True)
    return {"plan.txt": out.getvalue(), "plan.json": json.dumps(plan.to_json(), indent=1) + "\n"}


def _driver_tools() -> dict[str, str]:
    """What the drivers of the GPUs say of themselves."""
    tools = {"nvidia-smi": (["nvidia-smi"], ["nvidia-smi", "-q"]), "rocm-smi": (["rocm-smi", "--showallinfo"],)}
    found = {}
    for name, commands in tools.items():
        if shutil.which(name) is not None:
            found[f"{name}.txt"] = "\n".join(_printed(command) for command in commands)
    return found


def _printed(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"$ {' '.join(command)}\n{error}\n"
    return f"$ {' '.join(command)}\n{done.stdout}{done.stderr}(exit {done.returncode})\n"


def _of_run(run: RunFolder) -> dict[str, str]:
    from raytrain.report.findings.rules import diagnose, finding_lines
    from raytrain.report.records import read_records

    found = {"run/findings.txt": "\n".join([f"run {run.path}", *finding_lines(diagnose(read_records(run)))]) + "\n"}
    for name in RECORDS:
        if run.store.exists(name):
            found[f"run/{name}"] = _text(run, name)
    for name, lines in TAILS.items():
        if run.store.exists(name):
            found[f"run/{name}"] = _last(_text(run, name), lines)
    for folder, lines in FOLDERS.items():
        for entry in run.store.entries(folder):
            if not entry.is_dir:
                found[f"run/{folder}/{entry.name}"] = _last(_text(run, f"{folder}/{entry.name}"), lines)
    return found


def _text(run: RunFolder, name: str) -> str:
    return run.store.read_bytes(name).decode("utf-8", "replace")


def _last(text: str, lines: int) -> str:
    return "".join(text.splitlines(keepends=True)[-lines:])


def _readme(contents: Mapping[str, str], line: str, redaction: Redaction, run: RunFolder | None) -> str:
    left = f"Left out: the values of {', '.join(redaction.names)}.\n" if redaction.names else ""
    more = "" if run is not None else "There is no run in it: `raytrain check --bundle FILE.zip --run RUN` adds one.\n"
    names = "".join(f"  {name}\n" for name in contents)
    return (
        f"raytrain support bundle\n\nCheck: {line}\n\nFiles:\n{names}\n"
        f"No code, data or weights are in it, and no secrets. {left}{more}"
        f"If the problem shows there too, add the run folder of the job on five samples:\n"
        f"  raytrain train job.yaml {SMALL}\n"
    )
