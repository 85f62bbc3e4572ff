"""`raytrain submit` to a real cluster with token authentication, whose own installation of the product is broken."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import site
import socket
import threading
import venv
import zipfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

JOB_S, ASK_S = 300, 120
LONG = {"max_steps": 2_000_000, "log_every": 100}


OTHER_VERSION = f"{metadata.version('safetensors')}.post99"
"""Of a package that jobs install; its wheel is served to the head of this module."""


def write_metadata(folder: Path, name: str, version: str) -> Path:
    """The metadata of an installed package, as `importlib.metadata` reads it."""
    found = folder / f"{name}-{version}.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return found


def write_wheel(folder: Path, package: str, version: str) -> None:
    """A wheel of an installed package with another version."""
    tag = "py3-none-any"
    info = write_metadata(folder / "unpacked", package, version)
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, info.parent / package, ignore=shutil.ignore_patterns("__pycache__"))
    files = [path.relative_to(info.parent).as_posix() for path in info.parent.rglob("*") if path.is_file()]
    record = f"{info.name}/RECORD"
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*files, record]))
    with zipfile.ZipFile(folder / f"{package}-{version}-{tag}.whl", "w") as wheel:
        for name in [*files, record]:
            wheel.write(info.parent / name, name)


def light_python(folder: Path) -> Path:
    """The Python of a virtual environment that sees the packages of the tests: Ray copies the environment of a head for
    each job with packages of its own."""
    venv.create(folder, with_pip=False, symlinks=True)
    found = next(folder.glob("lib/python*/site-packages"))
    (found / "shared.pth").write_text("".join(f"{path}\n" for path in {*site.getsitepackages()}))
    return folder / "bin" / "python"


class Cluster:
    """The head of this module, and the commands that talk to it."""

    def __init__(self, place: Any, start: Callable[..., Any], address: str, token: str) -> None:
        self.place, self.address, self.token = place, address, token
        (place.folder / "client_token").write_text(token)
        self.env = place.env | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(place.folder / "client_token"),
            "RAY_API_SERVER_ADDRESS": address,
        }
        self.start = partial(start, "-m", "jobs", "submit", cwd=place.folder, env=self.env)
        self._start = start

    def ask(self, *arguments: str, env: dict[str, str] | None = None) -> Any:
        """`submit ARGUMENTS` to its end."""
        command = self._start(
            "-m", "jobs", "submit", *arguments, cwd=self.place.folder, env=self.env | (env or {})
        )  # fmt: skip
        return command.finish(timeout=ASK_S)

    def start_ray(self, *arguments: str) -> Any:
        """Ray's own command to its end."""
        env = self.env | {"RAY_ADDRESS": self.address}
        command = self._start("-m", "ray.scripts.scripts", *arguments, cwd=self.place.folder, env=env)
        return command.finish(timeout=ASK_S)

    def state(self, job_id: str) -> dict[str, Any]:
        return json.loads(self.ask("status", job_id, "--json").out)

    def run_of(self, name: str) -> Any:
        """The run of the job file `name`, once its folder is there."""
        found = sorted((self.place.folder / "runs").glob(f"{name}-2*"))
        return self.place.run_at(found[-1]) if found else None

    def trains(self, name: str, *, command: Any) -> Any:
        """Wait until the run has logged steps."""

        def logged() -> Any:
            run = self.run_of(name)
            return run if run is not None and len(run.losses()) > 1 else None

        return self.place.wait_for(logged, limit=JOB_S, command=command)


@pytest.fixture(scope="module")
def cluster(start_head: Callable[..., Any], start_module_python: Callable[..., Any], module_place: Any) -> Cluster:
    token = secrets.token_hex(32)
    private = module_place.temp / "token"
    private.write_text(token)
    broken = module_place.temp / "broken"
    for name in ("cluster", "raytrain", "experts", "jobs"):
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text("raise ImportError('the installation of the cluster')\n")
    wheels = module_place.temp / "wheels"
    write_wheel(wheels, "safetensors", OTHER_VERSION)
    env = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(private), "PYTHONPATH": str(broken),
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip
    return Cluster(
        module_place, start_module_python, start_head(env, python=light_python(module_place.temp / "v")).address, token
    )


@pytest.fixture
def write_job(cluster: Cluster, guest_job: Callable[..., Any]) -> Callable[..., Path]:
    """`write_job(name, section={...})`: a job of this name, whose runs are in the folder `runs`."""

    def write(name: str, **sections: Any) -> Path:
        save = {"dir": str(cluster.place.folder / "runs"), **sections.pop("save", {})}
        return cluster.place.write(guest_job(name=name, save=save, **sections), f"{name}.yaml")

    return write


