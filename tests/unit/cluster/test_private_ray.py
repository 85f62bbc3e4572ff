"""The folder, the token and the environment of a private Ray cluster."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.private_ray import PRELOAD, PRELOAD_MODULE, STARTS, TOKEN_FILE, _write_token, end_daemons, private_ray
from raytrain.execution import preload


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


def test_only_daemons_of_this_cluster_and_this_process_are_ended(tmp_path: Path) -> None:
    def child(argument: str) -> subprocess.Popen[bytes]:
        code = "import sys; sys.stdin.read()"
        return subprocess.Popen([sys.executable, "-c", code, argument], stdin=subprocess.PIPE)

    with child(f"{tmp_path}/r/session") as ours, child("/tmp/rt-other/r/session") as others:
        assert end_daemons(str(tmp_path)) == [ours.pid]
        assert ours.wait(60) == -9 and others.poll() is None
