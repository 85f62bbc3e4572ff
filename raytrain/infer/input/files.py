"""The files of an input: which there are, in which order, and of which kind. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain.errors import InputError
from raytrain.runs.storage import file_size, join, locate, matching, open_store, read_bytes, split

KEY = "infer.input"
FORMATS = {
    ".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text",
}  # fmt: skip
EXPECTED = (
    f"files that end in {', '.join(FORMATS)}, also .gz, a folder of files of one of these kinds, or IDX images "
    "(images-idx3-ubyte, also .gz)"
)
IDX = re.compile(r"idx\d[-.]ubyte(\.gz)?$|\.idx(\d-ubyte)?(\.gz)?$")
#: Kinds whose rows name their columns, so that a row may lack some.
NAMED_BY_ROW = ("jsonl", "json")


@dataclass(frozen=True)
class InputFiles:
    """The files of an input, all of one format, in the order of their rows."""

    paths: tuple[str, ...]
    kind: str


def input_files(given: str | Sequence[str]) -> InputFiles:
    """The files that `infer.input` names: files, folders and patterns (sorted by name), local paths or URIs.

    Raises:
        InputError: nothing is there, or files of no known kind or of several kinds.
    """
    named = [given] if isinstance(given, str) else list(given)
    paths = [file for one in named for path in matching(one, key=KEY) for file in _files_at(path)]
    kinds = {path: _kind(path) for path in paths}
    first = kinds[paths[0]]
    for path, kind in kinds.items():
        if kind != first:
            raise InputError(KEY, got=f"{path} beside {paths[0]}", expected="files of one kind")
        file_size(path, key=KEY)
    return InputFiles(tuple(paths), first)


def _files_at(path: str) -> list[str]:
    store = open_store(path)
    names = sorted(entry.name for entry in store.entries("") if not entry.name.startswith((".", "_")))
    if not names:
        return [path]
    files = [name for name in names if _suffix(name) in FORMATS]
    if not files:
        raise InputError(KEY, got=f"the folder {path} with {names[0]}", expected=EXPECTED)
    return [join(path, name) for name in files]


def _suffix(path: str) -> str:
    return os.path.splitext(split(path)[1].lower().removesuffix(".gz"))[1]


def _kind(path: str) -> str:
    kind = FORMATS.get(_suffix(path)) or ("idx" if IDX.search(split(path)[1].lower()) else None)
    if kind is None:
        raise InputError(KEY, got=path, expected=EXPECTED)
    return kind


def fingerprint(path: str) -> str:
    """A hash that tells two versions of a file apart by size, first and last bytes, without reading all of it."""
    head = read_bytes(path, key=KEY, limit=1 << 16)
    size = file_size(path, key=KEY)
    filesystem, inner = locate(path, key=KEY)
    with filesystem.open_input_file(inner) as file:
        file.seek(max(0, size - (1 << 16)))
        tail = file.read(1 << 16)
    return hashlib.sha256(b"%d " % size + head + tail).hexdigest()[:16]
