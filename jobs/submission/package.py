"""The working directory of a submitted job as one archive: what is left out, whether Ray takes what remains, and which
of the user's modules the job needs."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raytrain.errors import InputError

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
