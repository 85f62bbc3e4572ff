"""Processes that a bench measures: it starts them, asks them for one block at a time, and ends them.

Every process connects to the bench over a Unix socket (`multiprocessing.connection`). The bench asks one arm at a time
with `{"steps": n, ...}`; all other processes wait on their socket and use no CPU. `{"steps": 0}` ends a process.

The bench uses an `ArmServer` and an `ArmProcesses` for each arm; a process uses `serve_blocks`, or `connect` where the
steps are not its own, as in an observer.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from raytrain.errors import RunError

#: Environment variable with the path of the bench's socket; Ray's workers inherit it from the driver.
ADDRESS = "RAYTRAIN_BENCH_SOCKET"
#: Seconds within which an arm must answer.
ANSWER_TIMEOUT_S = 180.0
#: Seconds within which a process must exit after its last block.
EXIT_TIMEOUT_S = 20.0
#: What every process of an arm runs.
MEMBER = "jobs.bench.harness.member"
LOG_TAIL = 2000

# ---------------------------------------------------------------- in the measured processes


def receive(line: Connection, *, within_s: float | None = None) -> Any:
    """Wait for one message.

    Raises:
        RunError: the other end closed the connection, or sent nothing within so many seconds.
    """
    try:
        if not line.poll(within_s):
            raise RunError(f"the other process sent nothing within {within_s:g} s")
        return line.recv()
    except (EOFError, OSError) as error:
        raise RunError("the other process closed the connection") from error


def connect(arm: str) -> Connection:
    """Connect to the bench as a process of `arm` that is ready."""
    line: Any = Client(os.environ[ADDRESS], family="AF_UNIX")
    line.send(arm)
    return line


def serve_blocks(arm: str, run_block: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Connect, then answer every request with `run_block(request)` until the bench sends zero steps."""
    line = connect(arm)
    while (request := receive(line))["steps"]:
        line.send(run_block(request))
    line.close()


# ---------------------------------------------------------------- in the bench


class ArmServer:
    """The bench's end of all connections, by arm; a context manager that ends the processes of all arms on exit.

    Attributes:
        folder: private temporary folder for settings, logs and results; removed at the end.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rtb-"))  # mode 0700, and short: socket paths end at 107 bytes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / "s"))
        self._listener.listen(64)
        self._listener.settimeout(0.5)
        self._connections: dict[str, list[Connection]] = {}
        self._arms: list[ArmProcesses] = []
        self._environment = dict(os.environ)

    def __enter__(self) -> ArmServer:
        os.environ[ADDRESS] = str(self.folder / "s")
        return self

    def __exit__(self, *exception: Any) -> None:
        for arm in self._arms:
            arm.close(kill=exception[0] is not None)
        for arm in list(self._connections):
            self.dismiss(arm)
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.environ.clear()  # Ray has set variables too
        os.environ.update(self._environment)

    def own(self, arm: ArmProcesses) -> None:
        """Close this arm on exit; its processes are killed after an error."""
        self._arms.append(arm)

    def await_arm(self, arm: str, *, processes: int, alive: Callable[[], bool]) -> None:
        """Wait until all processes of `arm` have connected. Processes of other arms that connect meanwhile are kept.

        Raises:
            RunError: the arm ended first.
        """
        while len(self._connections.get(arm, [])) < processes:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                if not alive():
                    raise RunError(f"the arm {arm!r} ended before its first step") from None
                continue
            accepted.settimeout(None)
            line = Connection(accepted.detach())
            self._connections.setdefault(receive(line, within_s=ANSWER_TIMEOUT_S), []).append(line)

    def ask(self, arm: str, *, steps: int = 1, **more: Any) -> dict[str, Any]:
        """Send a request to every process of an arm; returns the answer of the slowest (the largest "seconds")."""
        for connection in self._connections[arm]:
            connection.send({"steps": steps, **more})
        answers = [receive(connection, within_s=ANSWER_TIMEOUT_S) for connection in self._connections[arm]]
        return max(answers, key=lambda answer: answer["seconds"])

    def dismiss(self, arm: str) -> None:
        """Tell the processes of an arm that there are no more blocks, and disconnect them."""
        for connection in self._connections.pop(arm, []):
            with contextlib.suppress(OSError):
                connection.send({"steps": 0})
            connection.close()


class ArmProcesses:
    """The processes of one arm, each runs `FUNCTION(settings, rank)` of a module (`harness.member`), with one log file.

    Args:
        target: "MODULE:FUNCTION" that they run.
        settings: written to SETTINGS.json.
        processes: number of processes; `connecting` of them (default: all) connect to the bench.
        launcher: arguments before `-m`, such as those of torchrun.
        environment: variables in addition to those of the bench.
    """

    def __init__(
        self, server: ArmServer, arm: str, target: str, settings: Mapping[str, Any], *, processes: int = 1,
        connecting: int | None = None, launcher: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.server, self.arm = server, arm
        self._connecting = processes if connecting is None else connecting
        path, self._log = server.folder / f"{arm}.json", server.folder / f"{arm}.log"
        path.write_text(json.dumps(settings))
        server.own(self)
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, *launcher, "-m", MEMBER, target, str(path)]
        with self._log.open("ab") as log:
            for rank in range(processes):
                variables = {**os.environ, **(environment or {})}
                started = subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env=variables)
                self._processes.append(started)

    def await_ready(self) -> None:
        """Wait until they have connected.

        Raises:
            RunError: with the end of their log, if one of them exited.
        """
        try:
            self.server.await_arm(self.arm, processes=self._connecting, alive=self._is_alive)
        except RunError as error:
            raise RunError(f"{error}; {self.log_tail()}") from error

    def ask(self, *, steps: int = 1, **more: Any) -> dict[str, Any]:
        """Send a request to all that are connected; returns the answer of the slowest (the largest "seconds").

        Raises:
            RunError: with the end of their log, if one of them exited or did not answer in time.
        """
        try:
            return self.server.ask(self.arm, steps=steps, **more)
        except (RunError, OSError) as error:
            raise RunError(f"{self.arm}: {error}; {self.log_tail()}") from error

    def cpu_seconds(self) -> float:
        """CPU seconds that they have used so far."""
        stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in self._processes]
        ticks = sum(int(ticks) for stat in stats for ticks in stat.rpartition(")")[2].split()[11:13])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self, *, kill: bool = False) -> None:
        """Dismiss them and wait until they exit; they are killed with `kill`, or if they do not exit in time."""
        self.server.dismiss(self.arm)
        for process in self._processes:
            if kill:
                process.kill()
            await_exit(process)

    def log_tail(self) -> str:
        """The end of their log, as part of a sentence."""
        return log_tail(self._log)

    def _is_alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)


# ---------------------------------------------------------------- any command


def log_tail(log: Path) -> str:
    """The end of a log, as part of a sentence."""
    return f"its log ends with:\n{log.read_text(errors='replace')[-LOG_TAIL:]}"


def run_command(command: list[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; returns its standard output.

    Raises:
        RunError: it failed.
    """
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
