"""Why a worker's process ended, from the texts of Ray and of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.execution.controller import words_of_death
from raytrain.execution.ray_private import worker_stderr

DIED = """A worker health check failed.
\tclass_name: RayTrainWorker
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {detail}"""
EOF = "Worker unexpectedly exits with a connection error code 2. Common causes: (1) it was killed by the OOM killer"
WHO = "the process of rank 0 (pid 4711)"


@pytest.mark.parametrize(
    ("kind", "detail", "stderr", "memory", "words"),
    [
        ("SYSTEM_ERROR", EOF, "", False, f"{WHO} ended unexpectedly"),
        ("SYSTEM_ERROR", EOF, "", True, f"{WHO} ended unexpectedly, and the kernel killed a process out of memory"),
        ("NODE_OUT_OF_MEMORY", "running low on memory", "", False, f"{WHO} was ended by Ray's memory monitor"),
        ("USER_ERROR", "Worker exits with an exit code 3.", "", False, f"{WHO} ended with exit code 3"),
        ("SYSTEM_ERROR", EOF, "a\n*** SIGSEGV received at time=17 ***\n", False, f"{WHO} ended with SIGSEGV"),
        ("SYSTEM_ERROR", EOF, "Fatal Python error: Aborted\n", False, f"{WHO} ended with Aborted"),
    ],
)
def test_the_cause_of_a_death(kind: str, detail: str, stderr: str, memory: bool, words: str) -> None:
    error = DIED.format(kind=kind, detail=detail)
    found = words_of_death(0, error, stderr=lambda pid: stderr if pid == 4711 else "SIGBUS", memory=memory)
    assert found == words if not words.endswith(("memory", "monitor")) else found.startswith(words)


def test_without_a_process_id_nothing_is_looked_up() -> None:
    assert words_of_death(2, "lost", stderr=lambda pid: pytest.fail(), memory=False) == (
        "the process of rank 2 ended unexpectedly"
    )


def test_the_stderr_of_a_worker_is_found_by_its_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker-0a-01000000-4711.err").write_text("Fatal Python error: Aborted")
    monkeypatch.setattr("os.readlink", lambda path: str(tmp_path / "worker-0b-01000000-1.err"))
    assert worker_stderr(4711) == "Fatal Python error: Aborted" and worker_stderr(711) == ""
