"""The development cluster and the SLURM script, run: two nodes each, on loopback, with a token."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import configs

LIMIT_S = 200


def two_node_job(place: Any, guest_job: Callable[..., Any], *, cores: int) -> None:
    """A job on two workers, each of which takes a whole node; it has no save.dir."""
    place.write(guest_job(loop={"max_steps": 4}, scale={"workers": 2, "threads": cores}))


def assert_on_both_nodes(run: Any, *, cores: int) -> None:
    """Two workers ran, each of which takes all cores of a node."""
    nodes = json.loads((run.path / "plan.json").read_text())["inventory"]["nodes"]
    assert [node["cpus"] for node in nodes] == [cores, cores]
    (attempt,) = run.events("attempt")
    assert attempt["workers"] == 2


def without_secret(run: Path, token: str) -> bool:
    files = [path for path in run.rglob("*") if path.is_file()]
    return len(files) > 10 and not [path for path in files if token.encode() in path.read_bytes()]


@pytest.mark.timeout(300)
@pytest.mark.covers("NODE-07", "MON-11")
def test_the_development_cluster_has_two_nodes_on_loopback(
    start_python: Callable[..., Any], place: Any, guest_job: Callable[..., Any], free_port: int
) -> None:
    (odd := place.temp / "t d").mkdir()  # the token is in it
    given = ("-m", "cluster.configs.two_nodes", "--port", str(free_port))
    command = start_python(*given, cwd=place.folder, env=place.env | {"TMPDIR": str(odd)})
    lines: list[str] = []
    while len(lines) < 2:
        lines.append(command.process.stdout.readline())
        assert lines[-1], command.finish(timeout=10).text
    told = dict(word.split("=", 1) for word in shlex.split("".join(lines)) if "=" in word)
    assert told["RAY_API_SERVER_ADDRESS"] == f"http://127.0.0.1:{free_port}" and told["RAY_AUTH_MODE"] == "token"
    assert told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "or a plain `ray.init` waits for another address"
    token = Path(told["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700

    pasted = subprocess.run(
        ["bash", "-c", f"set -eu\n{''.join(lines)}env"], env=place.env, stdout=subprocess.PIPE, text=True, check=True
    )
    assert {f"{name}={value}" for name, value in told.items()} <= set(pasted.stdout.splitlines()), "as a shell sees it"

    two_node_job(place, guest_job, cores=2)
    given = ("-m", "jobs", "submit", "train", "job.yaml", f"save.dir={place.folder / 'runs'}")
    refused = start_python(*given, cwd=place.folder, env=place.env | told | {"RAY_AUTH_TOKEN": "no"})
    assert refused.finish(timeout=LIMIT_S).code == 2
    (address,) = {path.read_text() for path in token.parent.glob("r*/ray_current_cluster")}
    watching = ("-m", "jobs", "top", "--address", address, "--json", "--every", "0.2")
    top = start_python(*watching, cwd=place.folder, env=place.env | told)
    shown: list[str] = []
    reader = threading.Thread(target=lambda: shown.extend(top.process.stdout))  # a pipe holds a few seconds
    reader.start()
    submitted = start_python(*given, cwd=place.folder, env=place.env | told)
    place.wait_for(lambda: (place.folder / "runs" / "latest").exists() and place.run.events("attempt"), limit=LIMIT_S)
    training = place.listening()  # with the store of the workers' process group
    done = submitted.finish(timeout=LIMIT_S)
    assert done.code == 0, done.text
    top.process.send_signal(signal.SIGINT)
    assert top.process.wait(timeout=30) == 0
    reader.join()
    assert_top_saw_the_training([json.loads(line) for line in shown])
    run = place.run
    assert len(run.losses()) == 4 and run.plan["workers"]["value"] == 2
    assert_on_both_nodes(run, cores=2)
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["host"]
    for listening in (training, place.listening()):
        assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
    assert without_secret(run.path, token.read_text())
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(timeout=60) == 0
    assert not token.parent.exists()


def assert_top_saw_the_training(frames: list[list[dict[str, Any]]]) -> None:
    """Frames of both nodes, in which the processes that trained had memory and computed."""
    assert len(frames) >= 3 and {len(frame) for frame in frames} == {2}
    assert len({row["node"] for row in frames[0]}) == 2
    seen = [one for frame in frames for row in frame for one in row["processes"]]
    trained = [one for one in seen if one["name"].startswith("ray::RayTrainWorker")]
    assert len({one["pid"] for one in trained}) >= 2 and max(one["cpu_percent"] or 0.0 for one in trained) > 10
    assert all(one["rss"] > 2**20 for one in trained)
    assert all(row["devices"][0]["memory_run"] > 2**20 for row in frames[-1])


SRUN = """#!{python}
import os, signal, sys
command = [each for each in sys.argv[1:] if not each.startswith(("--nodes=", "--ntasks=", "--nodelist=", "--overlap"))]
with open("srun.log", "a") as log:
    print(" ".join(sys.argv[1:]), file=log)
if command[0] == "hostname":
    print("127.0.0.1")
elif "--head" in command:
    os.execvp("ray", command)
else:  # `ray start --address` listens on every interface; this joins like it, on loopback
    import ray._private.node, ray._private.parameter
    options = dict(each[2:].partition("=")[::2] for each in command if "=" in each)
    parameters = ray._private.parameter.RayParams(
        gcs_address=options["address"], node_ip_address="127.0.0.1", num_cpus=int(options["num-cpus"]),
        num_gpus=int(options["num-gpus"]), object_store_memory=150 << 20, min_worker_port=0, max_worker_port=0,
        node_manager_port=0, include_log_monitor=False, temp_dir=os.environ["TMPDIR"] + "/b",
    )
    node = ray._private.node.Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()
"""


@pytest.mark.timeout(300)
def test_the_slurm_script_trains_on_all_nodes_and_leaves_no_token(
    place: Any, guest_job: Callable[..., Any], free_ports: Callable[[int], list[int]]
) -> None:
    """With stand-ins for `srun` and `scontrol` that run everything here."""
    bin_folder = place.folder / "bin"
    bin_folder.mkdir()
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": "#!/bin/sh\n[ \"$*\" = 'show hostnames a,b' ] && printf 'a\\nb\\n'\n",
    }.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    two_node_job(place, guest_job, cores=1)
    port, client, agent = free_ports(3)
    env = {
        "PATH": os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1", "RAY_PORT": str(port),
        "RAY_HEAD_OPTIONS": f"--temp-dir={place.temp}/a --ray-client-server-port={client} "
        f"--dashboard-agent-listen-port={agent}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    }  # fmt: skip
    script = Path(configs.__path__[0]) / "slurm.sh"
    done = subprocess.run(
        ["bash", str(script), "train", "job.yaml", f"save.dir={place.folder / 'runs'}"],
        cwd=place.folder, env={**os.environ, **place.env, **env}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = place.run
    assert run.result["status"] == "done" and len(run.losses()) == 4
    assert_on_both_nodes(run, cores=1)
    calls = (place.folder / "srun.log").read_text().splitlines()
    assert [("--nodelist=a" in call, "--nodelist=b" in call) for call in calls].count((True, False)) == 2
    assert [call for call in calls if "--nodelist=b" in call and f"--address=127.0.0.1:{port}" in call]
    assert not list(place.folder.glob(".raytrain-token-*"))
    assert not place.titles("raylet")
