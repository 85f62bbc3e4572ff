"""Measures the rates of this machine: matrix products by number format, memory, small operations, loopback.

Each figure is the best of a few repetitions, since other processes can only make a repetition slower. A full
calibration takes at most about two seconds; `calibration_of_machine` measures once and keeps the result in a file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from cluster.devices.calibration import CalibrationFile, MachineRates, ProductRates, RatesAtThreads
from cluster.devices.limits import cpu_description, usable_cores
from raytrain.train.precision.policy import policy_for

ROWS = 1024
"""Rows of a measured matrix product: tokens of a small micro-batch."""

WIDTHS = (64, 128, 256, 512, 1024)
REPEATS = 4
BUDGET_S = 2.0
POINT_S = 0.06
"""After this many seconds, no more than `REPEATS` repetitions of one measurement are made."""

STREAM_BYTES = 48 << 20
"""Size of the tensors for the memory rate: larger than a CPU's caches."""

OPERATIONS = 64
ROUND_TRIPS = 200
SMALL_BYTES, WIRE_BYTES = 64, 8 << 20

_ECHO = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(1 << 20):
    peer.sendall(data)
"""


def product_flops(
    device: torch.device, dtype: str, *, width: int = 512, rows: int = ROWS, budget_s: float = POINT_S
) -> float:
    """FLOPs per second of matrix products in this process, with torch's current number of threads.

    Args:
        dtype: a value of `precision.dtype`.
        width: the product is (rows, width) by (width, width).
        budget_s: no repetition starts after this many seconds.
    """
    policy = policy_for(dtype)
    kind = policy.autocast_dtype or policy.master_dtype
    left = torch.ones(rows, width, dtype=kind, device=device)
    right = torch.full((width, width), 1.0 / width, dtype=kind, device=device)
    out = torch.empty(rows, width, dtype=kind, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(policy.matmul)
    try:
        spent = _best(lambda: torch.mm(left, right, out=out), device, budget_s=budget_s)
    finally:
        torch.set_float32_matmul_precision(before)
    return 2.0 * rows * width * width / spent


def memory_rate(device: torch.device) -> float:
    """Bytes per second that an elementwise operation reads and writes."""
    source = torch.ones(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2.0 * STREAM_BYTES / _best(lambda: torch.add(source, 1.0, out=target), device, budget_s=POINT_S)


def operation_seconds(device: torch.device) -> float:
    """Seconds of one operation on a small tensor: the mean over forward and backward of a chain of operations."""
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    start = torch.ones(16, 16, device=device)

    def chain() -> None:
        value = start
        for _ in range(OPERATIONS // 2):
            value = torch.tanh(value + weight)
        value.sum().backward()

    # the backward of an addition is the accumulation of a gradient, that of tanh one operation
    return _best(chain, device, budget_s=POINT_S) / (2 * OPERATIONS)


def loopback() -> tuple[float, float]:
    """(seconds of a round trip of a small message, bytes per second) between two processes over TCP on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(BUDGET_S)
        port = server.getsockname()[1]
        # -S and -E: an interpreter without site-packages starts in a fraction of the time
        echo = subprocess.Popen([sys.executable, "-S", "-E", "-c", _ECHO, str(port)], stderr=subprocess.DEVNULL)
        try:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(BUDGET_S)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                small = sorted(_exchange(peer, SMALL_BYTES) for _ in range(ROUND_TRIPS))[ROUND_TRIPS // 2]
                large = min(_exchange(peer, WIRE_BYTES) for _ in range(3))
        finally:
            echo.kill()
            echo.wait()
    return small, 2.0 * WIRE_BYTES / max(large - small, 1e-6)


def _exchange(peer: socket.socket, size: int) -> float:
    """Seconds until `size` bytes have gone to the peer and come back; sends no more than half of a socket's buffer."""
    chunk = bytes(min(size, 1 << 16))
    began, sent, received = time.perf_counter(), 0, 0
    while received < size:
        while sent < size and sent - received < 2 * len(chunk):
            peer.sendall(chunk)
            sent += len(chunk)
        received += len(peer.recv(1 << 20))
    return time.perf_counter() - began


def calibrate(device: torch.device, *, budget_s: float = BUDGET_S) -> MachineRates:
    """Measure this machine with `device`; torch's settings are unchanged afterwards.

    On a CPU the rates are measured with one thread and with all usable cores.
    """
    deadline = time.perf_counter() + budget_s
    round_trip, wire = _loopback_or_assumed()
    cores = usable_cores()[0]
    counts = (1,) if device.type == "cuda" else tuple(sorted({1, cores}))
    rates = []
    with _restored_threads():
        for threads in counts:
            if device.type == "cpu":
                torch.set_num_threads(threads)
            memory, operation = memory_rate(device), operation_seconds(device)
            share = (deadline - time.perf_counter()) / (len(counts) - len(rates))
            products = _products(device, until=time.perf_counter() + share)
            found = RatesAtThreads(threads, products, memory, operation)
            rates.append(found.at_least(rates[-1]) if rates else found)
    return MachineRates(_name(device), tuple(rates), round_trip, wire, busy=is_busy(cores))


def calibration_of_machine(device: torch.device, *, file: CalibrationFile | None = None) -> MachineRates:
    """The kept calibration of this machine with `device`, or a new one, which is then kept.

    One that was measured while other processes used the cores is measured again; the better rates are kept.
    """
    file = file or CalibrationFile.of_this_machine(_name(device))
    known = file.read()
    if known is None or known.busy:
        found = calibrate(device)
        known = found if known is None else found.better_of(known)
        file.write(known)
    return known


def is_busy(cores: int) -> bool:
    """Whether other processes use more than half of the cores; False where the system does not say."""
    try:
        return os.getloadavg()[0] > 1 + cores / 2
    except OSError:
        return False


def formats_of(device: torch.device) -> Sequence[str]:
    """Number formats worth measuring on a device, those that jobs use most first."""
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return ("bf16", "fp16", "tf32", "fp32", "fp64") if major >= 8 else ("fp16", "fp32", "fp64")
    return ("fp32", "bf16", "fp64") if any(cpu_description()[1].values()) else ("fp32", "fp64")


def _products(device: torch.device, *, until: float) -> dict[str, ProductRates]:
    """Rates by format. Wide products that the time does not allow are left out; each format has at least one."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in formats_of(device)}
    for width in WIDTHS:
        for name, points in found.items():
            expected = 2.0 * ROWS * width * width / points[-1][1] if points else 0.0
            if time.perf_counter() + 2 * expected < until or not points:
                points.append((width, product_flops(device, name, width=width)))
    return {name: tuple(points) for name, points in found.items()}


def _best(work: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """Seconds of the fastest of a few repetitions, after one that is not counted."""
    work()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    synchronize()
    best, until = float("inf"), time.perf_counter() + budget_s
    for repeat in range(64):
        began = time.perf_counter()
        if repeat >= REPEATS and began > until:
            break
        if repeat and began + best > until + budget_s:
            break
        work()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _nothing() -> None:
    """A CPU computes while it is called."""


def _loopback_or_assumed() -> tuple[float, float]:
    try:
        return loopback()
    except OSError:  # a sandbox without sockets or processes
        return 1e-4, 1e9


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
