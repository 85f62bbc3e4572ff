"""The support bundle of `raytrain check --bundle`: everything one needs to see for a question, in one archive.

It holds no secrets: variables whose names say that they are one are left out, and their values, passwords in URLs and
values after such a name are blanked in every file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.environment import environment_record
from jobs.job.spec import LoadedSpec
from raytrain.errors import InputError, RunError
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
FOLDERS = ("", "report", "faults", "logs", "telemetry")
"""Folders of a run whose texts are taken, the last `LINES` of each."""
TEXTS, LINES = (".json", ".jsonl", ".yaml", ".txt", ".log", ".stacks", ".tensors"), 400
SMI_TIMEOUT_S = 20.0
SMALL = "loop.max_steps=5 loop.global_batch_size=1 loop.micro_batch_size=1 scale.workers=1"
"""A run on five samples, whose log shows most mistakes."""


def check_bundle_path(path: str) -> Path:
    """The file to write, checked before anything is started."""
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
    """Blanks what is secret in a text, among it the values of the variables whose `names` say so."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.names = sorted(name for name in environ if re.search(SECRET, name, re.IGNORECASE))
        values = {environ[name] for name in self.names if len(environ[name]) >= SHORTEST_SECRET}
        self._values = sorted(values, key=len, reverse=True)

    def __call__(self, text: str) -> str:
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
    file: Path, *, checked: Mapping[str, Any], line: str, loaded: LoadedSpec, run: RunFolder | None = None
) -> list[str]:  # fmt: skip
    redaction = Redaction(os.environ)
    names = [name for name in sorted(os.environ) if name.startswith(PREFIXES) and name not in redaction.names]
    environment = {**environment_record(), "variables": {name: os.environ[name] for name in names}}
    contents = {
        "check.json": json.dumps(checked, indent=1, default=str) + "\n",
        "environment.json": json.dumps(environment, indent=1, default=str) + "\n",
        "job.yaml": loaded.text,
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


def _driver_tools() -> dict[str, str]:
    """What the drivers of the GPUs say of themselves."""
    found = dict[str, str]()
    for command in (["nvidia-smi"], ["nvidia-smi", "-q"], ["rocm-smi", "--showallinfo"]):
        name = f"{command[0]}.txt"
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
            said = f"{done.stdout}{done.stderr}(exit {done.returncode})"
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        found[name] = f"{found.get(name, '')}$ {' '.join(command)}\n{said}\n"
    return found


def _of_run(run: RunFolder) -> dict[str, str]:
    """What the records show to be wrong, and the last lines of each text of the run."""
    from raytrain.report.findings import diagnose, finding_lines
    from raytrain.report.records import read_records

    found = {"run/findings.txt": "\n".join([f"run {run.path}", *finding_lines(diagnose(read_records(run)))]) + "\n"}
    for folder in FOLDERS:
        for entry in run.store.entries(folder):
            if not entry.is_dir and entry.name.endswith(TEXTS):
                name = f"{folder}/{entry.name}".lstrip("/")
                text = run.store.read_bytes(name).decode("utf-8", "replace")
                found[f"run/{name}"] = "".join(text.splitlines(keepends=True)[-LINES:])
    return found


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
