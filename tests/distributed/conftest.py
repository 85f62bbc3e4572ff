"""Fixtures of the tests with real processes: user code, run folders as records, and the cleanup of processes."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GUEST = Path(__file__).parent / "guest"

INSTRUMENTS = str(Path(__file__).resolve().parents[1] / "numerics")
"""Where `lab` and `folders` are."""

if INSTRUMENTS not in sys.path:
    sys.path.append(INSTRUMENTS)


def merged_job(name: str = "guest", **sections: dict[str, Any]) -> dict[str, Any]:
    """A small job on the guest's model and data; sections are merged into it key by key."""
    job: dict[str, Any] = {
        "name": name,
        "model": {"builder": "guest_code:net"},
        "data": {"source": "guest_code:rows"},
        "optim": {"lr": 0.01, "warmup_steps": 2},
        "precision": {"dtype": "fp32"},
        "loop": {"global_batch_size": 12, "max_steps": 6, "log_every": 1},
        "scale": {"workers": 1, "threads": 1},
        "telemetry": {"tensorboard": False},
    }
    for section, keys in sections.items():
        job[section] = {**job.get(section, {}), **keys}
    return job


@pytest.fixture
def guest_job() -> Callable[..., dict[str, Any]]:
    """`guest_job(section={...})`: a small job on the guest's model and data, with these keys."""
    return merged_job


def answer_of_script(script: str, *arguments: object, timeout: float) -> Any:
    """What a script of the guest folder, which starts its own cluster, prints as a JSON line after "ANSWER".

    Args:
        arguments: after the temp dir for Ray.
        timeout: in seconds.
    """
    short = tempfile.mkdtemp(prefix="rtn-")  # socket paths end at 107 bytes
    process = subprocess.Popen(
        [sys.executable, str(GUEST / script), short, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)
    lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    assert lines, f"{out}\n{err}"
    return json.loads(lines[-1][7:])


@pytest.fixture(scope="session")
def answer_of() -> Callable[..., Any]:
    """`answer_of(script, *arguments, timeout=)`: what a script of the guest folder answers."""
    return answer_of_script


@dataclass(frozen=True)
class Run:
    """A run folder as a test reads it."""

    path: Path

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Complete rows of metrics.jsonl."""
        return [row for row in self._lines("metrics.jsonl") if row["kind"] == kind]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self._lines("events.jsonl") if row["kind"] == kind]

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of every train row, to the last bit."""
        return [(row["step"], row["loss"]) for row in self.rows("train")]

    def evals(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows("eval")]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.path / "result.json").read_text())

    @property
    def plan(self) -> dict[str, Any]:
        """The choices of plan.json."""
        return json.loads((self.path / "plan.json").read_text())["choices"]

    def checkpoints(self) -> list[int]:
        return sorted(int(mark.parent.name[5:]) for mark in self.path.glob("checkpoints/step_*/COMPLETE"))

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:08d}"

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class Place:
    """A folder with the guest's code to run commands in, and a private temp dir for their Ray.

    All processes of a command inherit `TMPDIR`, which identifies them.
    """

    folder: Path
    temp: Path

    @property
    def env(self) -> dict[str, str]:
        return {"TMPDIR": str(self.temp)}

    @staticmethod
    def job(**sections: Any) -> dict[str, Any]:
        """The job that `guest_job` makes."""
        return merged_job(**sections)

    def write(self, job: dict[str, Any], name: str = "job.yaml") -> Path:
        """The job as a file; JSON is YAML."""
        path = self.folder / name
        path.write_text(json.dumps(job))
        return path

    @property
    def run(self) -> Run:
        """The newest run."""
        return Run((self.folder / "runs" / "latest").resolve())

    def run_at(self, path: Path | str) -> Run:
        return Run(Path(path))

    def wait_for(self, what: Callable[[], Any], *, limit: float, command: Any = None) -> Any:
        """Returns the first true result of `what()`; fails if the command ends earlier, or at the limit."""
        ends = time.monotonic() + limit
        while time.monotonic() < ends:
            found = what()
            if found:
                return found
            if command is not None and command.process.poll() is not None:
                pytest.fail(f"the command ended early\n{command.finish(timeout=5).text}")
            time.sleep(0.02)
        if command is not None:
            command.signal_group(signal.SIGKILL)
        pytest.fail(f"not within {limit} s\n{command.finish(timeout=5).text if command is not None else ''}")

    def steps_of(self, attempt: int, *, more_than: int) -> Callable[[], bool]:
        """For `wait_for`: by the rows on disk, this attempt has run more than `more_than` steps."""

        def taken() -> bool:
            if not (self.folder / "runs" / "latest").exists():
                return False
            started = {row["attempt"]: row["from_step"] for row in self.run.events("attempt")}
            return attempt in started and len(self.run.losses()) > started[attempt] + more_than

        return taken

    def processes(self) -> list[int]:
        """Running processes of the commands that were started here."""
        marks = [f"\0TMPDIR={self.temp}{end}".encode() for end in ("\0", "/")]  # a folder of its own may be in it
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    told = b"\0" + (entry / "environ").read_bytes() + b"\0"
                    if any(mark in told for mark in marks):
                        found.append(int(entry.name))
                except OSError:  # it has exited, or belongs to another user
                    continue
        return found

    def titles(self, word: str) -> list[str]:
        """Command lines that contain `word`, of processes of the commands started here."""
        found = []
        for pid in self.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found += [line] if word in line else []
        return found

    def listening(self) -> set[str]:
        """Addresses on which the processes of the commands started here listen."""
        sockets, found = _listening_sockets(), set()
        for pid in self.processes():
            for channel in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = os.readlink(channel)
                except OSError:
                    continue
                found |= {sockets[target[8:-1]]} if target[8:-1] in sockets else set()
        return found

    def end(self, *, within: float) -> list[int]:
        """Waits until all processes of the commands started here have exited; returns those that have not."""
        ends = time.monotonic() + within
        while time.monotonic() < ends and self.processes():
            time.sleep(0.05)
        return self.processes()


