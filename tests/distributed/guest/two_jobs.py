"""Jobs with expert hosts on a cluster with room for one at a time; what they did as one JSON line.

Each needs three of four CPUs. `killed` is ended while it waits with the turn to reserve; `first` then trains, loses its
worker's place to a job that waits, `second`, and gives its hosts back; both finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

import ray
import ray.exceptions
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from experts.hosts.reserve import NAMESPACE, TURN

LIMIT_S = 200
COMMAND = """
import sys
import experts.hosts.reserve as reservation, jobs.driver.watch as watch
reservation.GIVE_BACK_S = watch.GIVE_BACK_S = 3.0
from jobs.__main__ import main
sys.argv[0] = "raytrain"
main()
"""


class Other:
    """Somebody else's work on the cluster."""

    def here(self) -> bool:
        return True


def job_in(folder: Path, name: str, address: str) -> dict[str, object]:
    return {
        "name": name,
        "model": {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16},
        "data": {"source": "text", "path": str(folder / "text.txt")},
        "experts": {"num_experts": 4, "top_k": 2, "hosts": 2},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 10, "log_every": 1, "global_batch_size": 4},
        "scale": {"workers": 1, "threads": 1},
        "save": {"dir": str(folder), "every": 4},
        "cluster": {"address": address},
        "telemetry": {"tensorboard": False, "observers": ["guest_code:FallsOnce"] if name == "first" else []},
    }


class Story:
    """The cluster and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        os.environ["FALL"] = str(folder / "fall")
        (folder / "text.txt").write_text("the mill turns and the river runs. " * 200)
        head = {"num_cpus": 4, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.commands: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(job_in(self.folder, name, self.cluster.address)))
        with (self.folder / f"{name}.txt").open("w") as out:
            self.commands[name] = subprocess.Popen(
                [sys.executable, "-u", "-c", COMMAND, "train", str(path)], stdout=out, stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent,
            )  # fmt: skip

    def out(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Until something is reached."""
        ends = time.monotonic() + LIMIT_S
        while not reached():
            if time.monotonic() > ends:
                outs = "\n".join(f"--- {name}\n{self.out(name)}" for name in self.commands)
                raise SystemExit(f"not reached: {what}\n{outs}")
            time.sleep(0.1)

    def wait_for_turn(self, name: str) -> None:
        """Until a run has the turn to reserve."""

        def has() -> bool:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                turn: Any = ray.get_actor(TURN, namespace=NAMESPACE)
                return f"/{name}-" in ray.get(turn.holder.remote(), timeout=5)
            return False

        self.wait(has, f"the turn of {name}")

    def free(self) -> float:
        return ray.available_resources().get("CPU", 0.0)

    def pending(self) -> int:
        """Groups that wait for room."""
        return sum(group["state"] == "PENDING" for group in placement_group_table().values())

    def tell(self) -> None:
        actor: Any = ray.remote(num_cpus=2)(Other)
        other = actor.remote()
        ray.get(other.here.remote())
        self.start("killed")
        self.wait_for_turn("killed")
        self.start("first")
        self.wait(lambda: self.free() == 0, "the hosts hold places")  # and the worker finds none
        self.wait(lambda: self.free() == 2, "they were given back")
        self.wait(lambda: any(self.folder.glob("first-*/events.jsonl")), "the second run's folder")
        self.commands["killed"].send_signal(signal.SIGKILL)
        self.wait_for_turn("first")
        ray.kill(other)
        self.wait(lambda: "training  step" in self.out("first"), "the first run trains")
        small: Any = ray.remote(num_cpus=1)(Other)
        rest = small.remote()  # so that the second run finds no place for its hosts, and none for its worker
        ray.get(rest.here.remote())
        self.start("second")
        self.wait_for_turn("second")
        self.wait(lambda: self.pending() == 2, "the second run waits for both")
        taker = small.remote()  # the node gives it what becomes free before Ray Train can ask for a place again
        (self.folder / "fall").touch()
        self.wait(lambda: "are given back" in self.out("first"), "the first run gives its hosts back")
        ray.kill(taker)
        codes = {name: self.commands[name].wait(LIMIT_S) for name in ("second", "first")}
        answer = {name: {"code": code, "out": self.out(name)} for name, code in codes.items()}
        print("ANSWER", json.dumps(answer), flush=True)
        ray.shutdown()
        self.cluster.shutdown()


if __name__ == "__main__":
    Story(Path(sys.argv[2])).tell()
