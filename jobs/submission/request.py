"""What is submitted: a verb with checked arguments, the working directory as one archive, and the request to stop.

`jobs.submit` builds a `JobRequest`; the verbs' own checks run here, before anything is sent.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

from jobs.job.arguments import split_arguments
from raytrain.errors import InputError

# ---------------------------------------------------------------- package
# The working directory of a submitted job as one archive: what is left out, whether Ray takes what remains, and which
# of the user's modules the job needs.


EXCLUDED = (
    ".git", ".hg", ".svn", "/runs", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".ipynb_checkpoints",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".tox", ".nox", ".cache", "*.egg-info", "/build", "/dist", "wandb",
    "mlruns", ".DS_Store",
)  # fmt: skip
"""Patterns in the syntax of .gitignore that never belong to a job. .gitignore and .rayignore are respected as well."""

LARGE_FILE = 100 << 20
"""Larger files are data or weights: they are left out, and belong on storage that every node can access."""

MIB = 1 << 20
OPTIONAL = ("except ImportError", "except ModuleNotFoundError", "except Exception", "except:", "if TYPE_CHECKING")
"""The statements in which an import that fails is no error."""
_SILENT = logging.getLogger(f"{__name__}.silent")  # what Ray's packer says stands in the error, or in `Package.text`
_SILENT.disabled = True


@dataclass(frozen=True)
class Package:
    """The archive of a working directory.

    Attributes:
        names: the files in it.
        bytes: its size, compressed.
        limit: the size up to which Ray takes it.
        large: files left out because of their size, with their bytes.
    """

    path: Path
    names: frozenset[str]
    bytes: int
    limit: int
    large: dict[str, int]

    @property
    def text(self) -> str:
        """One line for people."""
        left = "".join(f"; left out: {name} ({size / MIB:.0f} MiB)" for name, size in sorted(self.large.items()))
        size = f"{len(self.names)} files, {self.bytes / MIB:.1f} MiB; Ray's limit is {self.limit / MIB:.0f} MiB"
        return f"working directory: {size}{left}"


def package_limit() -> int:
    """The size in bytes up to which Ray takes a package: its job server takes less in one request than its storage."""
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    return min(GCS_STORAGE_MAX_SIZE, getattr(ray_constants, "DASHBOARD_CLIENT_MAX_SIZE", GCS_STORAGE_MAX_SIZE))


def pack(folder: Path, archive: Path, *, limit: int | None = None) -> Package:
    """Pack the files of `folder` that belong to a job.

    Args:
        archive: the file to write, ending in .zip.
        limit: bytes; by default Ray's.

    Raises:
        InputError: they are larger than the limit; the error names the largest entries.
    """
    from ray._private.runtime_env.packaging import create_package

    limit = package_limit() if limit is None else limit
    left_out, large = _found_in(folder)
    excludes = [*EXCLUDED, *(f"/{name}" for name in (*left_out, *large))]
    create_package(str(folder), archive, include_gitignore=True, excludes=excludes, logger=_SILENT)
    with zipfile.ZipFile(archive) as content:
        entries = {entry.filename: entry.compress_size for entry in content.infolist() if not entry.is_dir()}
    package = Package(archive, frozenset(entries), archive.stat().st_size, limit, large)
    if package.bytes >= limit:
        largest = sorted(_by_first_part(entries).items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} ({size / MIB:.1f} MiB)" for name, size in largest)
        raise InputError(
            "working directory",
            got=f"{folder}, {package.bytes / MIB:.1f} MiB packed; the largest entries are {named}",
            expected=f"less than {limit / MIB:.0f} MiB, the limit of Ray",
            remedy="move data to storage that every node can access, or name what the job does not need in .rayignore",
        )
    return package


def _found_in(folder: Path) -> tuple[list[str], dict[str, int]]:
    """(virtual environments and run folders, large files with their bytes) below `folder`, as relative names."""
    left_out, large = [], {}
    skipped = {name.strip("/") for name in EXCLUDED if "*" not in name}
    for current, folders, files in os.walk(folder):
        if ("pyvenv.cfg" in files or _is_run(current)) and Path(current) != folder:
            left_out.append(os.path.relpath(current, folder))
            folders.clear()
            continue
        links = [path for name in folders if os.path.islink(path := os.path.join(current, name)) and _is_run(path)]
        left_out += [os.path.relpath(path, folder) for path in links]
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            path = os.path.join(current, name)
            if os.path.isfile(path) and (size := os.path.getsize(path)) > LARGE_FILE:
                large[os.path.relpath(path, folder)] = size
    return left_out, large


def _is_run(folder: str) -> bool:
    """Whether this is a run folder, or a link to one, of a job that ran from here."""
    return all(os.path.exists(os.path.join(folder, name)) for name in ("events.jsonl", "attempts"))


def _by_first_part(entries: dict[str, int]) -> dict[str, int]:
    """Bytes of each file, and of each folder at the top."""
    sizes: dict[str, int] = {}
    for name, size in entries.items():
        first, _, rest = name.partition("/")
        key = f"{first}/" if rest else first
        sizes[key] = sizes.get(key, 0) + size
    return sizes


# -- modules of the user --------------------------------------------------------------------------------


def users_modules(spec: Any) -> list[tuple[str, str]]:
    """(key, module) of what a job names as "module:function"."""
    named = {"model.builder": spec.model.builder, "data.source": spec.data.source, "data.collate": spec.data.collate}
    pairs = [*named.items(), *(("telemetry.observers", one) for one in spec.telemetry.observers)]
    return [(key, one.partition(":")[0]) for key, one in pairs if isinstance(one, str) and ":" in one]


def imported_files(module: str, folder: Path) -> dict[Path, str]:
    """Files below `folder` that a module cannot do without, each with the module that imports it.

    They are found in their source: nothing is imported, which may need the cluster.
    """
    found, left = dict[Path, str](), [(module, module)]
    others = [path for path in sys.path if path and Path(path).resolve() != folder.resolve()]
    while left:
        name, importer = left.pop()
        parts = name.split(".")
        if PathFinder.find_spec(parts[0], others) is not None:  # an installed one comes first
            continue
        for end in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:end])
            path = base / "__init__.py" if (base / "__init__.py").is_file() else base.with_suffix(".py")
            if path.is_file() and path not in found:
                found[path] = importer
                left += [(one, ".".join(parts[:end])) for one in _imports(path, parts[: end - (path.parent != base)])]
    return found


def _imports(path: Path, package: list[str]) -> Iterator[str]:
    """Names that a file of a package imports, which may be modules."""
    left = list[ast.AST]()
    with contextlib.suppress(SyntaxError, ValueError):  # the job says so
        left = [ast.parse(path.read_bytes())]
    for node in left:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), one.name]) for one in node.names)
        optional = isinstance(node, ast.Try | ast.If) and any(words in ast.unparse(node) for words in OPTIONAL)
        left += [child for child in ast.iter_child_nodes(node) if not optional or child not in node.body]  # pyright: ignore


# ---------------------------------------------------------------- request
# What is submitted: a verb with its arguments, checked here as the verb itself would check them.


VERBS = ("train", "tune", "infer", "check", "bench", "export", "report")
"""Verbs that can run on a cluster; the others need no machines."""
LASTING = "an absolute path on storage that outlives the job and that every node can access, or a URI (s3://, gs://)"
CARRIED = (
    "a file in the package of the working directory, an absolute path on storage that every node can access, or a URI"
)
ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class JobRequest:
    """One verb to run on a cluster.

    Attributes:
        arguments: of the verb, as the cluster gets them.
        spec: the job; None for a verb without one, and for a resumed run that cannot be seen from here.
        save_dir: where the runs of the job are; by default the one of `spec`.
        job_file: the JOB.yaml below the working directory; None for a recipe, or none.
    """

    verb: str
    arguments: tuple[str, ...]
    spec: Any = None
    job_file: str | None = None
    save_dir: str | None = None

    @property
    def entrypoint(self) -> str:
        return shlex.join(["python", "-m", "jobs", self.verb, *self.arguments])

    @property
    def record(self) -> dict[str, Any]:
        """What is stored with the job on the server."""
        grace_s = self.spec.retry.stop_grace_s if self.spec is not None else None
        name = self.spec.name if self.spec is not None else None
        save_dir = self.save_dir or (self.spec.save.dir if self.spec is not None else None)
        return {"verb": self.verb, "name": name, "save_dir": save_dir, "stop_grace_s": grace_s}

    def check_package(self, package: Package, folder: Path) -> None:
        """Check that the files of the working directory that the job reads are in its package. Errors: InputError."""
        from jobs.job.facts import local_paths, resolved

        needed = {} if self.job_file is None else {"JOB.yaml": folder / self.job_file}
        if self.spec is not None:
            spec = resolved(self.spec)
            needed |= {key: Path(path) for key, path in local_paths(spec).items()}
            for key, path in local_paths(spec, missing=True).items():
                if Path(path).is_relative_to(folder) and "$" not in path:  # whose value is that on the cluster
                    raise InputError(key, got=f"{path}, which does not exist", expected=CARRIED)
        for key, path in needed.items():
            if not path.is_relative_to(folder) or path.is_dir():
                continue
            name = path.relative_to(folder).as_posix()
            if name not in package.names:
                why = f"its {package.large[name] >> 20} MiB are too much" if name in package.large else "it is ignored"
                raise InputError(
                    key, got=f"{name}, which is not in the package of the working directory: {why}", expected=CARRIED
                )
        for key, module in {} if self.spec is None else users_modules(self.spec):
            for path, importer in imported_files(module, folder).items():
                if (name := path.relative_to(folder).as_posix()) not in package.names:
                    raise InputError(
                        key, got=f"{name}, which {importer} imports, and which is not in the package of the working "
                        "directory: it is ignored", expected="every module of the job in it",
                        remedy=f"take it out of .gitignore and .rayignore, or add the line !/{name} to .gitignore",
                    )  # fmt: skip


def request_of(verb: str, command: click.Command, arguments: Sequence[str]) -> JobRequest:
    """The request to run `verb` with these arguments.

    Args:
        command: the verb itself, which parses the arguments.

    Raises:
        InputError: the arguments are wrong, or the results would be deleted with the job.
    """
    with command.make_context(verb, list(arguments)) as context:
        options = context.params
    given = [_below_here(item) for item in arguments]
    if verb in ("train", "tune", "infer"):
        return _job_request(verb, given, options)
    if verb == "bench":
        _check_lasting("--out", options.get("out"), needed=True)
    if verb == "export":
        _check_lasting("RUN", options.get("run"), needed=True)
        _check_lasting("--to", options.get("target"))
    if verb == "report":
        for run in options.get("runs") or ("runs/latest",):
            _check_lasting("RUN_DIR", run, needed=True)
    return JobRequest(verb, tuple(given))


def _job_request(verb: str, given: list[str], options: Mapping[str, Any]) -> JobRequest:
    from jobs.job.spec import load_spec, refuse_later

    path, overrides = split_arguments(tuple(options["arguments"]))
    for name in ("resume", "sweep"):
        if options.get(name) not in (None, "auto"):
            _check_lasting(f"--{name}" if name == "resume" else "--from-tune", options[name])
    resumes = options.get("resume") not in (None, "auto")
    if verb == "infer":
        output = next((item.partition("=")[2] for item in overrides if item.startswith("infer.output=")), None)
        if path is None or path.suffix not in (".yaml", ".yml"):
            _check_lasting("infer.output", output, needed=not resumes)
            _check_lasting("RUN", None if path is None else str(path), needed=True)
            return JobRequest(verb, tuple(given))
    elif resumes:
        return _resume_request(verb, given, str(options["resume"]), path, overrides)
    loaded = load_spec(path, overrides, runs_here=False)
    refuse_later(loaded.spec, verb)
    _check_lasting("save.dir", loaded.spec.save.dir, needed=True)
    if verb == "infer":
        _check_lasting("infer.output", loaded.spec.infer.output)
    if loaded.spec.cluster.address is not None:
        raise InputError(
            "cluster.address", got=loaded.spec.cluster.address, expected="no address in a submitted job",
            remedy="the job uses the cluster that it is submitted to: remove the key",
        )  # fmt: skip
    return JobRequest(verb, tuple(given), loaded.spec, _job_file(path))


def _resume_request(
    verb: str, given: list[str], folder: str, path: Path | None, overrides: Sequence[str]
) -> JobRequest:
    """The request to resume a run or a search, which is checked as the verb would, where it can be seen from here.

    Raises:
        InputError: there is no run, it still runs, its checkpoints are damaged, or a key may not change.
    """
    spec = None
    if os.path.isdir(folder) and verb == "tune":
        from jobs.tune import open_sweep

        spec = open_sweep(folder, path, overrides)[1].spec
    elif os.path.isdir(folder):
        from jobs.driver.run_folder import check_checkpoints, open_resumed

        resumed = open_resumed(folder, path, overrides)
        assert resumed is not None  # None is for "auto"
        check_checkpoints(resumed)
        spec = resumed.loaded.spec
    return JobRequest(verb, tuple(given), spec, _job_file(path), save_dir=os.path.dirname(folder.rstrip("/")))


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
        raise InputError("--id", got=job_id, expected="up to 64 letters, digits, dots, dashes and underscores")


def _below_here(argument: str) -> str:
    """An absolute path of an existing file below the working directory, made relative: the cluster has another one."""
    path = Path(argument)
    below = path.is_absolute() and path.is_file() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if below else argument


def _check_lasting(key: str, path: str | None, *, needed: bool = False) -> None:
    """Check that a path is one that outlives the job. Errors: InputError."""
    if path is None and not needed:
        return
    if path is None:
        raise InputError(key, got="nothing", expected=LASTING)
    if "://" not in path and not path.startswith(("/", "~", "$")):  # the last two are looked at on the cluster
        raise InputError(
            key, got=f"{path}, a folder in the job's working directory on the cluster, which Ray deletes",
            expected=LASTING, remedy=f"such as {key}=/shared/{Path(path).name}" if "." in key else "",
        )  # fmt: skip
