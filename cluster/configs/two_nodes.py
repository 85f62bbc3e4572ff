"""A Ray cluster of two nodes on this machine, for development: `python -m cluster.configs.two_nodes`.

It has what a cluster of several machines has and one machine has not: two nodes to place workers on, a dashboard that
accepts jobs, and token authentication. Every port is on loopback. It runs until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading

import click

from cluster.environment import LOOPBACK, variables_kept_from_ray
from cluster.network import answers
from cluster.ray_runtime import private_ray

#: Ray's defaults may be wanted by another cluster on this machine.
FREE_PORTS = {"AUTOSCALER_METRIC_PORT": "0", "DASHBOARD_METRIC_PORT": "0"}


@click.command()
@click.option("--cpus", default=2, show_default=True, help="CPUs that each node declares")
@click.option("--gpus", default=0, show_default=True, help="GPUs that each node declares, whether they exist or not")
@click.option("--port", default=0, help="port of the dashboard, which accepts jobs  [default: any free one]")
def main(cpus: int, gpus: int, port: int) -> None:
    """Start a Ray cluster of two nodes on this machine, and print how to use it."""
    stop = threading.Event()
    with private_ray() as private:
        private.set_environment(os.environ)
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            os.environ.pop(name, None)
        os.environ["RAY_TMPDIR"] = private.folder  # `Cluster` writes the address there that a plain `ray.init()` reads
        os.makedirs(os.path.join(private.folder, "ray"))
        os.environ["TMPDIR"] = private.folder  # processes of Ray's dashboard that are killed leave temporary folders
        os.environ.update(FREE_PORTS)
        with variables_kept_from_ray():
            from ray.cluster_utils import Cluster

            nodes = Cluster()
            dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
            for number in range(2):
                nodes.add_node(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    **(dashboard if number == 0 else {}),
                    node_ip_address="127.0.0.1",
                    # in a shared one, each node removes the files of the other
                    temp_dir=os.path.join(private.folder, f"r{number}"),
                    dashboard_agent_listen_port=0,  # an agent that finds its port taken starts no jobs
                )
                # without this file, a job would take the address of any other cluster on this machine
                with open(os.path.join(private.folder, f"r{number}", "ray_current_cluster"), "w") as file:
                    file.write(str(nodes.gcs_address))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        url = f"http://{nodes.webui_url}"
        agents = [f"127.0.0.1:{node.dashboard_agent_listen_port}" for node in nodes.list_all_nodes()]
        if silent := [address for address in (nodes.webui_url, *agents) if not answers(address)]:
            nodes.shutdown()
            raise click.ClickException(f"it would take no jobs, as {', '.join(silent)} does not answer")
        # with the last of them, a plain `ray.init()` does not tell the cluster the address of a network interface
        exported = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", *LOOPBACK)}
        print("export", *(f"{name}={shlex.quote(value)}" for name, value in exported.items()))
        print(f"export RAY_API_SERVER_ADDRESS={url}", flush=True)
        print(f"two nodes are running at {nodes.gcs_address}; Ctrl-C stops them", file=sys.stderr, flush=True)
        try:
            while not stop.wait(1.0):
                for node in nodes.list_all_nodes():
                    node.dead_processes()  # reaps them: Ray's workers end with their raylet once it is no zombie
        finally:
            nodes.shutdown()


if __name__ == "__main__":
    main()
