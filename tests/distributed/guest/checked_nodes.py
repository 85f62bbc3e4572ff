"""`raytrain check` on a cluster of two nodes, and after its second node has stopped; the answers as one JSON line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TMPDIR"] = sys.argv[1]

from ray.cluster_utils import Cluster

PATIENT = {"health_check_failure_threshold": 1000}
"""Ray does not give the node that has stopped up."""
COMMAND = """
import sys
import jobs.check
jobs.check.NODE_TIMEOUT_S = float(sys.argv.pop(1))
from jobs.__main__ import main
sys.argv[0] = "raytrain"
main()
"""


def check(address: str, folder: Path, *arguments: str, limit: float) -> Any:
    """The command, with this time limit of a node."""
    command = [sys.executable, "-c", COMMAND, str(limit), "check", "--json", f"cluster.address={address}",
               f"save.dir={folder}", *arguments]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def main(folder: Path) -> None:
    folder.mkdir()
    head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1", "_system_config": PATIENT}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    done = check(cluster.address, folder, limit=60)
    rooms = [check(cluster.address, folder, "default", "--quick", f"scale.threads={n}", limit=60) for n in (1, 3)]
    left = [path.name for path in folder.iterdir()]
    raylet = second.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    lost = check(cluster.address, folder, limit=3)
    os.kill(raylet, signal.SIGCONT)
    report = json.loads(done.stdout) if done.stdout else done.stderr
    answer = {
        "code": done.returncode,
        "report": report,
        "left": left,
        "rooms": [[one.returncode, json.loads(one.stdout) if one.stdout else one.stderr] for one in rooms],
        "lost": {"code": lost.returncode, "err": lost.stderr},
    }
    print("ANSWER", json.dumps(answer), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[2]))
