"""The user's modules that a job imports, found in their source: nothing is imported, which may need the cluster."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

OPTIONAL = ("except ImportError", "except ModuleNotFoundError", "except Exception", "except:", "if TYPE_CHECKING")


def users_modules(spec: Any) -> list[tuple[str, str]]:
    """(key, module) of what a job names as "module:function"."""
    named = {"model.builder": spec.model.builder, "data.source": spec.data.source, "data.collate": spec.data.collate}
    pairs = [*named.items(), *(("telemetry.observers", one) for one in spec.telemetry.observers)]
    return [(key, one.partition(":")[0]) for key, one in pairs if isinstance(one, str) and ":" in one]


def imported_files(module: str, folder: Path) -> dict[Path, str]:
    """Files below `folder` that a module cannot do without, each with the module that imports it."""
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
