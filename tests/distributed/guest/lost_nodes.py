"""A job whose nodes are removed: first no other node has room for it, then one has; what it did as one JSON line."""

from __future__ import annotations

import json
import os
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

from ray.cluster_utils import Cluster

LIMIT_S = 240
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Ray declares a node dead after two seconds, not after twenty."""


def job_in(folder: Path, address: str) -> dict[str, Any]:
    """Two workers and one expert host, of which only one fits on the head."""
    return {
        "name": "nodes",
        "model": {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16},
        "data": {"source": "text", "path": str(folder / "text.txt")},
        "experts": {"num_experts": 4, "top_k": 2, "hosts": 1},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 90, "log_every": 1, "global_batch_size": 4},
        "scale": {"workers": 2, "threads": 1},
        "save": {"dir": str(folder), "every": 5},
        "cluster": {"address": address},
        "telemetry": {"tensorboard": False, "observers": ["guest_code:Paces"]},
        "retry": {"host_wait_s": 120.0},
    }


class Story:
    """The cluster and the command; waits for what the run folder and the output say.

    Args:
        job: makes the job from the folder of the run and the address of the cluster.
    """

    def __init__(self, folder: Path, job: Callable[[Path, str], dict[str, Any]]) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "text.txt").write_text("the mill turns and the river runs. " * 200)
        self.go(20)
        os.environ["PACED"] = str(folder / "go")
        head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1", "_system_config": QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.node(2)
        (folder / "job.yaml").write_text(json.dumps(job(folder, self.cluster.address)))
        self.out = (folder / "out.txt").open("w")
        self.command = subprocess.Popen(
            [sys.executable, "-m", "jobs", "train", str(folder / "job.yaml")],
            stdout=self.out,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parent,
        )

    def node(self, number: int) -> Any:
        """Another node with two CPUs."""
        return self.cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{number}")

    def go(self, step: int) -> None:
        """Allow the steps up to this one."""
        scratch = self.folder / "go.tmp"
        scratch.write_text(str(step))
        scratch.rename(self.folder / "go")

    def wait_for(self, text: str, name: str = "out.txt") -> None:
        """Until a file of the run holds this text."""
        ends = time.monotonic() + LIMIT_S
        while self.command.poll() is None and time.monotonic() < ends:
            files = [self.folder / name, *self.folder.glob(f"nodes-*/{name}")]
            if any(text in file.read_text() for file in files if file.exists()):
                return
            time.sleep(0.1)
        raise SystemExit(f"no {text!r}:\n{(self.folder / 'out.txt').read_text()}")

    def tell(self) -> None:
        """Remove the second node, add a third, add a fourth, remove the third."""
        self.wait_for('"step": 20,', "metrics.jsonl")
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.go(50)
        self.wait_for("node 127.0.0.2 was lost")
        self.wait_for("restarting the workers")
        third = self.node(3)
        self.wait_for('"step": 50,', "metrics.jsonl")
        self.node(4)
        self.cluster.remove_node(third, allow_graceful=False)
        self.finish()
        print("ANSWER", json.dumps(self.answer), flush=True)

    def finish(self) -> None:
        """Let the command train to its end, and end the cluster."""
        self.go(1000)
        code = self.command.wait(LIMIT_S)
        self.out.close()
        self.answer: dict[str, Any] = {"code": code, "out": (self.folder / "out.txt").read_text()}
        self.cluster.shutdown()


if __name__ == "__main__":
    Story(Path(sys.argv[2]), job_in).tell()
