"""Devices that a user's own code names, found by reading it: the plan says where, and nothing of it is run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.job.spec import JobSpec

#: As torch names accelerators; "cpu" is right for a dataset, whose rows are moved later.
ACCELERATORS = ("cuda", "hip", "xpu", "mps")
#: A module with more places than this is told by the first of them.
TOLD_AT_MOST = 3


def warn_of_named_devices(spec: JobSpec) -> list[str]:
    """A warning for each file of `model.builder` and `data.source` that names an accelerator: a process has one device,
    which raytrain chooses, and to which it moves the model once and each batch."""
    found = []
    files = (_file_of(reference or "") for reference in (spec.model.builder, spec.data.source))
    for path in dict.fromkeys(path for path in files if path is not None):
        places = list(named_devices(path.read_text(encoding="utf-8", errors="replace")))
        if places:
            told = ", ".join(f"{path.name}:{line} {what}" for line, what in places[:TOLD_AT_MOST])
            more = f" and {len(places) - TOLD_AT_MOST} more" if len(places) > TOLD_AT_MOST else ""
            found.append(
                f"{told}{more}: raytrain moves the model and each batch to the worker's own device; leave it out,"
                " or take the device of a tensor that is there (x.device)"
            )
    return found


def named_devices(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is written there) of each call in Python source that names an accelerator; none where it cannot be
    read, which the import will say better."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        called = call.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        values = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "device")]
        given = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        named = [text for text in given if text.split(":")[0] in ACCELERATORS]
        by_keyword = any(word.arg == "device" for word in call.keywords)
        for_cuda = name == "cuda" or (name == "set_device" and ast.unparse(called).endswith("cuda.set_device"))
        if isinstance(called, ast.Attribute) and for_cuda:
            yield call.lineno, f".{name}()"
        elif named and (name in ("to", "device", "set_default_device") or by_keyword):
            yield call.lineno, f'{name}("{named[0]}")'


def _file_of(reference: str) -> Path | None:
    """Where a `module:function` of the user's own is written; None for ours and for what is not found as a file."""
    module, _, function = reference.partition(":")
    if not function or module.split(".")[0] in ("raytrain", "experts", "jobs", "cluster"):
        return None
    below = module.replace(".", os.sep)
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, f"{below}.py"), Path(folder, below, "__init__.py")):
            if path.is_file():
                return path
    return None
