"""The folder, the token and the environment of a private Ray cluster."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import ray_runtime as module
from cluster.environment import restored_environment
from cluster.ray_runtime import (
    OWNER_FILE,
    PRELOAD,
    PRELOAD_MODULE,
    STARTS,
    TOKEN_FILE,
    _socket_folder,
    _write_token,
    end_daemons,
    last_words,
    private_ray,
    remove_left_folders,
)
from raytrain.execution import preload

ROOT = Path(__file__).resolve().parents[3]


def test_folder_and_token_are_readable_by_this_user_only_and_removed() -> None:
    before = os.umask(0)  # independent of the user's mask
    try:
        with private_ray() as private:
            folder = Path(private.folder)
            token = folder / TOKEN_FILE
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(token.stat().st_mode) == 0o600
            assert len(token.read_text()) == 64 and int(token.read_text(), 16) > 0
            with pytest.raises(FileExistsError):
                _write_token(str(folder))  # never over an existing file
            assert Path(str(private.options["_temp_dir"])).parent == folder
            assert private.options["_node_ip_address"] == "127.0.0.1" and private.options["include_dashboard"] is False
    finally:
        os.umask(before)
    assert not folder.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_and_that_of_a_live_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "SHORT_BASE", str(tmp_path))
    code = """
import os, sys
from cluster import ray_runtime as module
from cluster.ray_runtime import private_ray
module.SHORT_BASE = os.environ["TMPDIR"]
with private_ray() as private:
    os.makedirs(private.options["_temp_dir"] + "/session")
    print(private.folder, flush=True)
    sys.stdin.read()
"""

    def owner() -> subprocess.Popen[str]:
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )

    unknown = tmp_path / "rt-other"  # of a program that has no owner file
    unknown.mkdir()
    with owner() as killed, owner() as alive:
        assert killed.stdout is not None and alive.stdout is not None
        left, used = (Path(stream.readline().strip()) for stream in (killed.stdout, alive.stdout))
        assert remove_left_folders() == [] and left.is_dir() and used.is_dir(), "both live"
        killed.kill()
        killed.wait(60)
        assert left.is_dir(), "nobody could remove it"
        (tmp_path / "rt-link").symlink_to(left)
        with private_ray() as private:
            assert not left.exists()
            assert (used / "r" / "session").is_dir() and unknown.is_dir() and Path(private.folder).is_dir()
            assert remove_left_folders() == [], "nor its own"
        alive.communicate("", timeout=60)
        assert not used.exists()


def test_sockets_below_a_long_temporary_directory_are_elsewhere_and_large_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of a socket has at most 107 bytes. What was left in either place is removed."""
    long, short = tmp_path / ("x" * 60), Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(module, "SHORT_BASE", str(short))
    try:
        with private_ray() as private:
            assert Path(private.folder).parent == short and stat.S_IMODE(os.stat(private.folder).st_mode) == 0o700
            session = "session_2026-11-25_13-16-57_123456_1234567/sockets/plasma_store.1"
            assert len(os.path.join(str(private.options["_temp_dir"]) + "2", session)) <= 107
            assert Path(str(private.options["object_spilling_directory"])).parent == long
        assert not list(long.iterdir()) and not list(short.iterdir())
        for base in (long, short):
            (base / "rt-left").mkdir()
            (base / "rt-left" / OWNER_FILE).touch()
        assert remove_left_folders() == [str(long / "rt-left"), str(short / "rt-left")]
        short.chmod(0o777)  # others could rename it
        assert _socket_folder() == str(long)
        short.chmod(0o1777)
        assert _socket_folder() == str(short)
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        assert _socket_folder() == str(short)
        with private_ray() as private:
            assert "object_spilling_directory" not in private.options
    finally:
        shutil.rmtree(short)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert _socket_folder() == str(long), "there is no short one"


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "SHORT_BASE", str(tmp_path))
    folder = tmp_path / "rt-theirs"
    folder.mkdir()
    (folder / OWNER_FILE).touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_left_folders() == []
    assert remove_left_folders() == [str(folder)]


