"""Fixtures of many tests: the command line in its own process group, and data generated from a seed.

Nothing here needs a network or a file that is not in the repository.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before numpy and torch load OpenMP. pytest runs a process for each core, whose threads would wait for one another:
# with one thread the unit tests take three quarters of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Jobs under test compute with as many threads as there are cores. OpenMP's threads wait for one another by spinning,
# and a thread whose partner has no core, because another test has it, can spin for milliseconds at the end of each
# operation: steps of a small model then took up to 30 times as long, and a short job 40 seconds of CPU instead of 26.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SENTENCES = (
    "the rain falls on the roof of the old mill. ",
    "a miller counts the sacks and sings to the wheel. ",
    "when the river is low the wheel stands still. ",
    "then he reads by the fire until the rain returns. ",
)


# Commands under test inherit ignored signals, such as SIGHUP after `nohup pytest`, and would ignore them too.
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


# ---------------------------------------------------------------- which tests, and their order

ALWAYS = ("unit", "gpu", "test_features.py", "test_packaging.py", "test_reference.py", "test_structure.py")
"""Folders and files in tests/ that every `pytest` runs, but for tests with the mark `long`; of the others it runs those
with the mark `daily`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `pytest` leaves out to be short runs with `--all` and `--rest`, and where the command names it."""
    group = parser.getgroup("which tests")
    group.addoption("--all", action="store_true", help="run all tests, the long ones too")
    group.addoption("--rest", action="store_true", help="run only the tests that `pytest` leaves out")
    group.addoption("--begin-before", type=float, metavar="TIME", help="skip the tests that have not begun by then")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--begin-before`, skips what a slow machine has no time for, before its fixtures do any work.

    The time is in seconds since 1970: the process that takes the place of a crashed one must not count anew.
    """
    end = item.config.option.begin_before
    if end is not None and time.time() > end:
        pytest.skip("did not begin in time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, unless they are asked for; and order the files: first those of less than a minute,
    which hold most tests, then the longest, so that no process ends with a long one.

    xdist distributes files in the order of their tests. `durations.csv` lists the approximate seconds of the long
    ones.
    """
    tests = Path(__file__).parent
    with (tests / "durations.csv").open() as file:
        seconds = {tests / row["file"]: float(row["seconds"]) for row in csv.DictReader(file)}
    items.sort(key=lambda item: (seconds.get(item.path, 0.0) >= 60, -seconds.get(item.path, 0.0)))
    longest = float(config.getini("faulthandler_timeout"))  # ends the whole process, so a test's own limit comes before
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args[0] >= longest:
            raise pytest.UsageError(f"{item.nodeid}: timeout {limit.args[0]}, expected below {longest:g}")
    given = [str(argument).partition("::")[0] for argument in config.invocation_params.args]
    named = any(Path(config.invocation_params.dir, one).exists() for one in given)
    if config.option.all or (named and not config.option.rest):
        return
    daily = [_is_daily(item, tests) for item in items]
    left_out = [item for item, is_daily in zip(items, daily, strict=True) if is_daily is config.option.rest]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, is_daily in zip(items, daily, strict=True) if is_daily is not config.option.rest]


def _is_daily(item: pytest.Item, tests: Path) -> bool:
    mark = "long" if (always := item.path.relative_to(tests).parts[0] in ALWAYS) else "daily"
    return always is (item.get_closest_marker(mark) is None)


# ---------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Finished:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """The exit code and all output, for the message of a failing assert."""
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass(frozen=True)
class Started:
    """A running command, the leader of its own process group."""

    process: subprocess.Popen[str]

    def signal_group(self, number: int) -> None:
        """Signals every process of the group, or none if it has exited."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def finish(self, *, timeout: float) -> Finished:
        """Waits for the end; at the timeout the group is killed and the test fails with its output."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.signal_group(signal.SIGKILL)
            out, err = self.process.communicate()
            pytest.fail(f"still running after {timeout} s\n{Finished(-9, out, err).text}")
        return Finished(self.process.returncode, out, err)


def fixed_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of every command: one thread per process, no colours.

    Ray checks its workers more often, because the runs are short.
    """
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    fixed["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    return {**os.environ, **fixed, "PYTHONUNBUFFERED": "1", **(extra or {})}


@pytest.fixture
def start_python() -> Iterator[Callable[..., Started]]:
    """`start_python(*args, cwd=, env=)` starts `python ...`; the rest is killed at the end."""
    with python_processes() as start:
        yield start


@pytest.fixture(scope="module")
def start_module_python() -> Iterator[Callable[..., Started]]:
    """`start_python` for a process that several tests share."""
    with python_processes() as start:
        yield start


@contextlib.contextmanager
def python_processes() -> Iterator[Callable[..., Started]]:
    """The `start` that `start_python` yields."""
    started: list[Started] = []

    def start(*args: str, cwd: Path, env: dict[str, str] | None = None) -> Started:
        process = subprocess.Popen(
            [sys.executable, *args],
            cwd=cwd,
            env=fixed_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Started(process))
        return started[-1]

    yield start
    for command in started:
        command.signal_group(signal.SIGKILL)
        command.process.communicate()


@pytest.fixture
def start_cli(start_python: Callable[..., Started]) -> Callable[..., Started]:
    """`start_cli(*args, cwd=, env=)` starts `python -m jobs ...`."""
    return partial(start_python, "-m", "jobs")


@pytest.fixture
def run_cli(start_cli: Callable[..., Started]) -> Callable[..., Finished]:
    """`run_cli(*args, cwd=, timeout=120, env=)` runs `python -m jobs ...` to its end."""

    def run(*args: str, cwd: Path, timeout: float = 120, env: dict[str, str] | None = None) -> Finished:
        return start_cli(*args, cwd=cwd, env=env).finish(timeout=timeout)

    return run


class SharedDriver:
    """tests/driver.py, started with the first job. It is killed if it hangs; the next job then starts another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def train(self, job: Path, *overrides: str, cwd: Path, timeout: float = 120) -> Path:
        """Trains a job file to its end with `cwd` as the working directory; returns the run folder."""
        answer = self.ask({"job": str(job), "overrides": overrides, "cwd": str(cwd)}, timeout=timeout)
        assert answer.get("status") == "done", answer
        return Path(answer["run"])

    def run_script(self, path: Path, *, timeout: float = 120) -> str:
        """Runs a Python file in its own folder, with Ray already started; returns what it printed."""
        return self.ask({"script": str(path), "cwd": str(path.parent)}, timeout=timeout)["out"]

    def ask(self, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """One request of tests/driver.py and its answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps({**request, "timeout": timeout}) + "\n")
        process.stdin.flush()
        deadline = time.monotonic() + timeout
        while True:
            try:
                line, why = self._lines.get(timeout=max(0.0, deadline - time.monotonic())), "the driver ended"
            except queue.Empty:
                line, why = "", f"no answer within {timeout} s"
            if not line:
                self.stop()
                pytest.fail(f"{why}\n{(self._folder / 'stderr').read_text()}")
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))

    def _start(self) -> subprocess.Popen[str]:
        self._lines = queue.Queue()
        with (self._folder / "stderr").open("a") as errors:
            self._process = process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "driver.py")],
                env=fixed_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(process, self._lines), daemon=True).start()
        return process

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("")  # end of output

    def stop(self) -> None:
        """Ends the process and all of its group."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        Started(process).signal_group(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def shared_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedDriver]:
    """The driver of `train_shared`, for the whole session."""
    driver = SharedDriver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.stop()


@pytest.fixture
def train_shared(shared_driver: SharedDriver, tmp_path: Path) -> Callable[..., Path]:
    """`train_shared(job, *overrides, timeout=120)` trains in `tmp_path` and returns the run folder.

    All its runs share one Ray and one driver process, which saves ten seconds each. A test's
    own code needs a unique module name.
    """
    return partial(shared_driver.train, cwd=tmp_path)


# ---------------------------------------------------------------- data


def make_text(path: Path, *, characters: int = 4_000, seed: int = 0) -> Path:
    """Sentences in random order, which a small language model learns within a few steps."""
    order = np.random.default_rng(seed).integers(len(SENTENCES), size=characters // 30)
    path.write_text("".join(SENTENCES[i] for i in order)[:characters])
    return path


GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The ten digits as 7 rows of 5 points; each point becomes 3 x 3 pixels."""


