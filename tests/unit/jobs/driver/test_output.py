"""Standard output that can no longer be written: real pipes whose reader has left, and a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FULL = Path("/dev/full")
SAYS = "standard output can no longer be written ({}): the command goes on without it"
#: A verb whose work is replaced by one that prints much, leaves a file and ends well.
GOES_ON = """
import sys, types
from pathlib import Path
module, function = sys.argv[1:3]
exec(f"import {module} as replaced")

def work(*_, **__):
    for number in range(3):
        print("x" * 100_000, flush=True)
    Path("done").write_text("all of it")
    return 0 if function == "bench_verb" else types.SimpleNamespace(status="done")

setattr(replaced, function, work)
from jobs.__main__ import main
sys.argv = ["raytrain", *sys.argv[3:]]
main()
"""
VERBS = {
    "train": ("jobs.train", "run_train", "train"),
    "tune": ("jobs.tune", "run_tune", "tune"),
    "infer": ("jobs.infer", "run_infer", "infer"),
    "bench": ("jobs.bench.harness.options", "bench_verb", "bench", "loop"),
}


@pytest.fixture
def closed() -> Iterator[int]:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def ended(*arguments: str, out: int, folder: Path | None = None) -> tuple[int, str]:
    """(exit code, standard error) of a command."""
    done = subprocess.run(
        [sys.executable, *arguments], stdout=out, stderr=subprocess.PIPE, text=True, cwd=folder, timeout=120
    )
    return done.returncode, done.stderr


@pytest.fixture
def full() -> Iterator[int]:
    if not FULL.exists():
        pytest.skip("no /dev/full")
    with FULL.open("w") as file:
        yield file.fileno()


@pytest.mark.parametrize("verb", [("recipes", "gpt_text"), ("plan",), ("plan", "--print", "yaml"), ("keys", "--help")])
def test_a_command_that_prints_ends_as_git_log_does_when_its_reader_leaves(verb: tuple[str, ...], closed: int) -> None:
    assert ended("-m", "jobs", *verb, out=closed) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("verb", [("recipes", "gpt_text"), ("plan",), ("plan", "--json")])
def test_a_full_disk_is_one_line(verb: tuple[str, ...], full: int) -> None:
    said = "error: standard output cannot be written: No space left on device\n"
    assert ended("-m", "jobs", *verb, out=full) == (1, said)


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_goes_on_when_its_reader_leaves(verb: str, closed: int, tmp_path: Path) -> None:
    code, said = ended("-c", GOES_ON, *VERBS[verb], out=closed, folder=tmp_path)
    assert (code, said.strip()) == (0, SAYS.format("its reader has closed the pipe"))
    assert (tmp_path / "done").read_text() == "all of it"


def test_a_run_goes_on_when_the_disk_of_its_log_is_full(full: int, tmp_path: Path) -> None:
    code, said = ended("-c", GOES_ON, *VERBS["train"], out=full, folder=tmp_path)
    assert (code, said.strip()) == (0, SAYS.format("No space left on device"))
    assert (tmp_path / "done").exists()


def test_the_exit_code_tells_what_standard_error_cannot(full: int) -> None:
    done = subprocess.run([sys.executable, "-m", "jobs", "plan", "nope.yaml"], stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_process_started_later_can_write_to_what_it_inherits(closed: int) -> None:
    code = """
import subprocess, sys
from jobs.driver.broken_output import guard_output, outlive_output
guard_output()
outlive_output()
print("lost", flush=True)
sys.exit(subprocess.run(["echo", "inherited"]).returncode)
"""
    assert ended("-c", code, out=closed)[0] == 0


#: A verb that ends with a thread inside C code which outlives the interpreter's own end, and a handler of `atexit`.
ENDS = """
import atexit, sys, threading
import jobs.__main__ as command

def keys(name):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("carried out", end="")  # the buffer still holds it
    if name == "none":
        return
    sys.exit({"two": 2, "words": "said"}[name])

atexit.register(lambda: print("; atexit ran", end=""))
command.main.commands["keys"].callback = keys
sys.argv = ["raytrain", "keys", *sys.argv[1:]]
command.main()
print("; not reached", end="")
"""


@pytest.mark.parametrize(("section", "code", "err"), [("none", 0, ""), ("two", 2, ""), ("words", 1, "said\n")])
def test_a_command_ends_with_its_code_its_output_and_its_exit_handlers_and_without_destructors(
    section: str, code: int, err: str
) -> None:
    """Destructors of C++ libraries abort a process in which a daemon thread is inside one: exit code -6."""
    done = subprocess.run([sys.executable, "-c", ENDS, section], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "carried out; atexit ran") and done.stderr.endswith(err)
