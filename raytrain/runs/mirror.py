"""Files that are written locally and belong to a run folder, which may be on an object store."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join

UPLOAD_S = 10.0
"""Seconds between uploads."""


class MirroredFolder:
    """A local directory for files of a run that are appended to, such as logs.

    In a local run folder it is the directory itself. On an object store, which cannot append, it is a temporary
    directory, whose changed files are uploaded every `every_s` seconds and by `close`. An upload that fails is tried
    again by the next one; only `close` raises.

    Args:
        run: the run folder.
        name: the directory's name in it.
        resumed: names of files whose earlier content is kept, if they exist: a resumed process appends to them.
    """

    def __init__(self, run: RunFolder, name: str, *, resumed: tuple[str, ...] = (), every_s: float = UPLOAD_S) -> None:
        self._run, self._name, self._every_s = run, name, every_s
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.path: str = join(run.path, name)
        if run.is_local:
            os.makedirs(self.path, exist_ok=True)
            return
        self.path = tempfile.mkdtemp(prefix="raytrain-")
        for file in resumed:
            with contextlib.suppress(FileNotFoundError):
                Path(self.path, file).write_bytes(run.store.read_bytes(f"{name}/{file}"))
        threading.Thread(target=self._beat, daemon=True, name="upload").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Upload what has changed and remove the temporary directory; may be called twice.

        Raises:
            RunError: a file could not be uploaded.
        """
        if self._run.is_local or self._stop.is_set():
            return
        self._stop.set()
        try:
            self._upload()
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            with contextlib.suppress(RunError):  # tried again by the next upload
                self._upload()

    def _upload(self) -> None:
        with self._lock:
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                found = entry.stat()
                state = found.st_size, found.st_mtime_ns
                if self._uploaded.get(entry.name) != state:
                    self._run.store.write_bytes(f"{self._name}/{entry.name}", Path(entry.path).read_bytes())
                    self._uploaded[entry.name] = state