class Tunnel:
    """Forwards connections to the dashboard, and cuts the first answer with a log that goes beyond the first lines."""

    def __init__(self, address: str) -> None:
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._to) as server:
            log = threading.Event()
            back = threading.Thread(target=self._forward, args=(server, client, False, log), daemon=True)
            back.start()
            self._forward(client, server, True, log)
            back.join()

    def _forward(self, here: socket.socket, there: socket.socket, sends: bool, log: threading.Event) -> None:
        try:
            while block := here.recv(1 << 16):
                if sends and b"/logs HTTP" in block:
                    log.set()
                if not sends and log.is_set() and b"micro-batches of" in block and not self.cut.is_set():
                    self.cut.set()
                    there.sendall(block[: len(block) // 2])
                    break
                there.sendall(block)
        except OSError:
            pass  # the other direction was cut
        for each in (here, there):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(400)
@pytest.mark.covers("NODE-06")
def test_a_job_brings_its_code_is_followed_through_a_cut_and_is_fetched(
    cluster: Cluster, write_job: Callable[..., Path]
) -> None:
    write_job("whole")
    with contextlib.closing(Tunnel(cluster.address)) as tunnel:
        env = cluster.env | {"RAY_API_SERVER_ADDRESS": tunnel.address}
        followed = cluster.start("train", "whole.yaml", "--id", "whole", env=env).finish(timeout=JOB_S)
    assert followed.code == 0, followed.text
    assert tunnel.cut.is_set()
    lines = followed.out.splitlines()
    for unique in ("machine ", "batch ", "done after 6 steps", "report  "):  # before, at and after the cut
        assert len([line for line in lines if line.startswith(unique)]) == 1, (unique, followed.text)
    assert followed.out.strip() == cluster.ask("logs", "whole").out.strip()
    assert "100 MiB" in followed.err and "raytrain is carried along" in followed.err, followed.err
    state = cluster.state("whole")
    assert (state["status"], state["exit_code"], state["verb"]) == ("SUCCEEDED", 0, "train"), state

    run = cluster.run_of("whole")
    assert run.result["status"] == "done" and [step for step, _ in run.losses()] == [1, 2, 3, 4, 5, 6]
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if cluster.token.encode() in path.read_bytes()]

    copied = cluster.ask("fetch", "whole", "--to", "copies")
    assert copied.code == 0, copied.text
    assert copied.out.strip() == f"copies/{run.path.name}", "as it is typed from here"
    copy = cluster.place.folder / "copies" / run.path.name
    names = {path.relative_to(run.path): path.read_bytes() for path in files}
    assert names == {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert not list((cluster.place.temp / "r" / "session_latest" / "logs").glob("raytrain-fetch-*"))
    again = cluster.ask("fetch", "whole", "--to", "copies")
    assert again.code == 2 and "which exists" in again.err, again.text

    ended = cluster.ask("stop", "whole")
    assert ended.code == 2 and "which has ended: SUCCEEDED" in ended.err, ended.text
    taken = cluster.ask("train", "whole.yaml", "--id", "whole")
    assert taken.code == 2 and "error: --id: got whole" in taken.err, taken.text


@pytest.mark.daily
@pytest.mark.timeout(400)
def test_a_detached_job_is_stopped_and_has_saved(cluster: Cluster, write_job: Callable[..., Path]) -> None:
    write_job("stopped", loop=LONG, save={"every": 1_000_000})
    first = cluster.start("train", "stopped.yaml", "--id", "stopped")
    run = cluster.trains("stopped", command=first)
    first.signal_group(signal.SIGINT)
    detached = first.finish(timeout=ASK_S)
    assert detached.code == 130 and "raytrain submit logs stopped --follow" in detached.err, detached.text
    assert cluster.state("stopped")["status"] == "RUNNING"

    second = cluster.start("logs", "stopped", "--follow")
    stop = cluster.ask("stop", "stopped")
    assert stop.code == 0 and "stopped: STOPPED, exit code 130" in stop.err, stop.text
    assert "asking Ray" not in stop.err
    followed = second.finish(timeout=ASK_S)
    assert followed.code == 130 and "Ray cluster at" in followed.out, followed.text
    assert f"resume with: raytrain submit train --resume {run.path}" in followed.out, followed.text
    steps = run.losses()[-1][0]
    assert run.result["status"] == "interrupted" and run.checkpoints()[-1] >= steps > 0
    assert cluster.state("stopped")["exit_code"] == 130


@pytest.mark.timeout(400)
def test_a_killed_driver_gives_137(cluster: Cluster, write_job: Callable[..., Path]) -> None:
    write_job("killed", loop=LONG)
    command = cluster.start("train", "killed.yaml", "--id", "killed")
    run = cluster.trains("killed", command=command)
    os.kill(run.events("driver_start")[-1]["pid"], signal.SIGKILL)
    finished = command.finish(timeout=ASK_S)
    assert finished.code == 137 and "killed: FAILED, exit code 137" in finished.err, finished.text
    assert cluster.state("killed")["exit_code"] == 137


PLAIN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('it runs', flush=True); time.sleep(3600)"
)


@pytest.mark.timeout(400)
def test_a_job_of_another_program_is_stopped_by_ray_without_waiting_for_a_save(cluster: Cluster) -> None:
    """One that ignores SIGTERM: Ray kills it after its own limit."""
    submitted = cluster.start_ray("job", "submit", "--submission-id=plain", "--no-wait", "--", "python", "-c", PLAIN)
    assert submitted.code == 0, submitted.text
    followed = cluster.start("logs", "plain", "--follow")
    cluster.place.wait_for(lambda: "\nit runs" in cluster.ask("logs", "plain").out, limit=JOB_S, command=followed)
    stop = cluster.ask("stop", "plain")
    assert stop.code == 0 and "plain: STOPPED, exit code 130" in stop.err, stop.text
    assert "plain is no command of raytrain" in stop.err and "to save and stop" not in stop.err, stop.text
    finished = followed.finish(timeout=ASK_S)
    assert finished.code == 130 and finished.out.endswith("\nit runs\n"), finished.text
    state = cluster.state("plain")
    assert (state["status"], state["exit_code"], state["verb"]) == ("STOPPED", 130, ""), state


@pytest.mark.timeout(600)
def test_a_job_gets_the_versions_of_here_installed(
    cluster: Cluster, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    """Every other requirement is satisfied by the cluster, so that pip installs one package, from the head's wheels."""
    write_job("installed")
    write_metadata(tmp_path, "safetensors", OTHER_VERSION)
    here = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    followed = cluster.start(
        "train", "installed.yaml", "--id", "installed", "--install", env=cluster.env | here
    ).finish(timeout=JOB_S)  # fmt: skip
    assert followed.code == 0, followed.text
    run = cluster.run_of("installed")
    versions = json.loads((run.path / "environment.json").read_text())["versions"]
    assert versions["safetensors"] == OTHER_VERSION != metadata.version("safetensors"), versions
    assert versions["torch"] == metadata.version("torch"), "the same release is not replaced"


def test_wrong_input_is_refused_before_anything_is_submitted(
    cluster: Cluster, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    write_job("fine")
    write_job("lost", save={"dir": "runs"})
    write_metadata(tmp_path, "torch", "9.9.9")
    newer = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    before = {row["id"] for row in json.loads(cluster.ask("status", "--json").out)}
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("train", "lost.yaml"), {}, r"save\.dir: got runs, .* which Ray deletes, expected an absolute path .* URI"),
        (("train", "fine.yaml", "optim.learning_rate=1"), {}, r"optim\.learning_rate"),
        (("train", "fine.yaml", "cluster.address=auto"), {}, r"cluster\.address: got auto"),
        (("train", "fine.yaml"), newer, r"got torch 2\S*, expected torch 9\.9\.9, as here; add --install"),
        (("train", "fine.yaml"), {"RAY_AUTH_TOKEN": "wrong"}, r"token: got the token in RAY_AUTH_TOKEN, expected that"),
        (
            ("status",),
            {"RAY_AUTH_MODE": "disabled"},
            r"token: got .*, expected that of \S+ in RAY_AUTH_TOKEN or RAY_AUTH",
        ),
        (("status", "--address", "http://127.0.0.1:9"), {}, r"--address: got http://127\.0\.0\.1:9, where no Ray job"),
        (("status", "--address", "127.0.0.1:9"), {}, r"--address: got 127\.0\.0\.1:9, expected the URL"),
        (("status", "nobody"), {}, r"ID: got nobody, which \S+ does not know"),
        (("logs", "nobody", "--follow"), {}, r"ID: got nobody"),
        (("stop", "nobody"), {}, r"ID: got nobody"),
        (("fetch", "nobody"), {}, r"ID: got nobody"),
        (("plan", "fine.yaml"), {}, r"submit: got plan, expected one of train, .*plan needs no cluster"),
        (("tran", "fine.yaml"), {}, r"submit: did you mean train. Got tran, expected one of train, "),
    ]
    for arguments, env, expected in cases:
        refused = cluster.ask(*arguments, env=env)
        assert refused.code == 2 and re.search(f"error: .*{expected}", refused.err), (arguments, refused.text)
        assert "Traceback" not in refused.err and len(refused.err.splitlines()) == 1, refused.text
    assert {row["id"] for row in json.loads(cluster.ask("status", "--json").out)} == before
