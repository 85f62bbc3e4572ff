"""The user's modules that a job imports, found in their source: nothing is imported, which may need the cluster."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

GUARDS = ("ImportError", "ModuleNotFoundError", "Exception")


def imported_files(module: str, folder: Path) -> dict[Path, str]:
    """Files below `folder` that the import of a module needs, itself among them, each with the module that imports it.

    What is imported inside `try ... except ImportError` or `if TYPE_CHECKING` may be missing.
    """
    found, left = dict[Path, str](), [(module, module)]
    while left:
        name, importer = left.pop()
        parts = name.split(".")
        others = [path for path in sys.path if path and Path(path).resolve() != folder.resolve()]
        if PathFinder.find_spec(parts[0], others) is not None:  # an installed one comes first
            continue
        for end in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:end])
            package = base / "__init__.py"
            path = package if package.is_file() else base.with_suffix(".py")
            if path.is_file() and path not in found:
                found[path] = importer
                inside = parts[:end] if path == package else parts[: end - 1]
                left += [(one, ".".join(parts[:end])) for one in _imports(path, inside)]
    return found


def _imports(path: Path, package: list[str]) -> Iterator[str]:
    """Names that a file imports, which may be modules."""
    try:
        left: list[ast.AST] = [ast.parse(path.read_bytes())]
    except (SyntaxError, ValueError):  # the job says so
        return
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{one.name}".strip(".") for one in node.names)
        guarded = isinstance(node, ast.Try) and any(
            one.type is None or any(word in ast.unparse(one.type) for word in GUARDS) for one in node.handlers
        )
        guarded |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inside = getattr(node, "body", []) if guarded else []
        left += [child for child in ast.iter_child_nodes(node) if child not in inside]
