"""Plan rule about rates: how fast the processes of a run compute, update and send, measured or assumed.

Pure: devices, inventory and a measured calibration in, rates out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.devices.calibration import MachineRates, RatesAtThreads
from cluster.devices.inventory import Inventory
from cluster.wording import counted
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.text import seconds_text

PEAKS = ("fp32", "tf32", "bf16", "fp16", "memory")

GPUS = {
    "B200": (75, 1100, 2250, 2250, 7.7), "H200 NVL": (60, 418, 835, 835, 4.8), "H200": (67, 494, 989, 989, 4.8),
    "H100 NVL": (60, 418, 835, 835, 3.9), "H100 PCIE": (51, 378, 756, 756, 2.0), "H100": (67, 494, 989, 989, 3.35),
    "A100": (19.5, 156, 312, 312, 1.55), "L40S": (91.6, 183, 362, 362, 0.86), "A40": (37.4, 74.8, 150, 150, 0.7),
    "A10": (31.2, 62.5, 125, 125, 0.6), "L4": (30.3, 60, 121, 121, 0.3), "V100": (15.7, 15.7, 15.7, 125, 0.9),
    "T4": (8.1, 8.1, 8.1, 65, 0.32), "4090": (82.6, 82.6, 165, 165, 1.0), "3090": (35.6, 35.6, 71, 71, 0.94),
    "MI300X": (163, 654, 1307, 1307, 5.3),
}  # fmt: skip
"""Neighbouring words of a GPU's name -> 1e12 FLOPs per second of dense products in each format of `PEAKS`, and 1e12
bytes per second of its memory; longer names of a kind come first. From the data sheets of NVIDIA (which give sparse
products of H100, H200 and B200, twice as fast), its white papers (4090, 3090: sums in fp32) and AMD. Formats that a
GPU has no units for are computed in fp32. The A100's memory is that of 40 GB."""

GPU_SHARE = 0.4
"""Fraction of its peak that training reaches on a GPU: a usual model FLOPs utilisation."""

GPU_OPERATION_S, GPU_TRIP_S = 8e-6, 1e-5

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
    memory = min(peak_of(gpu.name, "memory") or 1e12 for gpu in machines.gpus)
    return ProcessRates(flops, memory, memory, GPU_OPERATION_S, GPU_TRIP_S, wire, float(len(machines.gpus)), source)


def gpu_flops(machines: DevicePool, dtype: str, *, unequal: bool) -> float | None:
    """FLOPs per second that training reaches on the slowest GPU, or the mean of all GPUs if shares are unequal; None if
    a GPU is not in the table."""
    found = [GPU_SHARE * (peak_of(gpu.name, dtype) or 0.0) / machines.per_gpu for gpu in machines.gpus]
    if not found or not all(found):
        return None
    return sum(found) / len(found) if unequal else min(found)


def peak_of(name: str, what: str) -> float | None:
    """What of `PEAKS` a GPU reaches in a second, by any name; None where the table lacks it, and for a MIG slice."""
    words = f" {name.upper().replace('-', ' ')} "
    found = next((peaks for kind, peaks in GPUS.items() if f" {kind} " in words), None)
    return None if found is None or what not in PEAKS or " MIG " in words else 1e12 * found[PEAKS.index(what)]


def name_of_slowest(machines: DevicePool) -> str:
    """The GPU that the others wait for, as text."""
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"the slowest of {', '.join(names)}"


def names_of_each(machines: DevicePool) -> str:
    """All kinds of GPUs, as text."""
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"
