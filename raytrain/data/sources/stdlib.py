"""Data files, local or by any URI pyarrow's filesystems know; every failure names its key. Torch-free."""

from __future__ import annotations

import os
import stat
import sysconfig
from pathlib import Path
from typing import Any

from raytrain.errors import InputError, first_line

# Tests and packages that are no part of every Python build; the rest is the same text for the same Python.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "__pycache__"}
)
STDLIB_MAX_BYTES = 4_000_000
STDLIB = "the source text of Python's standard library"


def locate(path: str, *, key: str) -> tuple[Any, str]:
    """The pyarrow filesystem of `path` and the path inside it.

    A path with ``://`` is a URI (``s3://``, ``gs://``, ``file://``, ...); anything else is a local path.

    Raises:
        InputError: an unknown scheme, or a filesystem that cannot be reached.
    """
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), os.path.expanduser(path)
    try:
        return fs.FileSystem.from_uri(path)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            key, seen=f"{path} ({first_line(error)})", expected="a local path or a URI pyarrow can open"
        ) from error


def file_size(path: str, *, key: str) -> int:
    """Bytes of one file. Raises InputError for what is missing, unreadable, empty or a directory."""
    try:
        is_folder, size = _stat(path, key=key)
    except FileNotFoundError as error:
        where = "" if "://" in path or os.path.isabs(path) else f" (from {os.getcwd()})"
        raise InputError(key, seen=f"no file at {path}{where}", expected="an existing file") from error
    except OSError as error:
        raise unreadable(path, error, key=key) from error
    if is_folder:
        remedy = "give a list of files to read several"
        raise InputError(key, seen=f"a directory at {path}", expected="a file", remedy=remedy)
    if not size:
        raise InputError(key, seen=f"an empty file at {path}", expected="a file with data in it")
    return size


def _stat(path: str, *, key: str) -> tuple[bool, int]:
    """(is a directory, bytes). A local path does without pyarrow, so that `plan` stays fast."""
    if "://" not in path:
        found = os.stat(os.path.expanduser(path))
        return stat.S_ISDIR(found.st_mode), found.st_size
    from pyarrow import fs

    filesystem, inner = locate(path, key=key)
    info = filesystem.get_file_info(inner)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(path)
    return info.type == fs.FileType.Directory, int(info.size or 0)


def read_bytes(path: str, *, key: str, limit: int | None = None) -> bytes:
    """The bytes of one file as they are (nothing is decompressed), or its first `limit` bytes."""
    file_size(path, key=key)
    try:
        if "://" not in path:
            with open(os.path.expanduser(path), "rb") as file:
                return file.read(limit)
        filesystem, inner = locate(path, key=key)
        with filesystem.open_input_stream(inner, compression=None) as stream:
            return stream.read(limit)
    except OSError as error:
        raise unreadable(path, error, key=key) from error


def unreadable(path: str, error: BaseException, *, key: str) -> InputError:
    """The error for a file that exists but cannot be read."""
    kind = "no permission to read" if isinstance(error, PermissionError) else "cannot read"
    return InputError(key, seen=f"{kind} {path}: {first_line(error)}", expected="a readable file")


def stdlib_files(max_bytes: int = STDLIB_MAX_BYTES) -> tuple[list[Path], int]:
    """The standard library's source files in sorted order, up to `max_bytes`, and their total bytes.

    Raises:
        InputError: this Python keeps no source text (for example an embedded build).
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
        raise InputError("data.source", seen=f"no Python source text in {root}", expected="the standard library")
    return chosen, total


def read_stdlib(max_bytes: int = STDLIB_MAX_BYTES) -> bytes:
    """Source text of Python's own standard library: sorted by path, UTF-8, cut at `max_bytes`.

    The same bytes for the same Python. Machines may differ in theirs, so the driver reads it and hands it to
    the workers (`raytrain.data.sources.open.for_workers`).
    """
    parts, total = [], 0
    # A file that is not UTF-8 is passed over, so the list is asked for with room to spare.
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
