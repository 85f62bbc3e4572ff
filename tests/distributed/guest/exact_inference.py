"""One inference job on a cluster of three nodes, again and again: with more workers, with a slow one, and with a
worker, a node and the driver killed in the middle. What was computed, as one JSON line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]
os.environ["ORDERS"] = os.path.join(sys.argv[2], "orders")

import ray
from ray.cluster_utils import Cluster

from cluster.devices.inventory import local_inventory
from jobs.infer import infer
from jobs.inference.plan import plan_inference
from jobs.inference.target import open_target
from raytrain.infer.ray_data import run_units

LIMIT_S = 240
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
GUEST = Path(__file__).parent
FOLDER = Path(sys.argv[2])
ORDERS = FOLDER / "orders"


def order(mode: str, at: int, grouped: int = 0) -> None:
    """What the workers of the next job do."""
    shutil.rmtree(ORDERS, ignore_errors=True)
    ORDERS.mkdir()
    (ORDERS / "mode").write_text(mode)
    (ORDERS / "at").write_text(str(at))
    (ORDERS / "grouped").write_text(str(grouped))


def seen() -> dict[str, Any]:
    """What the workers wrote down since the last order."""
    lines = [line.split() for line in (ORDERS / "units").read_text().splitlines()]
    loads = [line.split()[:2] for line in (ORDERS / "loads").read_text().splitlines()]
    incomplete = ORDERS / "incomplete"
    return {
        "rows": sum(int(line[1]) for line in lines),
        "units": dict(Counter(line[0] for line in lines)),
        "grouped": dict(Counter(line[0] for line in lines[: int((ORDERS / "grouped").read_text())])),
        "loads": loads,
        "slow": (ORDERS / "slow").read_text() if (ORDERS / "slow").exists() else None,
        "incomplete": len(incomplete.read_text().splitlines()) if incomplete.exists() else 0,
    }


def wait_for(what: Callable[[], Any]) -> Any:
    """The first true result."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        if found := what():
            return found
        time.sleep(0.02)
    raise SystemExit("nothing happened")


def job(output: str, workers: int) -> list[str]:
    """The arguments of one job."""
    return [str(FOLDER / "job.yaml"), f"infer.output={FOLDER / output}", f"scale.workers={workers}"]


def run(output: str, workers: int, **options: Any) -> dict[str, Any]:
    """Run a job from this process; what its workers wrote down."""
    given = job(output, workers)
    infer(given[0], overrides=given[1:], quiet=True, **options)
    return seen()


def with_a_lost_node(cluster: Any, node: Any) -> dict[str, Any]:
    """Four workers; once all of them have begun, the node under some of them is removed."""
    order("hold", 9)
    command = subprocess.Popen(
        [sys.executable, "-m", "jobs", "infer", *job("node", 4), f"cluster.address={cluster.address}"], cwd=GUEST,
    )  # fmt: skip
    wait_for(lambda: len(list(ORDERS.glob("held-*"))) == 4)
    cluster.remove_node(node, allow_graceful=False)
    (ORDERS / "go").touch()
    code = command.wait(LIMIT_S)
    return {**seen(), "code": code}


def with_a_killed_driver(cluster: Any) -> dict[str, Any]:
    """Two workers; once both have begun a unit, the driver is killed; another command resumes."""
    order("hold", 9)
    command = subprocess.Popen(
        [sys.executable, "-m", "jobs", "infer", *job("driver", 2), f"cluster.address={cluster.address}"], cwd=GUEST,
    )  # fmt: skip
    wait_for(lambda: len(list(ORDERS.glob("held-*"))) == 2)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    first = seen()
    order("", 0)
    second = run("driver", 2, resume=str(FOLDER / "driver"))
    return {"first": first, "second": second}


def devices() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` is in each of two actors with a GPU each; the GPUs are only declared."""
    order("together", 2, grouped=4)  # none computes all units before the other has started
    given, here = job("devices", 2), local_inventory()
    planned = plan_inference(open_target(given[0], given[1:], here), here, resume=None)
    list(run_units(planned.work(), planned.units[:6], workers=2, at_once=2, cpus=1, gpus=1))
    return sorted(device for _, device in seen()["loads"])


def main() -> None:
    """argv: Ray's temp dir, a folder with job.yaml."""
    os.chdir(GUEST)
    order("together", 4, grouped=60)
    head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1", "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, num_gpus=2, node_ip_address="127.0.0.2")
    third = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    answer: dict[str, Any] = {"four": run("four", 4)}
    order("together", 1)
    answer["one"] = run("one", 1)
    order("slow", 62)  # the slow worker may have one unit in work and one more
    answer["slow"] = run("slow", 2)
    order("kill", 9)
    answer["worker"] = run("worker", 2)
    order("die_reporting", 9)
    answer["reporting"] = run("reporting", 2)
    answer["devices"] = devices()
    answer["driver"] = with_a_killed_driver(cluster)
    answer["node"] = with_a_lost_node(cluster, third)
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
