"""The line between a bench and the processes it measures: one runs its block, everybody else waits without a CPU.

A Unix socket in a private directory; each message is one line of JSON. The bench is the server; each process of an arm
connects, says who it is, and then obeys `{"steps": n}` until it hears `{"steps": 0}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from raytrain.errors import RunError

#: Where the processes of an arm find the bench; Ray's workers inherit it from the driver's environment.
ADDRESS = "RAYTRAIN_BENCH_SOCKET"
#: Seconds without a word after which an arm counts as dead.
PATIENCE_S = 180.0
#: A process that was told to leave may take so long.
ENDING_S = 20.0


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rw", encoding="utf-8", newline="\n")

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            RunError: the other end is gone, or said nothing within the socket's time limit.
        """
        try:
            text = self._file.readline()
        except TimeoutError as error:
            raise RunError(f"no word from the other end within {self._socket.gettimeout():g} s") from error
        if not text:
            raise RunError("the other end hung up")
        return json.loads(text)

    def close(self) -> None:
        """Hang up."""
        for end in (self._file, self._socket):
            with contextlib.suppress(OSError):  # what was left to send to somebody who is gone
                end.close()


def dial(*, arm: str, rank: int) -> Line:
    """Connect to the bench and say who is there; the time of it ends this arm's start-up."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ[ADDRESS])
    line = Line(connection)
    line.send({"arm": arm, "rank": rank, "time": time.time()})
    return line


class Arms:
    """The bench's end: every connected process, by arm. Runs in the bench's own process."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="rtb-")  # mode 0700, and short: socket paths end at 107 bytes
        self.address = os.path.join(self.folder, "s")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._listener.settimeout(0.5)
        self._lines: dict[str, list[Line]] = {}
        self._ready: dict[str, float] = {}

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_exception: object) -> None:
        for lines in self._lines.values():
            for line in lines:
                line.close()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def await_arm(self, arm: str, *, processes: int, alive: Callable[[], bool]) -> float:
        """Wait until all processes of `arm` have connected; the unix time at which the last was ready.

        Processes of other arms that call meanwhile are kept for their own turn.

        Raises:
            RunError: the arm ended before.
        """
        lines = self._lines.setdefault(arm, [])
        while len(lines) < processes:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if not alive():
                    raise RunError(f"the arm {arm!r} ended before its first step") from None
                continue
            connection.settimeout(PATIENCE_S)
            line = Line(connection)
            hello = line.receive()
            self._lines.setdefault(hello["arm"], []).append(line)
            self._ready[hello["arm"]] = max(self._ready.get(hello["arm"], 0.0), hello["time"])
        return self._ready[arm]

    def order(self, arm: str, message: dict[str, Any]) -> dict[str, Any]:
        """Let every process of an arm obey `message`; the answer of the last to finish (the largest "seconds")."""
        return max(self.ask(arm, message), key=lambda answer: answer["seconds"])

    def ask(self, arm: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The same, with the answers of all of them."""
        for line in self._lines[arm]:
            line.send(message)
        return [line.receive() for line in self._lines[arm]]

    def dismiss(self, arm: str) -> None:
        """Tell an arm that it was the last block, and forget it."""
        self._ready.pop(arm, None)
        for line in self._lines.pop(arm, []):
            with contextlib.suppress(OSError):
                line.send({"steps": 0})
            line.close()


def await_end(process: subprocess.Popen[Any], *, within_s: float = ENDING_S) -> None:
    """Wait for a process that was told to leave; it is killed if it does not."""
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
