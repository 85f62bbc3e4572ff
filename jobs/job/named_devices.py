"""Finds devices named in the user's code, for warnings in the plan. The code is parsed, not run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.job.spec import JobSpec
from raytrain.config.messages import abbreviated

#: torch's names of accelerators. "cpu" is correct in a dataset, whose rows are moved later.
ACCELERATORS = ("cuda", "hip", "xpu", "mps")
#: The warning lists at most this many places of a file.
LISTED_PLACES = 3


def warn_of_named_devices(spec: JobSpec) -> list[str]:
    """A warning for each file of `model.builder` and `data.source` that names an accelerator.

    raytrain chooses one device for each process and moves the model and each batch to it.
    """
    found = []
    files = (_file_of(reference or "") for reference in (spec.model.builder, spec.data.source))
    for path in dict.fromkeys(path for path in files if path is not None):
        places = list(named_devices(path.read_text(encoding="utf-8", errors="replace")))
        if places:
            named = abbreviated([f"{path.name}:{line} {what}" for line, what in places], LISTED_PLACES)
            found.append(
                f"{named}: raytrain moves the model and each batch to the worker's own device; remove it,"
                " or use the device of an existing tensor (x.device)"
            )
    return found


def named_devices(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each call in Python source that names an accelerator.

    Nothing is yielded if the source cannot be parsed: importing it reports the error better.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        called = call.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        given = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        named = [text for text in given if text.split(":")[0] in ACCELERATORS]
        by_keyword = any(keyword.arg == "device" for keyword in call.keywords)
        for_cuda = name == "cuda" or (name == "set_device" and ast.unparse(called).endswith("cuda.set_device"))
        if isinstance(called, ast.Attribute) and for_cuda:
            yield call.lineno, f".{name}()"
        elif named and (name in ("to", "device", "set_default_device") or by_keyword):
            yield call.lineno, f'{name}("{named[0]}")'


def _file_of(reference: str) -> Path | None:
    """The file that defines a user's `module:function`; None for raytrain's own modules and if no file is found."""
    module, _, function = reference.partition(":")
    if not function or module.split(".")[0] in ("raytrain", "experts", "jobs", "cluster"):
        return None
    below = module.replace(".", os.sep)
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, f"{below}.py"), Path(folder, below, "__init__.py")):
            if path.is_file():
                return path
    return None
