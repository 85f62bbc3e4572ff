"""Samples one node: its devices, the run's processes and shared memory; also as gauges for Prometheus through Ray.

A thread of each node (`raytrain.execution.telemetry`) and `raytrain top` call it every few seconds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.devices.limits import ROOT
from cluster.telemetry.devices import CpuReader, open_gpus, shared_memory
from cluster.telemetry.processes import RayWorkers, RunProcesses

# ---------------------------------------------------------------- sampler


class NodeSampler:
    """Reads everything about this node that a run wants to know; one object per node, used by one thread.

    Nothing here allocates on a device, creates a context there, or imports torch.

    Args:
        environ: says which GPUs are visible.
        every_job: count the processes of all jobs of Ray, not only of this one.
        root, nvml: substitutes for ``/`` and the pynvml module, for tests.
    """

    def __init__(
        self, node: str, *, environ: Mapping[str, str] | None = None, every_job: bool = False, root: Path = ROOT,
        nvml: Any = None,
    ) -> None:  # fmt: skip
        self.node, self._root = node, root
        self._gpus = open_gpus(os.environ if environ is None else environ, root=root, nvml=nvml)
        self._cpu = CpuReader(root=root)
        self._processes = (RayWorkers if every_job else RunProcesses)(root=root)
        self.notes = self._gpus.notes
        """Why no GPU is sampled; empty if one is."""

    def sample(self) -> dict[str, Any]:
        """A row of telemetry/<node>.jsonl: bytes, percent, unix seconds; `devices` begins with the CPU."""
        processes = self._processes.sample()
        cpu = self._cpu.sample(run_bytes=sum(one.rss for one in processes))
        gpus = self._gpus.sample([one.pid for one in processes])
        total, free = shared_memory(root=self._root)
        return {
            "kind": "telemetry",
            "time": time.time(),
            "node": self.node,
            "devices": [{"device": one.title, **asdict(one)} for one in (cpu, *gpus)],
            "processes": [asdict(one) for one in processes],
            "shm_total": total,
            "shm_free": free,
        }


def node_name(address: str) -> str:
    """The name of this node in file names and tags: the host name, with its address in the cluster where another node
    may see it."""
    host = socket.gethostname()
    return host if address == "127.0.0.1" else f"{host}-{address}".replace(":", ".")


# ---------------------------------------------------------------- gauges

GAUGES = {
    "utilisation": ("raytrain_utilisation_percent", "time in which the device worked"),
    "memory_total": ("raytrain_memory_total_bytes", "memory of the device"),
    "memory_used": ("raytrain_memory_used_bytes", "memory in use, of all processes"),
    "memory_run": ("raytrain_memory_run_bytes", "memory in use by the run"),
    "memory_other": ("raytrain_memory_other_bytes", "memory in use by others"),
    "temperature_c": ("raytrain_temperature_celsius", "temperature of the device"),
    "power_w": ("raytrain_power_watts", "power of the device"),
    "clock_mhz": ("raytrain_clock_mhz", "clock of the device"),
    "memory_clock_mhz": ("raytrain_memory_clock_mhz", "clock of the device's memory"),
}
"""Key of a device -> name of the gauge (Ray puts `ray_` before it) and description."""
TAGS = ("run", "node", "device")
PROCESS = ("raytrain_process_rss_bytes", "resident memory of a process of the run")
THROTTLED = ("raytrain_throttled", "1 while the device is slowed down")


class RayGauges:
    """Publishes rows; in a process that is connected to Ray.

    Args:
        run: name of the run, a tag of every gauge.
    """

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._run = run
        self._gauges = {key: Gauge(name, about, tag_keys=TAGS) for key, (name, about) in GAUGES.items()}
        self._throttled = Gauge(*THROTTLED, tag_keys=TAGS)
        self._process = Gauge(*PROCESS, tag_keys=("run", "node", "process", "pid"))

    def publish(self, row: Mapping[str, Any]) -> None:
        """Set the gauges to the figures of a row; a figure that is None keeps its last value."""
        node = {"run": self._run, "node": str(row["node"])}
        for device in row["devices"]:
            tags = {**node, "device": str(device["device"])}
            for key, gauge in self._gauges.items():
                if device[key] is not None:
                    gauge.set(float(device[key]), tags)
            if device["throttle"] is not None:
                self._throttled.set(float(bool(device["throttle"])), tags)
        for process in row["processes"]:
            tags = {**node, "process": process["name"][:40], "pid": str(process["pid"])}
            self._process.set(float(process["rss"]), tags)
