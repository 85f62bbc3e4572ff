"""A cluster of two nodes on loopback addresses with unlike accelerator types: a search on the lesser one, then the run.

Prints the results as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"

import pyarrow as pa
import ray
import torch
from pyarrow import parquet
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig
from rich.console import Console

import jobs.tuning.driver
from cluster.devices.inventory import Inventory, Node, inventory_from_ray, local_inventory
from jobs.driver.planning import plan_job
from jobs.inference.plan import plan_inference
from jobs.inference.target import open_target
from jobs.job.spec import load_spec
from jobs.train import train
from jobs.tune import run_tune
from raytrain.config.decode import load_yaml
from raytrain.errors import InputError
from raytrain.execution.trainer import accelerator_type, worker_resources
from raytrain.infer.ray_data import run_units
from raytrain.models.mlp import mlp
from raytrain.trainable import Trainable

TYPES = {"127.0.0.1": "H100", "127.0.0.2": "T4"}


def build(*, hidden: list[int], num_features: int, num_classes: int, notes: str) -> Trainable:
    """A perceptron that waits in every pass, so that a large batch is a fast one, and has room for 4 rows on a T4."""
    made = mlp(hidden=hidden, num_features=num_features, num_classes=num_classes)
    inner, kind = made.loss, TYPES.get(ray.util.get_node_ip_address(), "")

    def loss(module: torch.nn.Module, batch: dict[str, Any]) -> Any:
        rows = len(batch["labels"])
        if os.environ.get("TWO_KINDS_DRIVER") != str(os.getppid()):  # not what the driver tries before it starts
            with open(Path(notes) / kind, "a") as note:
                note.write(f"{rows}\n")
        if kind == "T4" and rows > 4 and module.training:
            raise torch.OutOfMemoryError("planted: a T4 has room for 4 rows")
        time.sleep(0.1)
        return inner(module, batch)

    made.loss = loss
    return made


def less_memory_on_a_t4() -> Inventory:
    """Both nodes are this machine."""
    found = inventory_from_ray()
    nodes = [replace(node, memory_bytes=node.memory_bytes // 2) if node.accelerator == "T4" else node
             for node in found.nodes]  # fmt: skip
    return replace(found, nodes=tuple(nodes))


def required(cluster: Cluster, job: dict[str, Any]) -> list[Any]:
    """A GPU node joins. What the plan of `scale.accelerator: a100` makes Ray require, where that is, and the refusal of
    a type that no node has."""
    node = cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address="127.0.0.3", resources={"accelerator_type:A100": 1})
    elsewhere = Inventory((Node("the driver's machine", 1, 0),), source="this machine", cpu_model="", cpu_flags={})
    inventory = inventory_from_ray(local=elsewhere)

    def planned(accelerator: str) -> Any:
        return plan_job(load_spec(mapping={**job, "scale": {"accelerator": accelerator}}), inventory=inventory)

    plan = planned("a100")
    scaling = ScalingConfig(
        num_workers=1, use_gpu=True, resources_per_worker=worker_resources(plan, local=False),
        accelerator_type=accelerator_type(plan, local=False),
    )  # fmt: skip
    each = scaling._resources_per_worker_not_none
    group = ray.util.placement_group([each])
    ready = group.wait(60)
    places = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    ray.util.remove_placement_group(group)
    try:
        planned("b200")
        refused = ""
    except InputError as error:
        refused = str(error)
    return [each, ready, places == {node.node_id}, refused]


def inferred(runs: Path) -> bool:
    """Whether the actor that needs an A100 computed on the node that has one."""
    x = pa.FixedSizeListArray.from_arrays(pa.array([0.0] * 32, pa.float32()), 4)
    parquet.write_table(pa.table({"x": x}), runs / "x.parquet")
    given = ["model.hidden=[8]", "model.num_features=4", "model.num_classes=3", f"infer.input={runs / 'x.parquet'}",
             f"infer.output={runs / 'answers'}", "infer.unit_rows=4"]  # fmt: skip
    plan = plan_inference(
        open_target("raytrain.models.mlp:mlp", given, local_inventory()), local_inventory(), resume=None
    )
    with plan.output.claimed(plan.identity):
        found = run_units(plan.work(), plan.units, workers=1, at_once=1, cpus=1, gpus=0, accelerator="A100")
        workers = {report.worker[:8] for report in found}
    return workers == {node["NodeID"][:8] for node in ray.nodes() if "accelerator_type:A100" in node["Resources"]}


def main() -> None:
    """argv: Ray's temp dir, the folder of the runs."""
    os.environ["RAY_TMPDIR"], runs = sys.argv[1], Path(sys.argv[2])
    os.environ["TWO_KINDS_DRIVER"] = str(os.getpid())
    notes = runs / "notes"
    notes.mkdir(parents=True)
    os.chdir(Path(__file__).parent)  # where the trials find this module
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "resources": {"accelerator_type:H100": 1}})
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2", resources={"accelerator_type:T4": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 16, generator=generator)
    torch.save({"x": x, "labels": (x[:, 0] > 0).long()}, runs / "rows.pt")
    job = {
        "name": "kinds",
        "model": {"builder": "two_kinds:build", "hidden": [16], "notes": str(notes)},
        "data": {"source": "stored_rows:rows", "file": str(runs / "rows.pt"), "eval_fraction": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {"global_batch_size": 32, "max_steps": 3, "log_every": 1},
        "save": {"dir": str(runs)},
        "telemetry": {"tensorboard": False},
    }
    (runs / "job.json").write_text(json.dumps(job))
    jobs.tuning.driver.inventory_from_ray = less_memory_on_a_t4
    with open(runs / "said.txt", "w") as said:
        sweep = run_tune(runs / "job.json", console=Console(file=said, width=200))
    seen = {path.name: sorted({int(line) for line in path.read_text().split()}) for path in notes.iterdir()}
    result = train(load_yaml(Path(sweep.best or "").read_text(), origin="best.yaml"), quiet=True)
    answer = {"sweep": sweep.folder, "seen": seen, "status": result.status, "run": result.run}
    answer["required"] = required(cluster, job)
    answer["inferred"] = inferred(runs)
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
