"""What is submitted, checked before anything is sent: the arguments, the working directory, the environment."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

from jobs.job.arguments import split_arguments
from raytrain.config.user_code import imported_names
from raytrain.errors import InputError

# ---------------------------------------------------------------- arguments
# A verb with its arguments, checked here as the verb itself would check them.


VERBS = ("train", "tune", "infer", "check", "bench", "export", "report")
"""Verbs that can run on a cluster; the others need no machines."""
LASTING = "an absolute path on storage that outlives the job and that every node can access, or a URI (s3://, gs://)"
CARRIED = (
    "a file in the package of the working directory, an absolute path on storage that every node can access, or a URI"
)
ID = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class JobRequest:
    verb: str
    arguments: tuple[str, ...]  # as the cluster gets them
    spec: Any = None  # the job, if the verb has one, and if a resumed run can be seen from here
    job_file: str | None = None  # the JOB.yaml below the working directory; None for a recipe, or none
    save_dir: str | None = None  # where the runs of the job are; by default the one of `spec`

    @property
    def entrypoint(self) -> str:
        return shlex.join(["python", "-m", "jobs", self.verb, *self.arguments])

    @property
    def record(self) -> dict[str, Any]:
        record = {"verb": self.verb, "name": None, "save_dir": self.save_dir, "stop_grace_s": None}
        if self.spec is not None:
            record |= {"name": self.spec.name, "stop_grace_s": self.spec.retry.stop_grace_s}
            record["save_dir"] = self.save_dir or self.spec.save.dir
        return record


def request_of(verb: str, command: click.Command, arguments: Sequence[str]) -> JobRequest:
    """The request to run `verb` with these arguments, which `command` parses. Errors: InputError, they are wrong, or
    the results would be deleted with the job."""
    with command.make_context(verb, list(arguments)) as context:
        options = context.params
    given = tuple(_below_here(item) for item in arguments)
    if verb in ("train", "tune", "infer"):
        return _job_request(verb, given, options)
    if verb == "bench":
        _check_lasting("--out", options["out"], needed=True)
    if verb == "export":
        _check_lasting("RUN", options["run"])
        _check_lasting("--to", options["target"])
    if verb == "report":
        for run in options["runs"] or ("runs/latest",):
            _check_lasting("RUN_DIR", run)
    return JobRequest(verb, given)


def _job_request(verb: str, given: tuple[str, ...], options: Mapping[str, Any]) -> JobRequest:
    from jobs.job.spec import load_spec, refuse_later

    path, overrides = split_arguments(tuple(options["arguments"]))
    resume = None if options.get("resume") == "auto" else options.get("resume")
    _check_lasting("--resume", resume)
    _check_lasting("--from-tune", options.get("sweep"))
    if verb == "infer" and (path is None or path.suffix not in (".yaml", ".yml")):
        output = next((item.partition("=")[2] for item in overrides if item.startswith("infer.output=")), None)
        _check_lasting("infer.output", output, needed=resume is None)
        _check_lasting("RUN", None if path is None else str(path), needed=True)
        return JobRequest(verb, given)
    if verb != "infer" and resume is not None:
        spec = _resumed_spec(verb, resume, path, overrides)
        return JobRequest(verb, given, spec, _job_file(path), save_dir=os.path.dirname(resume.rstrip("/")))
    spec = load_spec(path, overrides, runs_here=False).spec
    refuse_later(spec, verb)
    _check_lasting("save.dir", spec.save.dir, needed=True)
    if verb == "infer":
        _check_lasting("infer.output", spec.infer.output)
    if spec.cluster.address is not None:
        raise InputError(
            "cluster.address", got=spec.cluster.address, expected="no address in a submitted job",
            remedy="the job uses the cluster that it is submitted to: remove the key",
        )  # fmt: skip
    return JobRequest(verb, given, spec, _job_file(path))


def _resumed_spec(verb: str, folder: str, path: Path | None, overrides: Sequence[str]) -> Any:
    """The job of a run or a search that is resumed, checked as the verb would; None if it cannot be seen from here."""
    if not os.path.isdir(folder):
        return None
    if verb == "tune":
        from jobs.tune import open_sweep

        return open_sweep(folder, path, overrides)[1].spec
    from jobs.driver.run_folder import check_checkpoints, open_resumed

    resumed = open_resumed(folder, path, overrides)
    check_checkpoints(resumed)
    return resumed.loaded.spec


def _job_file(path: Path | None) -> str | None:
    """The JOB.yaml below the working directory; None for a recipe, or none. Errors: InputError if it is outside."""
    from jobs.job.spec import recipe_named

    job_file = None if path is None or recipe_named(path) else _below_here(str(path))
    if job_file is not None and os.path.isabs(job_file):
        raise InputError(
            "JOB.yaml", got=f"{path}, outside the working directory", expected=f"a file below {Path.cwd()}",
            remedy="change to its folder: what lies there is what the cluster gets",
        )  # fmt: skip
    return job_file


def check_id(job_id: str | None) -> None:
    """Check an ID that was given for a new job. Errors: InputError."""
    if job_id is not None and not ID.fullmatch(job_id):
        expected = "up to 64 letters, digits, dots, dashes and underscores, not dots alone"
        raise InputError("--id", got=job_id, expected=expected)


def _below_here(argument: str) -> str:
    """An absolute path of an existing file below the working directory, made relative: the cluster has another one."""
    path = Path(argument)
    below = path.is_absolute() and path.is_file() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if below else argument


def _check_lasting(key: str, path: str | None, *, needed: bool = False) -> None:
    """Check that a path is one that outlives the job. Errors: InputError."""
    if path is None and needed:
        raise InputError(key, got="nothing", expected=LASTING)
    if path is None or "://" in path or path.startswith(("/", "~", "$")):  # the last two are looked at on the cluster
        return
    raise InputError(
        key, got=f"{path}, a folder in the job's working directory on the cluster, which Ray deletes",
        expected=LASTING, remedy=f"such as {key}=/shared/{Path(path).name}" if "." in key else "",
    )  # fmt: skip


# ---------------------------------------------------------------- working directory
# The working directory as one archive: what is left out, whether Ray takes what remains, and whether it has what the
# job needs.


EXCLUDED = (
    ".git", ".hg", ".svn", "/runs", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".ipynb_checkpoints",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".tox", ".nox", ".cache", "*.egg-info", "/build", "/dist", "wandb",
    "mlruns", ".DS_Store",
)  # fmt: skip
"""Patterns in the syntax of .gitignore that never belong to a job. .gitignore and .rayignore are respected as well."""
LARGE_FILE = 100 << 20
"""Larger files are data or weights: they are left out, and belong on storage that every node can access."""
MIB = 1 << 20


@dataclass(frozen=True)
class Package:
    path: Path
    names: frozenset[str]  # of the files in it
    large: dict[str, int]  # files left out because of their size, with their bytes
    text: str  # one line for people


def pack(folder: Path, archive: Path) -> Package:
    """Pack the files of `folder` that belong to a job into a new file that ends in .zip."""
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE as LIMIT
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found, large = list[Path](), dict[str, int]()

    def left_out(path: Path) -> bool:
        if path.is_dir():  # also a link to a folder
            is_run = (path / "events.jsonl").exists() and (path / "attempts").exists()
            return path != folder and (is_run or (path / "pyvenv.cfg").exists())
        if path.is_file() and path.stat().st_size > LARGE_FILE:
            large[path.relative_to(folder).as_posix()] = path.stat().st_size
            return True
        return False

    excludes = [_get_excludes(folder, [*EXCLUDED]), left_out]
    _dir_travel(folder, excludes, found.append, include_gitignore=True)
    kept = [path for path in found if path.is_file() or (path.is_dir() and not any(path.iterdir()))]
    files = {path.relative_to(folder).as_posix(): path for path in kept}
    entries = Counter[str]()
    with zipfile.ZipFile(archive, "w", strict_timestamps=False) as content:
        for name, path in files.items():
            content.write(path, name)
            entries[name.partition("/")[0] + "/" * ("/" in name)] += path.stat().st_size
    size = archive.stat().st_size
    if size >= LIMIT:
        raise InputError(
            "working directory",
            got=f"{folder}, {size / MIB:.1f} MiB packed; the largest entries are "
            + ", ".join(f"{name} ({each / MIB:.1f} MiB)" for name, each in entries.most_common(5)),
            expected=f"less than {LIMIT / MIB:.0f} MiB, the limit of Ray",
            remedy="move data to storage that every node can access, or name what the job does not need in .rayignore",
        )
    left = "".join(f"; left out: {name} ({each / MIB:.0f} MiB)" for name, each in sorted(large.items()))
    text = f"working directory: {len(files)} files, {size / MIB:.1f} MiB; Ray's limit is {LIMIT / MIB:.0f} MiB{left}"
    return Package(archive, frozenset(files), large, text)


def check_package(request: JobRequest, package: Package, folder: Path) -> None:
    """Check that the files of the working directory that a job reads are in its package. Errors: InputError."""
    for key, path, importer in _needed(request, folder):
        if not path.is_relative_to(folder) or path.is_dir():
            continue
        name = path.relative_to(folder).as_posix()
        if name in package.names:
            continue
        why, remedy = f"its {package.large.get(name, 0) >> 20} MiB are too much", ""
        if name not in package.large:
            why = "it is ignored"
            remedy = f"take it out of .gitignore and .rayignore, or add the line !/{name} to .gitignore"
        imported = f", which {importer} imports, and" if importer else ","
        got = f"{name}{imported} which is not in the package of the working directory: {why}"
        expected = "every module of the job in it" if importer else CARRIED
        raise InputError(key, got=got, expected=expected, remedy=remedy)


def _needed(request: JobRequest, folder: Path) -> Iterator[tuple[str, Path, str]]:
    """(key, file that a job reads, module that imports it or ""). Errors: InputError if one is not there."""
    from jobs.job.facts import local_paths, resolved

    if request.job_file is not None:
        yield "JOB.yaml", folder / request.job_file, ""
    if request.spec is None:
        return
    spec = resolved(request.spec)
    for key, path in local_paths(spec, missing=True).items():
        if Path(path).is_relative_to(folder) and "$" not in path:  # whose value is that on the cluster
            raise InputError(key, got=f"{path}, which does not exist", expected=CARRIED)
    for key, path in local_paths(spec).items():
        yield key, Path(path), ""
    named = [("model.builder", spec.model.builder), ("data.source", spec.data.source)]
    named += [("data.collate", spec.data.collate), *(("telemetry.observers", one) for one in spec.telemetry.observers)]
    for key, one in named:
        if isinstance(one, str) and ":" in one:
            for path, importer in imported_files(one.partition(":")[0], folder).items():
                yield key, path, importer


def imported_files(module: str, folder: Path) -> dict[Path, str]:
    """Files below `folder` that a module cannot do without, each with the module that imports it.

    They are found in their source: nothing is imported, which may need the cluster.
    """
    found, left = dict[Path, str](), [(module, module)]
    others = [path for path in sys.path if path and Path(path).resolve() != folder.resolve()]
    while left:
        name, importer = left.pop()
        parts = name.split(".")
        installed = PathFinder.find_spec(parts[0], others)
        if installed is not None and installed.origin is not None:  # it comes first, but not a folder without __init__
            continue
        for end in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:end])
            path = base / "__init__.py" if (base / "__init__.py").is_file() else base.with_suffix(".py")
            if path.is_file() and path not in found:
                found[path] = importer
                left += [(one, ".".join(parts[:end])) for one in _imports(path, parts[: end - (path.parent != base)])]
    return found


def _imports(path: Path, package: list[str]) -> Iterator[str]:
    """Names that a file of a package imports in any case, which may be modules: what stands in an `if`, a `try` or a
    `with` may be missing."""
    left = list[ast.AST]()
    with contextlib.suppress(SyntaxError, ValueError):  # the job says so
        left.append(ast.parse(path.read_bytes()))
    for node in left:
        yield from imported_names(node, package)
        if not isinstance(node, ast.If | ast.Try | ast.TryStar | ast.With):
            left.extend(ast.iter_child_nodes(node))


# ---------------------------------------------------------------- environment
# The environment that a job finds on the cluster, compared with this one, and the runtime environment that it gets.


PRODUCT = ("cluster", "raytrain", "experts", "jobs")
EXACT = {"python": 2, "torch": 3, "ray": 3}
"""What is compared -> how many parts of its version must be equal. Local parts (`+cpu`, `+cu126`) may differ."""


def check_versions(here: Mapping[str, str | None], there: Mapping[str, str | None], *, install: bool) -> None:
    """Raise InputError that names each version that differs, here and there. With `install` the job gets the torch that
    is used here; Ray starts it with its own Python and its own version."""
    wrong = []
    for name, parts in EXACT.items():
        one, other = ((found[name] or "").partition("+")[0].split(".")[:parts] for found in (here, there))
        if one != other and not (install and name == "torch"):
            wrong.append(name)
    if wrong:
        raise InputError(
            "environment of the cluster",
            got=", ".join(f"{name} {there[name] or 'not installed'}" for name in wrong),
            expected=", ".join(f"{name} {here[name]}" for name in wrong) + ", as here",
            remedy="add --install, which installs the versions used here for this job"
            if wrong == ["torch"]
            else "start the cluster with these versions, or submit from an environment with its versions",
        )


def runtime_environment(*, working_dir: Path, install: bool) -> dict[str, Any]:
    """Ray's runtime environment of the job: its files, this product, and with `install` the versions used here of every
    package that this product requires, except Ray itself."""
    specs = [importlib.util.find_spec(name) for name in PRODUCT]
    folders = [next(iter(spec.submodule_search_locations or [])) for spec in specs if spec is not None]
    env = {"working_dir": str(working_dir), "py_modules": folders, "excludes": ["__pycache__", "*.pyc"]}
    return env | ({"pip": {"packages": pinned_requirements(), "pip_check": False}} if install else {})


def pinned_requirements() -> list[str]:
    """The requirements of this product, each pinned to the version installed here, without local parts and Ray."""
    from packaging.requirements import Requirement

    required = [Requirement(text) for text in metadata.requires("raytrain") or []]
    needed = [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in needed if name != "ray"]
