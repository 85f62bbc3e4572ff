"""`train`, `infer` and `tune` on a cluster of two nodes that somebody else fills; each waits, and then runs to its end.

What each had printed while it waited, and how it ended, as one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

LIMIT_S = 100
COMMAND = """
import sys
import jobs.driver.progress as progress, jobs.inference.compute as compute
progress.QUIET_S = compute.QUIET_S = 1.0
from jobs.__main__ import main
sys.argv[0] = "raytrain"
main()
"""


def job_of(verb: str, folder: Path, address: str) -> dict[str, Any]:
    """A job with one worker of two threads."""
    common = {
        "name": verb, "cluster": {"address": address}, "scale": {"workers": 1, "threads": 2},
        "save": {"dir": str(folder / "runs")},
    }  # fmt: skip
    if verb == "infer":
        infer = {
            "input": str(folder / "in.jsonl"), "output": str(folder / "out"), "template": "{question}",
            "max_new_tokens": 1, "batch_size": 4,
        }  # fmt: skip
        model = {"builder": "exact_code:build", "context": 128}
        return common | {"model": model, "data": {"source": "stdlib", "max_bytes": 10000}, "infer": infer}
    return common | {
        "model": {"builder": "guest_code:net"},
        "data": {"source": "guest_code:rows"},
        "precision": {"dtype": "fp32"},
        "loop": {"global_batch_size": 8, "max_steps": 4},
        "tune": {"max_trials": 1},
        "telemetry": {"tensorboard": False},
    }


def start(verb: str, folder: Path, address: str) -> subprocess.Popen[bytes]:
    path = folder / f"{verb}.yaml"
    path.write_text(json.dumps(job_of(verb, folder, address)))
    with (folder / f"{verb}.txt").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", COMMAND, verb, str(path)], stdout=out, stderr=subprocess.STDOUT,
            cwd=Path(__file__).parent,
        )  # fmt: skip


def main() -> None:
    """argv: Ray's temp dir, a folder."""
    folder = Path(sys.argv[2])
    (folder / "orders").mkdir(parents=True)
    os.environ["ORDERS"] = str(folder / "orders")
    (folder / "in.jsonl").write_text('{"question": "who turns the mill"}\n' * 8)
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=3, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
    other: Any = placement_group([{"CPU": 2}, {"CPU": 3}], strategy="STRICT_SPREAD")
    ray.get(other.ready(), timeout=60)
    verbs = ("train", "infer", "tune")
    commands = {verb: start(verb, folder, str(cluster.address)) for verb in verbs}
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends and not all(" need" in (folder / f"{verb}.txt").read_text() for verb in verbs):
        time.sleep(0.2)
    waiting = {verb: (folder / f"{verb}.txt").read_text() for verb in verbs}
    remove_placement_group(other)
    codes = {verb: command.wait(LIMIT_S) for verb, command in commands.items()}
    answer = {
        verb: {"code": codes[verb], "waiting": waiting[verb], "out": (folder / f"{verb}.txt").read_text()}
        for verb in verbs
    }
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
