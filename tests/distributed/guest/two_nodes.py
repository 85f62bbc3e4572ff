"""A cluster of two nodes on loopback addresses in this process, one job on it, and what it did as one JSON line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

import ray
import torch
from ray.cluster_utils import Cluster

from cluster.preflight import check_seen_by_all
from jobs.train import train


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 8, generator=generator)
    job = {
        "model": {"builder": "guest_code:networked", "note": f"{sys.argv[2]}-interfaces"},
        "data": {"train": {"x": x, "labels": (x[:, 0] > 0).long(), "row": torch.arange(240)}, "eval_fraction": 0.0},
        "optim": {"lr": 0.01},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 12, "log_every": 1, "global_batch_size": 24},
        "save": {"dir": sys.argv[2]},
        "telemetry": {"tensorboard": False},
    }
    checks = check_seen_by_all({"data.path": __file__, "save.dir": "/no/such/place"})
    result = train(job, quiet=True)
    answer = {
        "status": result.status,
        "losses": [row["loss"] for row in result.history if row["kind"] == "train"],
        "run": result.run,
        "interfaces": Path(f"{sys.argv[2]}-interfaces").read_text().splitlines(),
        "checks": [(check.key, check.status, check.seen) for check in checks],
    }
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
