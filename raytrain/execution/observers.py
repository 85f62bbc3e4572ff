"""Observers receive every logged row on rank 0 and cannot change the run.

An observer is any object with `metrics(row)` and/or `event(row)`, or a plain callable that takes a row. Users
name theirs in `telemetry.observers: [my_module:MyObserver]`. Observers receive copies of the rows. An observer that
raises is disabled, which an event records; the run continues.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from typing import Any

from raytrain.errors import InputError
from raytrain.runs.mirror import MirroredFolder


class Observers:
    """Passes rows to the observers of rank 0.

    Args:
        observers: instances or callables.
        on_failure: called with (name, traceback) when an observer is disabled.
    """

    def __init__(self, observers: list[Any], *, on_failure: Callable[[str, str], None]) -> None:
        self._active = list(observers)
        self._on_failure = on_failure

    def metrics(self, row: dict[str, Any]) -> None:
        """Pass on a row that was written to metrics.jsonl."""
        self._notify("metrics", row)

    def event(self, row: dict[str, Any]) -> None:
        """Pass on a row that was written to events.jsonl."""
        self._notify("event", row)

    def close(self) -> None:
        """Close the observers that have a `close` method."""
        for observer in list(self._active):
            self._call(observer, getattr(observer, "close", None))

    def _notify(self, name: str, row: dict[str, Any]) -> None:
        for observer in list(self._active):
            method = getattr(observer, name, None)
            if (
                method is None
                and callable(observer)
                and not (hasattr(observer, "metrics") or hasattr(observer, "event"))
            ):
                method = observer
            self._call(observer, method, copy.deepcopy(row))

    def _call(self, observer: Any, method: Callable[..., Any] | None, *arguments: Any) -> None:
        if method is None:
            return
        try:
            method(*arguments)
        except Exception:  # a failing observer must not end the run: it is disabled, and an event records why
            self._active.remove(observer)
            self._on_failure(type(observer).__name__, traceback.format_exc())


def load_observers(names: list[str], resolve: Callable[..., Any]) -> list[Any]:
    """Import the observers that the user names; a class is instantiated without arguments.

    Raises:
        InputError: a name cannot be imported, or its class needs arguments.
    """
    built = []
    for name in names:
        observer = resolve(name, key="telemetry.observers")
        try:
            built.append(observer() if isinstance(observer, type) else observer)
        except TypeError as error:
            raise InputError(
                "telemetry.observers",
                got=f"{name} ({error})",
                expected="a class that takes no arguments, or a callable that takes a row",
            ) from error
    return built


class TensorBoard:
    """Writes the numbers of every row as TensorBoard scalars (tensorboardX)."""

    def __init__(self, folder: MirroredFolder) -> None:
        from tensorboardX import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(folder.path, flush_secs=5)
        self._error: OSError | None = None
        self._keep_thread()

    def _keep_thread(self) -> None:
        """An error of the disk ends the thread of tensorboardX (2.6) that writes, and `add_scalar` would then wait for
        room in its queue forever: here the thread goes on, and `metrics` raises the error. The names are private; a
        version without them is left as it is."""
        file: Any = self._writer.file_writer
        events = getattr(getattr(file, "event_writer", None), "_ev_writer", None)
        if events is None:
            return
        events.write_event, events.flush = self._kept(events.write_event), self._kept(events.flush)

    def _kept(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def writing(*given: Any) -> Any:
            try:
                return None if self._error is not None else write(*given)
            except OSError as error:
                self._error = error
                return None

        return writing

    def metrics(self, row: dict[str, Any]) -> None:
        """Write each finite number of the row as a scalar; tensorboardX warns of non-finite ones.

        Raises:
            OSError: its file could not be written, by now or earlier.
        """
        if self._error is not None:
            raise self._error
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush the file, and upload it where the run folder is on an object store."""
        self._writer.close()
        self._folder.close()
