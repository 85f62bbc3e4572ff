"""Nodes that a run leaves out: workers there failed more than once in the way that broken machines fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.execution.ray_private import NODE_ID_LABEL
from raytrain.plan.room import room_for
from raytrain.runs.faults import Fault, read_faults
from raytrain.runs.folder import RunFolder

#: With this many such faults, a node is left out.
MOST_FAULTS = 2
#: Part of the messages of CUDA and HIP for errors of the device itself (CUDA runtime API, `cudaError_t`).
DEVICE_ERRORS = (
    "uncorrectable ECC",
    "NVLink",
    "hardware stack error",
    "hardware error",
    "unspecified launch failure",
    "busy or unavailable",
    "fallen off the bus",
)


def is_hardware(fault: Fault) -> bool:
    """Whether a fault may come from the machine: the process died without an exception, or the device reported it."""
    return fault.error == "WorkerDied" or any(words in fault.message for words in DEVICE_ERRORS)


def faulty_nodes(faults: Iterable[Fault]) -> list[str]:
    """Ids of the nodes with at least `MOST_FAULTS` such faults.

    Args:
        faults: the decisive fault of each failed attempt.
    """
    counts = Counter(fault.node for fault in faults if fault.node and is_hardware(fault))
    return sorted(node for node, count in counts.items() if count >= MOST_FAULTS)


@dataclass(frozen=True)
class NodeChoice:
    """Which nodes the next worker group must not use. Called in Ray Train's controller before each group starts.

    Attributes:
        run_path: the run folder, with the faults.
        each: resources of one worker.
        least: workers with which the run can continue.
        channel: the `DriverChannel` actor, which receives each node that is left out.
    """

    run_path: str
    each: Mapping[str, float]
    least: int
    channel: Any

    def selector(self, nodes: Callable[[], list[dict[str, Any]]]) -> dict[str, str] | None:
        """Ray's label selector that leaves the faulty nodes out; None if there are none, or if the others have no room.

        Args:
            nodes: returns what `ray.nodes()` does.
        """
        faulty = faulty_nodes(read_faults(RunFolder(self.run_path), since=0))
        if not faulty:
            return None
        alive = {node["NodeID"]: node for node in nodes() if node["Alive"]}
        left_out = [node for node in faulty if node in alive]
        others = [dict(node["Resources"]) for name, node in alive.items() if name not in left_out]
        if not left_out or room_for(self.each, others) < self.least:
            return None
        for node in left_out:
            address = alive[node]["NodeManagerAddress"]
            text = f"workers on node {address} failed {MOST_FAULTS} times as on a broken machine: it is left out"
            self.channel.warn.remote(f"node_left_out:{node}", "node_left_out", text, {"node": node, "address": address})
        return {NODE_ID_LABEL: f"!in({','.join(left_out)})"}
