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
from typing import Any

import torch
import torch.nn.functional as F

from cluster.devices.calibration import CalibrationFile, MachineRates, ProductRates, RatesAtThreads
from cluster.devices.limits import cpu_description, usable_cores
from raytrain.train.precision.policy import policy_for

ROWS = 1024
"""Rows of a measured matrix product: tokens of a small micro-batch."""

MAPS = 2
"""Linear maps of a measured network."""

WIDTHS = (64, 128, 256, 512)
REPEATS = 3
BUDGET_S = 2.0
POINT_S = 0.025
"""After this many seconds, no more than `REPEATS` repetitions of one measurement are made."""

STREAM_BYTES = 32 << 20
"""Size of the tensors for the memory rate: larger than a CPU's caches."""

AGAIN_S = 600.0
"""Seconds after which rates of a busy machine are measured again."""

CALM_S = 60.0
"""The same where the load of the machine has become low since."""

WAITED = 0.9
"""A thread that computed for less than this fraction of the time has waited for other processes to use its core."""

WAITED_TOGETHER = 0.8
"""The same for the first of several threads, which also wait for each other; another process on one of two cores leaves
it about two thirds."""

ASSUMED_GAIN = 0.5
"""What each further thread adds to the rates of one where several could not be measured."""

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
    """FLOPs per second of the matrix products of training in this process, with torch's current number of threads.

    Measured on forward and backward of linear maps with master weights, as a step computes them: with the casts, copies
    and transposed operands that a product alone does not have.

    Args:
        dtype: a value of `precision.dtype`.
        width: each map is (rows, width) by (width, width).
        budget_s: after this many seconds, no more than `REPEATS` repetitions are made.
    """
    policy = policy_for(dtype)
    like: dict[str, Any] = {"dtype": policy.master_dtype, "device": device}
    weights = [torch.full((width, width), 1.0 / width, requires_grad=True, **like) for _ in range(MAPS)]
    start = torch.ones(rows, width, requires_grad=True, **like)
    before = torch.get_float32_matmul_precision()

    def train() -> None:
        value = start
        with policy.autocast(device):
            for weight in weights:
                value = F.linear(value, weight)
        value.backward(value.detach())

    torch.set_float32_matmul_precision(policy.matmul)
    try:
        spent = _best(train, device, budget_s=budget_s)
    finally:
        torch.set_float32_matmul_precision(before)
    return 6.0 * MAPS * rows * width * width / spent


def memory_rate(device: torch.device) -> float:
    """Bytes per second of an operation on tensors that no cache holds, such as the update of an optimizer."""
    source = torch.ones(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2.0 * STREAM_BYTES / _best(lambda: torch.add(source, 1.0, out=target), device, budget_s=POINT_S)


def elementwise_rate(device: torch.device) -> float:
    """Bytes per second of what a network computes between its products, as `raytrain.train.compute.trace` counts them:
    forward and backward of a norm, an activation and a residual addition."""
    start = torch.ones(ROWS, 512, device=device, requires_grad=True)
    # forward: norm 2, activation 2, addition 3; backward: activation 3, norm 3, the sum of both gradients of x 3
    tensors = 16

    def train() -> None:
        value = start + F.gelu(F.layer_norm(start, (512,)))
        value.backward(value.detach())

    return tensors * start.nbytes / _best(train, device, budget_s=POINT_S)


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

    On a CPU the rates are measured with one thread and with all usable cores. Where other processes use the cores,
    several threads wait for each other, so that only one is measured and `ASSUMED_GAIN` gives the rates of all. The
    rates are marked as `busy` if the load says so before or afterwards, if a thread waited for a core while one or
    several were measured, or if the rates of several threads are below those of one.
    """
    deadline = time.perf_counter() + budget_s
    round_trip, wire = _loopback_or_assumed()
    cores = usable_cores()[0]
    several, busy = device.type == "cpu" and cores > 1, is_busy(cores)
    with _restored_threads():
        if device.type == "cpu":
            torch.set_num_threads(1)
        until = (time.perf_counter() + deadline) / 2 if several and not busy else deadline
        one, waited = _watched(device, 1, until=until)
        busy = busy or waited
        rates = [one]
        if several:
            every = one.with_threads(cores, gain=1 + ASSUMED_GAIN * (cores - 1))
            if not busy:
                torch.set_num_threads(cores)
                found, waited = _watched(device, cores, until=deadline)
                busy = waited or slower_together(one, found) or is_busy(cores)
                every = every if busy else found.at_least(one)
            rates.append(every)
    return MachineRates(_name(device), tuple(rates), round_trip, wire, busy=busy)


def _watched(device: torch.device, threads: int, *, until: float) -> tuple[RatesAtThreads, bool]:
    """The rates, and whether a thread waited for its core meanwhile; threads that feed a GPU may wait for it."""
    began, computed = time.perf_counter(), time.thread_time()
    found = _rates(device, threads, until=until)
    spent, computed_s = time.perf_counter() - began, time.thread_time() - computed
    return found, device.type == "cpu" and has_waited(spent, computed_s=computed_s, threads=threads)


def has_waited(spent_s: float, *, computed_s: float, threads: int = 1) -> bool:
    """Whether a thread that computes all the time did not have its core for a part of it: `computed_s` of CPU time in
    `spent_s` by the clock; `threads` compute together with it."""
    return computed_s < (WAITED if threads == 1 else WAITED_TOGETHER) * spent_s


def slower_together(one: RatesAtThreads, several: RatesAtThreads) -> bool:
    """Whether several threads multiply the widest matrices of any format that both have measured slower than one does:
    no machine does so, unless other processes use its cores."""
    for name, points in several.products.items():
        alone, together = dict(one.products.get(name, ())), dict(points)
        both = alone.keys() & together.keys()
        if both and together[max(both)] < alone[max(both)]:
            return True
    return False


def _rates(device: torch.device, threads: int, *, until: float) -> RatesAtThreads:
    memory, elementwise, operation = memory_rate(device), elementwise_rate(device), operation_seconds(device)
    return RatesAtThreads(threads, _products(device, until=until), memory, elementwise, operation)


def calibration_of_machine(device: torch.device, *, file: CalibrationFile | None = None) -> MachineRates:
    """The kept calibration of this machine with `device`, or a new one, which is then kept.

    One that was measured while other processes used the cores is measured again after `AGAIN_S`, or after `CALM_S` if
    the load is low by then. A measurement of an idle machine replaces it; of two of a busy one the better rates are
    kept.
    """
    file = file or CalibrationFile.of_this_machine(_name(device))
    known = file.read()
    if known is None or (known.busy and file.age_s() > (AGAIN_S if is_busy(usable_cores()[0]) else CALM_S)):
        found = calibrate(device)
        known = found if known is None or not found.busy else found.better_of(known)
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
            expected = 6.0 * MAPS * ROWS * width * width / points[-1][1] if points else 0.0
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
        if began > until and (repeat >= REPEATS or best > budget_s):
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
