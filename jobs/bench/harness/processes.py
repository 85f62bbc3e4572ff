"""Processes that a bench measures: it starts them, asks them for one block at a time, and ends them.

Every process connects to the Unix socket of its arm (`multiprocessing.connection`). The bench asks one arm at a time
with `{"steps": n, ...}`; all other processes wait on their socket and use no CPU. `{"steps": 0}` ends a process.

The bench uses `Arms`, and an `ArmProcesses` for each arm; a process uses `serve_blocks`, or `connect` where the steps
are not its own, as in an observer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from raytrain.errors import RunError

#: Environment variable with the path of the arm's socket; Ray's workers inherit it from the process that starts them.
ADDRESS = "RAYTRAIN_BENCH_SOCKET"
ANSWER_TIMEOUT_S = 180.0
#: Seconds within which a process must exit after its last block: a run writes its report.
EXIT_TIMEOUT_S = 120.0
#: What every process of an arm runs.
MEMBER = "jobs.bench.harness.member"
LOG_TAIL = 2000

# ---------------------------------------------------------------- in the measured processes


def receive(line: Connection, *, within_s: float | None = None) -> Any:
    """Wait for one message. Errors: RunError, the other end closed the connection, or sent nothing in time."""
    try:
        if not line.poll(within_s):
            raise RunError(f"the other process sent nothing within {within_s:g} s")
        return line.recv()
    except (EOFError, OSError) as error:
        raise RunError("the other process closed the connection") from error


def connect() -> Connection:
    """Connect to the bench, as a process of its arm that is ready."""
    return Client(os.environ[ADDRESS], family="AF_UNIX")  # pyright: ignore[reportReturnType]


def serve_blocks(run_block: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Connect, then answer every request with `run_block(request)` until the bench sends zero steps."""
    line = connect()
    while (request := receive(line))["steps"]:
        line.send(run_block(request))
    line.close()


# ---------------------------------------------------------------- in the bench


class Arms:
    """The arms of a bench, and a private folder for their files; a context manager that ends and removes them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rtb-"))  # mode 0700, and short: socket paths end at 107 bytes
        self.started: list[ArmProcesses] = []

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also where one did not end well
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for arm in self.started:
                stack.callback(arm.close, kill=exception[0] is not None)

    def await_ready(self) -> None:
        for arm in self.started:
            arm.await_ready()


class ArmProcesses:
    """The processes of one arm, each runs `FUNCTION(settings, rank)` of a module (`harness.member`), with one log file.

    Args:
        target: "MODULE:FUNCTION" that they run.
        settings: written to SETTINGS.json.
        processes: number of processes; `connecting` of them (default: all), or of those that they start, connect to the
            bench.
        launcher: arguments before `-m`, such as those of torchrun.
        environment: variables in addition to those of the bench.
    """

    def __init__(
        self, arms: Arms, arm: str, target: str, settings: Mapping[str, Any], *, processes: int = 1,
        connecting: int | None = None, launcher: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.arm, self.address = arm, str(arms.folder / f"{arm}.s")
        self._connecting = processes if connecting is None else connecting
        self._lines: list[Connection] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(self._connecting)
        self._listener.settimeout(0.5)
        path, self._log = arms.folder / f"{arm}.json", arms.folder / f"{arm}.log"
        path.write_text(json.dumps(settings))
        arms.started.append(self)
        variables = {**os.environ, ADDRESS: self.address, **(environment or {})}
        command = [sys.executable, *launcher, "-m", MEMBER, target, str(path)]
        with self._log.open("ab") as log:
            self._processes = [
                subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env=variables)
                for rank in range(processes)
            ]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds the name of the arm and the end of its log to what goes wrong inside."""
        try:
            yield
        except (RunError, OSError) as error:
            raise RunError(f"the arm {self.arm!r}: {error}; {log_tail(self._log)}") from error

    def await_ready(self) -> None:
        """Wait until they have connected; one that exits before is a RunError."""
        with self._explained():
            while len(self._lines) < self._connecting:
                try:
                    accepted, _ = self._listener.accept()
                except TimeoutError:
                    if any(process.poll() is not None for process in self._processes):
                        raise RunError("ended before its first step") from None
                else:
                    accepted.settimeout(None)
                    self._lines.append(Connection(accepted.detach()))

    def ask_all(self, *, steps: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Send a request to all that are connected, and return their answers."""
        with self._explained():
            for line in self._lines:
                line.send({"steps": steps, **more})
            return [receive(line, within_s=ANSWER_TIMEOUT_S) for line in self._lines]

    def ask(self, *, steps: int = 1, **more: Any) -> dict[str, Any]:
        """As `ask_all`; returns the answer of the slowest, the one with the most "seconds"."""
        return max(self.ask_all(steps=steps, **more), key=lambda answer: answer["seconds"])

    def close(self, *, kill: bool = False) -> None:
        """Tell them that there are no more blocks, and wait until they exit; end them with `kill`, or if they do not.
        One that failed is a RunError."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send({"steps": 0})
            line.close()
        self._lines = []
        self._listener.close()
        for process in self._processes if kill else ():
            process.terminate()
        for process in self._processes:
            await_exit(process)
        codes = [process.returncode for process in self._processes]
        self._processes = []
        with self._explained():
            if any(codes) and not kill:
                raise RunError(f"did not end well: exit {', '.join(map(str, codes))}")


# ---------------------------------------------------------------- any command


def log_tail(log: Path) -> str:
    return f"its log ends with:\n{log.read_text(errors='replace')[-LOG_TAIL:]}"


def run_command(command: list[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; returns its standard output. Errors: RunError, it failed."""
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-LOG_TAIL:]}")
    return done.stdout


def await_exit(process: subprocess.Popen[Any], *, within_s: float = EXIT_TIMEOUT_S) -> None:
    """Wait for a process that was asked to exit; it is killed if it does not."""
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