def test_what_the_user_has_set_does_not_open_the_cluster_to_others() -> None:
    environ = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "another cluster's",
        "RAY_AUTH_TOKEN_PATH": "/nowhere",
        "HOME": "/home/me",
    }
    with private_ray() as private:
        private.set_environment(environ)
        assert environ == {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{private.folder}/{TOKEN_FILE}",
            "RAY_worker_maximum_startup_concurrency": str(STARTS),
            "HOME": "/home/me",
        }


def test_processes_of_a_cluster_that_trains_import_in_advance() -> None:
    environ: dict[str, str] = {}
    with private_ray(workers=2) as private:
        private.set_environment(environ)
        assert environ["RAY_preload_python_modules"] == preload.__name__ == PRELOAD_MODULE
        assert environ[PRELOAD].startswith("2:" + private.folder)
    with private_ray() as private:  # another cluster of this process, whose processes need no torch
        private.set_environment(environ)
        assert PRELOAD not in environ and "RAY_preload_python_modules" not in environ
    environ = {"HOME": "/home/me"}
    with private_ray(workers=1) as private, restored_environment(environ):
        private.set_environment(environ)
        assert PRELOAD in environ
    assert environ == {"HOME": "/home/me"}, "nothing of it stays in a program that trains"


def test_daemons_of_this_cluster_and_what_they_started_are_ended_and_no_others() -> None:
    """An agent is no child of this process: its daemon has started it, and may have ended before it."""
    code = "import sys; sys.stdin.read()"
    started = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); os.write(1, b'.')"

    def child(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with ExitStack() as open_pipes, child(code, f"{tempfile.gettempdir()}/rt-other/r/session") as others:
        with private_ray() as private:
            ours = open_pipes.enter_context(child(code, f"{private.folder}/r"))
            daemon = open_pipes.enter_context(child(started, code, f"{private.folder}/r/session"))
            assert daemon.wait(60) == 0 and ours.poll() is None, "and the agent lives: it holds the daemon's output"
            assert len(end_daemons(f"{private.folder}/r/session")) == 1
            agent = open_pipes.enter_context(child(started, code, f"{private.folder}/r/session"))
            assert agent.wait(60) == 0
        for process in (daemon, agent):
            assert process.stdout is not None and process.stdout.read() == b".", "nobody holds the output any longer"
        assert ours.wait(60) == -9 and others.poll() is None
        others.kill()


def test_the_exception_of_an_agent_is_quoted_and_else_the_end_of_the_daemon_itself(tmp_path: Path) -> None:
    assert last_words(str(tmp_path), process="raylet") == "--verbose shows Ray's own messages"
    logs = tmp_path / "session_2026-01-01_00-00-00_1_1/logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("")
    (logs / "raylet.out").write_text("[a I 1 1] (raylet) main.cc:1: began\n[a I 1 1] (raylet) dl.cc:2: mmap\n\n")
    (logs / "gcs_server.err").write_text("another's\n")
    assert last_words(str(tmp_path), process="raylet") == "raylet.out ends with: dl.cc:2: mmap"
    (logs / "raylet.err").write_text(
        "[a E 1 2] (raylet) dl.cc:3: mmap failed: Cannot allocate memory\n"
        "[a C 1 2] (raylet) pl.cc:4:  An unexpected system state has occurred. Report it. Check failed: has_value()\n"
        "*** StackTrace Information ***\nraylet(+0xff770a) ray::operator<<()\n"
    )
    own = "raylet.err ends with: dl.cc:3: mmap failed: Cannot allocate memory / pl.cc:4:  Check failed: has_value()"
    assert last_words(str(tmp_path), process="raylet") == own
    (logs / "runtime_env_agent.log").write_text("INFO started\n")
    (logs / "worker-1.err").write_text("Traceback (most recent call last)\nanother's\n")
    assert last_words(str(tmp_path), process="raylet") == own
    (logs / "dashboard_agent.log").write_text(
        "INFO\nTraceback (most recent call last):\n  a\n  b\n  c\nOSError: port\n\n"
    )
    assert last_words(str(tmp_path), process="raylet") == "dashboard_agent.log ends with: b / c / OSError: port"
