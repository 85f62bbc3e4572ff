"""A cluster of three nodes on loopback addresses, each slower than the one before, and one job with measured shares.

Prints the results of the job, and of the same job with equal shares, as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from torch import nn

from jobs.train import train
from raytrain.models.mlp import mlp
from raytrain.trainable import Trainable

PASS_S = (0.2, 0.3, 0.55)
"""Of each rank. Six micro-batches are then dealt 3, 2, 1; a tenth more or less on any of them changes nothing."""


def build(*, hidden: list[int], num_features: int, num_classes: int) -> Trainable:
    """A perceptron whose forward takes the worker of rank r `PASS_S[r]` seconds, under any load."""
    made = mlp(hidden=hidden, num_features=num_features, num_classes=num_classes)
    inner = made.loss
    seconds = PASS_S[dist.get_rank()] if dist.is_initialized() else 0.0

    def loss(module: nn.Module, batch: dict[str, Any]) -> Any:
        ends = time.monotonic() + seconds
        out = inner(module, batch)
        time.sleep(max(0.0, ends - time.monotonic()))
        return out

    made.loss = loss
    return made


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    os.chdir(Path(__file__).parent)  # where the workers find this module
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for place in (2, 3):
        cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{place}")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 64, generator=generator)
    answer = {}
    for shares in ("auto", "equal"):
        job = {
            "name": shares,
            "model": {"builder": "slow_nodes:build", "hidden": [64]},
            "data": {"train": {"x": x, "labels": (x[:, 0] > 0).long()}, "eval_fraction": 0.0},
            "optim": {"lr": 0.003},
            "precision": {"dtype": "fp32"},
            "loop": {"max_steps": 8, "log_every": 1, "global_batch_size": 12, "micro_batch_size": 2},
            "scale": {"workers": 3, "shares": shares, "threads": 1},
            "save": {"dir": sys.argv[2]},
            "telemetry": {"tensorboard": False},
        }
        result = train(job, quiet=True)
        losses = [row["loss"] for row in result.history if row["kind"] == "train"]
        answer[shares] = {"status": result.status, "losses": losses, "run": result.run}
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
