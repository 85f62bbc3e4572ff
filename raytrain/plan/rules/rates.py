"""Plan rule about rates: how fast the processes of a run compute, update and send, measured or assumed.

Pure: devices, inventory and a measured calibration in, rates out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.devices.calibration import MachineRates, RatesAtThreads
from cluster.devices.inventory import Inventory
from cluster.wording import counted
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.text import seconds_text

GPU_FLOPS = {
    "B200": (1100e12, 2250e12), "H200": (494e12, 989e12), "H100": (494e12, 989e12), "A100": (156e12, 312e12),
    "L40S": (183e12, 362e12), "A40": (75e12, 150e12), "A10": (62e12, 125e12), "L4": (60e12, 121e12),
    "V100": (15.7e12, 125e12), "T4": (8.1e12, 65e12), "4090": (82e12, 165e12), "3090": (36e12, 71e12),
}  # fmt: skip
"""Name -> dense peak in (tf32, or fp32 where there is no tf32; half precision), from NVIDIA's data sheets."""

GPU_SHARE = 0.4
"""Fraction of its peak that training reaches on a GPU: a usual model FLOPs utilisation."""

GPU_MEMORY, GPU_OPERATION_S, GPU_TRIP_S = 1e12, 8e-6, 1e-5

ASSUMED = MachineRates(
    "cpu",
    (
        RatesAtThreads(
            1, {"fp64": ((128, 40e9),), "fp32": ((128, 85e9),), "bf16": ((64, 85e9), (128, 170e9), (512, 300e9))},
            5e9, 6e9, 3e-6,
        ),
    ),
    4e-5,
    0.7e9,
)  # fmt: skip
"""One core: forward and backward of linear maps, torch 2.13, one thread of a server CPU with AVX-512 and bf16."""

NODES_WIRE, NODES_TRIP_S = 0.1e9, 2e-4
"""Bytes per second and seconds of a round trip between the CPUs of two nodes."""


@dataclass(frozen=True)
class ProcessRates:
    """The rates of the processes of one layout.

    Attributes:
        flops: FLOPs per second of a process in products.
        elementwise: bytes per second of a process in other operations.
        memory: bytes per second of an optimizer's update.
        operation_s: seconds of an operation on a small tensor.
        trip_s: seconds of a small message to a peer and back.
        wire: bytes per second to a peer.
        together: number of processes that can compute at this rate at the same time.
        source: where the rates come from.
    """

    flops: float
    elementwise: float
    memory: float
    operation_s: float
    trip_s: float
    wire: float
    together: float
    source: str

    def share(self, processes: int) -> float:
        """How many processes' rate `processes` processes reach that compute at the same time."""
        return min(float(processes), self.together)


def rates_of(
    machines: DevicePool, inventory: Inventory, dtype: str, *, processes: int, threads: int, width: int, unequal: bool,
    measured: MachineRates | None,
) -> ProcessRates:  # fmt: skip
    """The rates of `processes` processes with `threads` threads each, on all machines together.

    Args:
        width: of a typical product.
        unequal: the shares of the workers follow their speed.
        measured: the calibration of these machines; None assumes rates.
    """
    if machines.on_gpu:
        return gpu_rates(machines, dtype, unequal=unequal)
    known = measured or ASSUMED
    one = known.at(threads)
    if measured is None:  # of one thread
        one = one.with_threads(threads, gain=threads)
    flags = [flag for flag, has in inventory.cpu_flags.items() if has]
    name = dtype if dtype != "fp16" and (dtype != "bf16" or flags) else "fp32"
    flops = one.product_flops(name, width=width) or one.product_flops("fp32", width=width) or 1.0
    near = len(inventory.nodes) == 1
    rate_text = f"{flops / 1e9:.0f} GFLOP/s per process of {counted(threads, 'thread')} in {name}"
    link = f"{known.wire_bytes_per_s / 1e9:.1f} GB/s and {seconds_text(known.round_trip_s)} on loopback"
    link = link if near else f"{NODES_WIRE / 1e9:.1f} GB/s between nodes, assumed"
    how = "assumed: no run has measured this machine yet" if measured is None else "measured on this machine"
    how += ", while it was busy" if known.busy else ""
    memory = min(one.memory_bytes_per_s, _memory_of_node(known, inventory, threads, processes=processes))
    return ProcessRates(
        flops, one.elementwise_bytes_per_s, memory, one.operation_s,
        known.round_trip_s if near else NODES_TRIP_S, known.wire_bytes_per_s if near else NODES_WIRE,
        max(1.0, inventory.cpus / threads), f"{rate_text}, {link}, {how}",
    )  # fmt: skip


def _memory_of_node(known: MachineRates, inventory: Inventory, threads: int, *, processes: int) -> float:
    """Memory bytes per second of each of the processes that compute on a node at the same time: together they reach
    what one process with all of their threads does."""
    nodes = max(1, len(inventory.nodes))
    cores = max(1, inventory.cpus // nodes)
    each = min(processes / nodes, cores / threads)  # that compute at the same time
    return known.at(min(cores, round(threads * each))).memory_bytes_per_s / max(1.0, each)


def gpu_rates(machines: DevicePool, dtype: str, *, unequal: bool) -> ProcessRates:
    """The rates of processes with a GPU each, from data sheets."""
    flops = gpu_flops(machines, dtype, unequal=unequal) or 1.0
    name = names_of_each(machines) if unequal else name_of_slowest(machines)
    near = len({node.host for node, _ in machines.pool}) == 1
    wire, link = (50e9, "50 GB/s between GPUs of a node") if near else (3e9, "3 GB/s between nodes")
    source = f"{name} at {GPU_SHARE:.0%} of its data-sheet peak, {link}, assumed"
    return ProcessRates(
        flops, GPU_MEMORY, GPU_MEMORY, GPU_OPERATION_S, GPU_TRIP_S, wire, float(len(machines.gpus)), source
    )


def gpu_flops(machines: DevicePool, dtype: str, *, unequal: bool) -> float | None:
    """FLOPs per second that training reaches on the slowest GPU, or the mean of all GPUs if shares are unequal; None if
    a GPU is not in the table."""
    peaks = [peak_flops(gpu.name, dtype) for gpu in machines.gpus]
    found = [GPU_SHARE * peak / machines.per_gpu for peak in peaks if peak is not None]
    if not found or len(found) < len(peaks):
        return None
    return sum(found) / len(found) if unequal else min(found)


def peak_flops(name: str, dtype: str) -> float | None:
    """A GPU's data-sheet peak; None if it is not in the table."""
    peaks: Mapping[str, tuple[float, float]] = GPU_FLOPS
    found = next((pair for known, pair in peaks.items() if known in name.upper().replace("-", " ").split()), None)
    return None if found is None else found[dtype in ("bf16", "fp16")]


def name_of_slowest(machines: DevicePool) -> str:
    """The GPU that the others wait for, as text."""
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"the slowest of {', '.join(names)}"


def names_of_each(machines: DevicePool) -> str:
    """All kinds of GPUs, as text."""
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"
