"""A cluster of two nodes on loopback addresses, one with a single core and slow instructions, and one job with a host
of experts on each.

Prints what the job did as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
import torch
from ray.cluster_utils import Cluster

from jobs.train import train

SLOW = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
"""Matrix products then take several times as long, also while other processes use this machine."""


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    os.environ.update(SLOW)
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")  # its processes inherit both
    os.sched_setaffinity(0, cores)
    for name in SLOW:
        del os.environ[name]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    while ray.available_resources().get("CPU", 0) < 4:  # Ray spreads over the nodes whose resources it knows
        time.sleep(0.05)
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    job = {
        "name": "unequal",
        "model": {"builder": "experts.models:moe_mlp", "width": 256, "layers": 2},
        "experts": {"num_experts": 12, "hosts": 2},
        "data": {"train": {"x": x, "labels": (x[:, 0] > 0).long()}, "eval_fraction": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 2, "log_every": 1, "global_batch_size": 12, "micro_batch_size": 12},
        "scale": {"workers": 1, "threads": 2},
        "save": {"dir": sys.argv[2]},
        "telemetry": {"tensorboard": False, "every": 0.25},
    }
    result = train(job, quiet=True)
    print("ANSWER", json.dumps({"status": result.status, "run": result.run}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
