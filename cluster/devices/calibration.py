"""Measured rates of one machine, and the file that keeps them. Torch-free; `raytrain.train.compute.calibrate` measures.

The file is in the user's cache folder, one for each combination of machine, CPU model, devices, threads and versions,
so that a plan that imports neither torch nor Ray can use what an earlier run measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.devices.limits import cpu_description, usable_cores

CACHE_VARIABLE = "RAYTRAIN_CACHE"
"""Environment variable with the folder of the cache; by default `raytrain` in the user's cache folder."""

VERSION = 3
"""Changes when the meaning of the measured values changes, so that older files are not used."""

ProductRates = tuple[tuple[int, float], ...]
"""(width, FLOPs per second) of the matrix products of linear maps of this width, the narrowest first."""


@dataclass(frozen=True)
class RatesAtThreads:
    """Rates of one process with a given number of threads (on a GPU: with one device).

    Attributes:
        threads: CPU threads of the process.
        products: number format -> matrix rates of forward and backward.
        memory_bytes_per_s: reading and writing tensors that no cache holds.
        elementwise_bytes_per_s: the same for what a network computes between its products, in forward and backward.
        operation_s: seconds that an operation on a small tensor takes, in forward or in backward.
    """

    threads: int
    products: Mapping[str, ProductRates]
    memory_bytes_per_s: float
    elementwise_bytes_per_s: float
    operation_s: float

    def product_flops(self, dtype: str, *, width: float) -> float | None:
        """FLOPs per second of matrix products of this width, interpolated; None for a format that was not measured."""
        points = self.products.get(dtype)
        if not points:
            return None
        widths = [known for known, _ in points]
        at = bisect_left(widths, width)
        if at in (0, len(points)):
            return points[min(at, len(points) - 1)][1]
        (low, slow), (high, fast) = points[at - 1], points[at]
        return slow + (fast - slow) * (width - low) / (high - low)

    def between(self, more: RatesAtThreads, threads: int) -> RatesAtThreads:
        """The rates of `threads` threads, on the line between these and those of `more` threads."""
        part = (threads - self.threads) / (more.threads - self.threads)

        def mixed(low: float, high: float) -> float:
            return low + (high - low) * part

        products = {
            name: tuple((width, mixed(rate, more.product_flops(name, width=width) or rate)) for width, rate in points)
            for name, points in self.products.items()
        }
        return RatesAtThreads(
            threads, products, mixed(self.memory_bytes_per_s, more.memory_bytes_per_s),
            mixed(self.elementwise_bytes_per_s, more.elementwise_bytes_per_s),
            mixed(self.operation_s, more.operation_s),
        )  # fmt: skip

    def with_threads(self, threads: int, *, gain: float) -> RatesAtThreads:
        """The rates of more threads, if products and elementwise operations become `gain` times as fast."""
        products = {
            name: tuple((width, gain * rate) for width, rate in points) for name, points in self.products.items()
        }
        elementwise = gain * self.elementwise_bytes_per_s
        return RatesAtThreads(threads, products, self.memory_bytes_per_s, elementwise, self.operation_s)

    def at_least(self, other: RatesAtThreads) -> RatesAtThreads:
        """These rates where they are better than those of `other`, else those: on a busy machine several threads can
        be measured as slower than one."""
        names = {*self.products, *other.products}
        products = {name: _better(self.products.get(name, ()), other.products.get(name, ())) for name in names}
        return RatesAtThreads(
            self.threads, products, max(self.memory_bytes_per_s, other.memory_bytes_per_s),
            max(self.elementwise_bytes_per_s, other.elementwise_bytes_per_s), min(self.operation_s, other.operation_s),
        )  # fmt: skip


def _better(one: ProductRates, other: ProductRates) -> ProductRates:
    first, second = dict(one), dict(other)
    return tuple((width, max(first.get(width, 0.0), second.get(width, 0.0))) for width in sorted({*first, *second}))


@dataclass(frozen=True)
class MachineRates:
    """What was measured on one machine.

    Attributes:
        device: "cpu", or the name of the GPU.
        rates: rates of one process by its number of threads, the fewest first.
        round_trip_s: seconds of a small message to another process of this machine and back, over loopback.
        wire_bytes_per_s: rate of large messages over loopback.
        busy: other processes used the machine meanwhile, so that rates of several threads are assumed and no prediction
            should compare numbers of processes.
    """

    device: str
    rates: tuple[RatesAtThreads, ...]
    round_trip_s: float
    wire_bytes_per_s: float
    busy: bool = False

    def better_of(self, other: MachineRates) -> MachineRates:
        """The better of both rates, for the same device and numbers of threads; busy only if both were."""
        rates = tuple(one.at_least(other.at(one.threads)) for one in self.rates)
        trip = min(self.round_trip_s, other.round_trip_s)
        wire = max(self.wire_bytes_per_s, other.wire_bytes_per_s)
        return MachineRates(self.device, rates, trip, wire, busy=self.busy and other.busy)

    def at(self, threads: int) -> RatesAtThreads:
        """The rates of a process with `threads` threads, interpolated between the measured numbers."""
        if threads <= self.rates[0].threads:
            return self.rates[0]
        for few, many in pairwise(self.rates):
            if threads < many.threads:
                return few.between(many, threads)
            if threads == many.threads:
                return many
        return self.rates[-1]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MachineRates:
        """The inverse of `to_json`, also after JSON made lists of tuples."""
        rates = tuple(
            RatesAtThreads(
                threads=int(row["threads"]),
                products={
                    name: tuple((int(width), float(rate)) for width, rate in points)
                    for name, points in row["products"].items()
                },
                memory_bytes_per_s=float(row["memory_bytes_per_s"]),
                elementwise_bytes_per_s=float(row["elementwise_bytes_per_s"]),
                operation_s=float(row["operation_s"]),
            )
            for row in record["rates"]
        )
        trip, wire = float(record["round_trip_s"]), float(record["wire_bytes_per_s"])
        return cls(str(record["device"]), rates, trip, wire, busy=bool(record["busy"]))


@dataclass(frozen=True)
class CalibrationFile:
    """The file of one machine's calibration: `CalibrationFile.of_this_machine(device).read()`."""

    path: Path

    @classmethod
    def of_this_machine(cls, device: str, *, folder: Path | None = None) -> CalibrationFile:
        """The file for this machine, device, CPU model, number of usable cores, and versions of torch and raytrain.

        Args:
            device: "cpu", or the name of the GPU.
            folder: the cache folder; None: `CACHE_VARIABLE`, else the user's cache folder.
        """
        facts = {
            "version": VERSION,
            "machine": socket.gethostname(),
            "cpu": cpu_description()[0],
            "cores": usable_cores()[0],
            "device": device,
            "versions": {name: _version(name) for name in ("torch", "raytrain")},
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return cls((folder or _cache_folder()) / f"calibration-{name}.json")

    def read(self) -> MachineRates | None:
        """The calibration; None if there is none, or if the file cannot be read."""
        try:
            return MachineRates.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def age_s(self) -> float:
        """Seconds since the file was written; 0 without one."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return 0.0

    def write(self, calibration: MachineRates) -> bool:
        """Write the file atomically; False if the folder cannot be written, which only costs the next run 2 s."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(calibration.to_json()), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True


def _cache_folder() -> Path:
    if configured := os.environ.get(CACHE_VARIABLE):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raytrain"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
