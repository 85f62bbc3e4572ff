"""Two jobs with expert hosts, started at once on a cluster with room for one of them; their ends as one JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

from ray.cluster_utils import Cluster

LIMIT_S = 200


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    head = {"num_cpus": 4, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.makedirs(sys.argv[2])
    with open(os.path.join(sys.argv[2], "text.txt"), "w") as file:
        file.write("the mill turns and the river runs. " * 200)
    commands = {}
    for name in ("one", "two"):
        job = {
            "name": name,
            "model": {"builder": "experts.models:moe_gpt", "layers": 1, "heads": 2, "width": 16, "context": 16},
            "data": {"source": "text", "path": os.path.join(sys.argv[2], "text.txt")},
            "experts": {"num_experts": 4, "top_k": 2, "hosts": 2},
            "precision": {"dtype": "fp32"},
            "loop": {"max_steps": 10, "log_every": 1, "global_batch_size": 4},
            "scale": {"workers": 1, "threads": 1},
            "save": {"dir": sys.argv[2]},
            "cluster": {"address": cluster.address},
            "telemetry": {"tensorboard": False},
        }
        path = os.path.join(sys.argv[2], f"{name}.yaml")
        with open(path, "w") as file:
            json.dump(job, file)
        commands[name] = subprocess.Popen(
            [sys.executable, "-m", "jobs", "train", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    answer = {}
    for name, command in commands.items():
        out, _ = command.communicate(timeout=LIMIT_S)
        answer[name] = {"code": command.returncode, "out": out}
    print("ANSWER", json.dumps(answer), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
