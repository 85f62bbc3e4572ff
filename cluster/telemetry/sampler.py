"""Samples one node: its devices, the memory and CPU time of the run's processes, and shared memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.devices.limits import ROOT
from cluster.telemetry.cpu import CpuReader, shared_memory
from cluster.telemetry.gpu import open_gpus
from cluster.telemetry.processes import RayWorkers, RunProcesses


class NodeSampler:
    """Reads everything about this node that a run wants to know; one object per node, used by one thread.

    Nothing here allocates on a device, creates a context there, or imports torch.

    Args:
        node: name of the node.
        environ: the environment that says which GPUs are visible.
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
            "devices": [{"device": one.title, **one.to_json()} for one in (cpu, *gpus)],
            "processes": [asdict(one) for one in processes],
            "shm_total": total,
            "shm_free": free,
        }


def node_name(address: str) -> str:
    """The name of this node in file names and tags: the host name, with the address where another node may see it.

    Args:
        address: of the node in its cluster.
    """
    host = socket.gethostname()
    return host if address == "127.0.0.1" else f"{host}-{address}".replace(":", ".")