def draw_digits(*, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits in MNIST's shape: images (count, 28, 28) uint8 and labels (count,) uint8.

    Each image is a glyph of 21 x 15 pixels at a random place, with random brightness and noise, so that no single
    pixel gives away the class.
    """
    draw = np.random.default_rng(seed)
    shapes = [np.array([[int(point) for point in row] for row in glyph.split()]) for glyph in GLYPHS]
    inks = np.stack([np.kron(shape, np.ones((3, 3), dtype=np.int64)) for shape in shapes])
    labels = draw.integers(10, size=count).astype(np.uint8)
    images = draw.integers(0, 60, size=(count, 28, 28))
    tops, lefts = draw.integers(1, 6, size=count), draw.integers(4, 9, size=count)
    brightness = draw.integers(120, 196, size=count)
    for i in range(count):
        images[i, tops[i] : tops[i] + 21, lefts[i] : lefts[i] + 15] += inks[labels[i]] * brightness[i]
    return images.astype(np.uint8), labels


def write_idx(path: Path, values: np.ndarray) -> Path:
    """Writes unsigned bytes in MNIST's file format, compressed if the name ends in .gz."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@dataclass(frozen=True)
class IdxFiles:
    """Two IDX files that belong together."""

    images: Path
    labels: Path


def make_digits(folder: Path, *, count: int = 400, seed: int = 0, gz: bool = False) -> IdxFiles:
    """Random digits as `images-idx3-ubyte[.gz]` and `labels-idx1-ubyte[.gz]`."""
    images, labels = draw_digits(count=count, seed=seed)
    end = ".gz" if gz else ""
    return IdxFiles(
        images=write_idx(folder / f"images-idx3-ubyte{end}", images),
        labels=write_idx(folder / f"labels-idx1-ubyte{end}", labels),
    )


def table_rows(*, count: int, seed: int) -> list[dict[str, float | int]]:
    """Four columns x0..x3 and a class `y` of three: the largest of three fixed linear combinations."""
    draw = np.random.default_rng(seed)
    columns = draw.standard_normal((count, 4))
    classes = (columns @ np.random.default_rng(7).standard_normal((4, 3))).argmax(axis=1)
    return [
        {**{f"x{j}": float(value) for j, value in enumerate(row)}, "y": int(cls)}
        for row, cls in zip(columns, classes, strict=True)
    ]


def write_table(path: Path, rows: Sequence[dict[str, float | int]]) -> Path:
    """Writes rows as Parquet, CSV or JSONL, by the ending of the name."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        raise ValueError(f"no table format ends in {path.suffix!r}")
    return path


@pytest.fixture
def tiny_text(tmp_path: Path) -> Path:
    """A text file of 4,000 characters."""
    return make_text(tmp_path / "tiny.txt")


@pytest.fixture
def digits() -> Callable[..., IdxFiles]:
    """`digits(folder, count=400, seed=0, gz=False)` writes IDX files of drawn digits."""
    return make_digits


@pytest.fixture
def table() -> Callable[..., Path]:
    """`table(path, count=200, seed=0)` writes a classification table; the ending names the format."""

    def write(path: Path, *, count: int = 200, seed: int = 0) -> Path:
        return write_table(path, table_rows(count=count, seed=seed))

    return write


# ---------------------------------------------------------------- documents of benches


def bench_ratio(name: str, *, met: bool, goal: dict[str, Any] | None) -> dict[str, Any]:
    """A ratio of a bench's document."""
    figure = {"median": 1.5, "low": 1.25, "high": 2.0, "values": [1.0] * 7, "verdict": "b is faster"}
    return {"name": name, "goal": goal, "met": met, **figure}


def make_bench_document(*, quick: bool = False, passed: bool = True) -> dict[str, Any]:
    """A document of a bench with three ratios and a claim, as far as the summary reads it."""
    least, most = {"at_least": 1.2, "at_most": None}, {"at_least": None, "at_most": 1.0}
    ratios = [bench_ratio("a / b", met=True, goal=least), bench_ratio("c / d", met=False, goal=most),
              bench_ratio("no goal", met=False, goal=None)]  # fmt: skip
    claims = [{"effect": "it is\nfaster | better", "verdict": "not reproduced", "evidence": "1.01"}]
    return {
        "quick": quick, "gate": {"passed": passed, "checks": [{"name": "equal", "passed": passed}]},
        "ratios": ratios if passed else [], "claims": claims if passed else [],
        "environment": {"date": "2026-11-22T08:00:00+00:00", "cpu_model": "A CPU"},
    }  # fmt: skip


@pytest.fixture
def bench_document() -> Callable[..., dict[str, Any]]:
    """`bench_document(quick=False, passed=True)` makes the document of a bench."""
    return make_bench_document
