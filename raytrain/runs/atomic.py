"""Large files that appear complete or not at all. Torch-free."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO

from raytrain.runs.storage import SAVES, LocalStore, WriteAdvice, explained_writes, open_store, split


@contextlib.contextmanager
def whole_file(path: str, advice: WriteAdvice = SAVES) -> Iterator[BinaryIO]:
    """Open a new file, local or at a URI, that is written piece by piece: it has its name once the block ends, and is
    deleted if the block raises.

    Raises:
        RunError: it cannot be written.
    """
    folder, name = split(path)
    store = open_store(folder, advice)
    if isinstance(store, LocalStore):
        yield from _local(store.at(name), advice)
        return
    try:
        with store.open_write(name) as file:
            yield file
    except BaseException:
        store.delete(name)
        raise


def _local(path: str, advice: WriteAdvice) -> Iterator[BinaryIO]:
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with explained_writes(path, advice):
            os.makedirs(folder, exist_ok=True)
            with open(partial, "wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
