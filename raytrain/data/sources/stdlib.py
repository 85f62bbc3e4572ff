"""The source `stdlib`: the source text of Python's own standard library. Torch-free."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from raytrain.errors import InputError

# Folders that some Python builds lack; the rest is the same text for the same Python version.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "__pycache__"}
)
STDLIB_MAX_BYTES = 4_000_000
STDLIB = "the source text of Python's standard library"


def stdlib_files(max_bytes: int = STDLIB_MAX_BYTES) -> tuple[list[Path], int]:
    """Return the standard library's source files, sorted, up to `max_bytes`, and their total bytes.

    Raises:
        InputError: this Python has no source files (for example an embedded build).
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in STDLIB_LEFT_OUT)
        found += [Path(folder) / name for name in files if name.endswith(".py")]
    chosen, total = [], 0
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if total >= max_bytes:
            break
        size = path.stat().st_size
        if size:
            chosen.append(path)
            total += size
    if not chosen:
        raise InputError("data.source", got=f"no Python source text in {root}", expected="the standard library")
    return chosen, total


def read_stdlib(max_bytes: int = STDLIB_MAX_BYTES) -> bytes:
    """Return the source text of Python's standard library: sorted by path, UTF-8, truncated to `max_bytes`.

    The bytes are the same for the same Python version. Machines may have different versions, so the driver reads the
    text and sends it to the workers (`raytrain.data.sources.open.read_on_driver`).
    """
    parts, total = [], 0
    # Files that are not UTF-8 are skipped, so twice the bytes are listed.
    for path in stdlib_files(max_bytes * 2)[0]:
        if total >= max_bytes:
            break
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        parts.append(text)
        total += len(text)
    return b"".join(parts)[:max_bytes]