def _listening_sockets() -> dict[str, str]:
    """inode -> address of every TCP socket of this machine that listens."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                number = fields[1].partition(":")[0]  # words of four bytes, each in the machine's order
                words = [bytes.fromhex(number[i : i + 8])[::-1] for i in range(0, len(number), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found[fields[9]] = str(getattr(address, "ipv4_mapped", None) or address)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder for commands; their remaining processes are killed after the test."""
    with placed(tmp_path) as place:
        yield place


@pytest.fixture(scope="module")
def start_head(start_module_python: Callable[..., Any], module_place: Place) -> Iterator[Callable[..., RayHead]]:
    """`start_head(env, num_gpus=0, python=None)` starts a Ray head in `module_place`, for all tests of a module."""
    with contextlib.ExitStack() as stack:
        yield lambda env, **options: stack.enter_context(ray_head(start_module_python, module_place, env, **options))


@pytest.fixture(scope="module")
def module_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """`place` for a command that several tests share."""
    with placed(tmp_path_factory.mktemp("place")) as place:
        yield place


@contextlib.contextmanager
def placed(folder: Path) -> Iterator[Place]:
    """A `Place`; afterwards all of its processes are killed."""
    shutil.copy(GUEST / "guest_code.py", folder)
    temp = Path(tempfile.mkdtemp(prefix="rtt-", dir="/tmp"))  # short: socket paths end at 107 bytes
    place = Place(folder, temp)
    yield place
    for pid in place.processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(temp, ignore_errors=True)


HEAD_LIMIT_S = 120


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`free_ports(count)`: free ports on loopback."""
    return find_free_ports


@pytest.fixture
def free_port() -> int:
    """A free port on loopback."""
    return find_free_ports(1)[0]


def find_free_ports(count: int) -> list[int]:
    """Free ports on loopback."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def ray_head(
    start: Callable[..., Any], place: Place, env: dict[str, str], *, num_gpus: int = 0, python: Path | None = None
) -> Iterator[RayHead]:
    """A Ray head as an administrator starts it, on loopback, with its own ports and folder.

    Args:
        python: of the head and its jobs; None: that of the tests.
    """
    gcs, dashboard, client, agent = find_free_ports(4)
    options = {
        "node-ip-address": "127.0.0.1", "dashboard-host": "127.0.0.1", "port": gcs, "dashboard-port": dashboard,
        "ray-client-server-port": client, "dashboard-agent-listen-port": agent,
        "num-cpus": 2, "num-gpus": num_gpus, "temp-dir": place.temp / "r",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    path = (
        f"{(python or Path(sys.executable)).parent}{os.pathsep}{os.environ['PATH']}"  # the job's `python` is this one
    )
    becomes = [] if python is None else ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", str(python)]
    command = start(
        *becomes, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", *arguments,
        cwd=place.folder, env=place.env | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PATH": path} | env,
    )  # fmt: skip
    head = RayHead(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}")

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{head.address}/", timeout=10) as answer:  # its page needs no token
                return answer.status == 200
        except OSError:
            return False

    place.wait_for(answers, limit=HEAD_LIMIT_S, command=command)
    yield head
    command.signal_group(signal.SIGKILL)  # and `place` ends the rest


@dataclass(frozen=True)
class RayHead:
    """The addresses of a head: of its dashboard, which serves jobs, and of its GCS."""

    address: str
    gcs: str


@pytest.fixture
def fit(shared_driver: Any, place: Place) -> Callable[..., Run]:
    """`fit(job, resume=None, timeout=120)` trains in `place` and returns the run, also if it failed.

    All tests of the session share the driver process and its local cluster: seven seconds a run instead of eighteen.
    """

    def run(job: dict[str, Any] | None, *, resume: Path | str | None = None, timeout: float = 120) -> Run:
        request = {
            "job": None if job is None else str(place.write(job)),
            "overrides": [],
            "cwd": str(place.folder),
            "resume": None if resume is None else str(resume),
        }
        answer = shared_driver.ask(request, timeout=timeout)
        assert "run" in answer or answer["error"].startswith("RunError"), answer
        return Run(Path(answer["run"])) if "run" in answer else place.run

    return run
