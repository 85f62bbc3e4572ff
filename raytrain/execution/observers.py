"""Observers: they see every row on rank 0 and cannot change the run.

An observer is any object with `metrics(row)` and/or `event(row)`, or a plain callable taking a row; users name theirs
as `telemetry.observers: [my_module:MyObserver]`. Rows are handed over as copies. One that raises is switched off, and
an event says so; the run goes on.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from raytrain.errors import InputError


class Sink(Protocol):
    """Anything rows can be written to."""

    def write(self, row: dict[str, Any]) -> None:
        """Take one row."""
        ...


class Observers:
    """Rank 0's observers.

    Args:
        observers: instances or callables.
        on_failure: told (name, traceback) when one was switched off.
    """

    def __init__(self, observers: list[Any], *, on_failure: Callable[[str, str], None]) -> None:
        self._active = list(observers)
        self._on_failure = on_failure

    def metrics(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl was written."""
        self._tell("metrics", row)

    def event(self, row: dict[str, Any]) -> None:
        """A row of events.jsonl was written."""
        self._tell("event", row)

    def close(self) -> None:
        """The run ends; observers with `close` are closed."""
        for observer in list(self._active):
            self._guarded(observer, getattr(observer, "close", None))

    def _tell(self, verb: str, row: dict[str, Any]) -> None:
        for observer in list(self._active):
            method = getattr(observer, verb, None)
            if (
                method is None
                and callable(observer)
                and not (hasattr(observer, "metrics") or hasattr(observer, "event"))
            ):
                method = observer
            self._guarded(observer, method, copy.deepcopy(row))

    def _guarded(self, observer: Any, method: Callable[..., Any] | None, *arguments: Any) -> None:
        if method is None:
            return
        try:
            method(*arguments)
        except Exception:  # a guest's failure must not end the run: it is switched off, and the event log says why
            self._active.remove(observer)
            self._on_failure(type(observer).__name__, traceback.format_exc())


def load_observers(names: list[str], resolve: Callable[..., Any]) -> list[Any]:
    """Build the users' observers; a class is called without arguments.

    Raises:
        InputError: a name cannot be imported, or its class cannot be built that way.
    """
    built = []
    for name in names:
        found = resolve(name, key="telemetry.observers")
        try:
            built.append(found() if isinstance(found, type) else found)
        except TypeError as error:
            raise InputError(
                "telemetry.observers",
                seen=f"{name} ({error})",
                expected="a class that is built without arguments, or a callable taking a row",
            ) from error
    return built


class TensorBoard:
    """Scalars of every row as TensorBoard files (tensorboardX), on a local run folder."""

    def __init__(self, folder: str) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(folder, flush_secs=5)

    def metrics(self, row: dict[str, Any]) -> None:
        """One scalar for each finite number of the row, under train/ or eval/; of others tensorboardX complains."""
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()
