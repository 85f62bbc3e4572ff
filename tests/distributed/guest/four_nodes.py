"""A cluster of four nodes with four GPU slots each, none of which exists: a run with a worker on each node, and where
Ray places the workers of a plan for all 16 slots. Prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.devices.inventory import Inventory, Node, inventory_from_ray
from jobs.driver.planning import plan_job
from jobs.job.spec import load_spec
from jobs.train import train
from raytrain.execution.trainer import worker_resources

NODES = [f"127.0.0.{n}" for n in range(1, 5)]


def seen() -> tuple[str, str]:
    """The node of a process, and the GPU slots that it may use."""
    return ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def slots(job: dict[str, Any]) -> dict[str, Any]:
    """The plan for the cluster's 16 slots, and what a process in each worker's place of it sees."""
    elsewhere = Inventory((Node("the driver's machine", 1, 0),), source="this machine", cpu_model="", cpu_flags={})
    loaded = load_spec(mapping={**job, "scale": {}})
    plan = plan_job(loaded, inventory=inventory_from_ray(local=elsewhere))
    scaling = ScalingConfig(
        num_workers=int(plan.value("workers", 0)), use_gpu=True,
        resources_per_worker=worker_resources(plan, local=False),
    )  # fmt: skip
    bundles = [scaling._resources_per_worker_not_none] * int(plan.value("workers", 0))
    group = ray.util.placement_group(bundles, strategy=plan.value("placement", ""))
    assert group.wait(60)
    places = [
        ray.remote(seen).options(
            num_cpus=1, num_gpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(len(bundles))
    ]  # fmt: skip
    found = ray.get(places, timeout=100)
    return {"workers": plan.value("workers", 0), "mode": plan.value("mode", ""), "places": found}


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    head = {"num_cpus": 4, "num_gpus": 4, "include_dashboard": False, "node_ip_address": NODES[0]}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for address in NODES[1:]:
        cluster.add_node(num_cpus=4, num_gpus=4, node_ip_address=address)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    job = {
        "name": "four",
        "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [8]},
        "data": {"train": {"x": x, "labels": (x[:, 0] > 0).long()}, "eval_fraction": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": 12, "log_every": 1, "global_batch_size": 24},
        "scale": {"mode": "cpu", "threads": 1},
        "save": {"dir": sys.argv[2]},
        "telemetry": {"tensorboard": False},
    }
    result = train(job, quiet=True)
    answer = {"status": result.status, "run": result.run, "page": Path(result.run, "report/report.html").read_text()}
    print("ANSWER", json.dumps({**answer, **slots(job)}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
